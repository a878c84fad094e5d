"""What `gpu.sh` runs: one calibration of a Llama-2-7B shape with random weights, and two bare passes beside it.

The models are made on disk first (14 GB at full size, which also fills the page cache); that time is not counted.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from random_models import Shape, build, relative, write_prompts

from mergedarts import calibrate, parse_run
from mergedarts.cli.main import quiet_libraries
from mergedarts.features import final_states
from mergedarts.job import prepare

FULL = Shape(width=4096, layers=32, feed=11008, heads=32, groups=32, vocabulary=32000)
TINY = Shape(width=128, layers=3, feed=256, heads=2, groups=2, vocabulary=512)


def peak(device: str) -> int:
    """Bytes allocated at most on the device since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0


def main() -> None:
    quiet_libraries()
    device = os.environ.get("DEVICE", "cuda")
    tiny = bool(os.environ.get("TINY"))
    shape, count, length = (TINY, 8, 64) if tiny else (FULL, 50, 512)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MERGEDARTS_CACHE"] = str(folder / "cache")
        start = time.monotonic()
        build(folder / "merged", shape, device=device)
        relative(folder / "merged", folder / "expert", shape, [0], seed=1, share=0.3, device=device)
        write_prompts(folder / "prompts.jsonl", count, length)
        report = {"device": device, "parameters": shape.parameters, "build_seconds": time.monotonic() - start}
        run = parse_run(
            {
                "merged": str(folder / "merged"), "device": device, "router": False, "stream": False,
                "domains": {"one": {"expert": str(folder / "expert"), "prompts": str(folder / "prompts.jsonl")}},
            }
        )  # fmt: skip
        job = prepare(run, folder)
        model = job.load(job.merged)
        passes = []
        for _ in range(2):
            start = time.monotonic()
            final_states(model, job.domains[0].prompts, lambda batch, state: None, "bare pass")
            passes.append(time.monotonic() - start)
        report |= {"tokens": job.domains[0].prompts.tokens, "bare_passes_seconds": passes, "bare_peak": peak(device)}
        del model
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        config = calibrate(run, folder / "out")
        report |= {"seconds": time.monotonic() - start, "stages": config["seconds"], "peak_bytes": peak(device)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
