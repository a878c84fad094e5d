#!/bin/sh
# One GPU, at most five minutes: Llama-2-7B shapes with random weights made here, 50 x 512 tokens, one domain; prints
# seconds by stage and peak memory as JSON. Needs PyTorch with CUDA and `pip install transformers accelerate peft
# safetensors pydantic pyyaml typer rich scipy psutil mergekit gguf`; downloads nothing.
#   sh benchmarks/gpu.sh            on a GPU
#   DEVICE=cpu TINY=1 sh benchmarks/gpu.sh   the same with a tiny shape, to see that it runs
set -eu
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 exec "${PYTHON:-python3}" "$here/one_gpu.py"
