"""What a run will need of disk and memory, compared with what there is before the work begins.

Knows sizes of models and features; makes neither.
"""

from __future__ import annotations

import json
import shutil
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from .errors import NoSpaceError, UserError
from .files import cache_dir
from .memory import free_memory, in_words

if TYPE_CHECKING:
    from .job import Job

_LARGEST_HEADER = 100_000_000


def weight_count(root: Path) -> int:
    """Numbers in the safetensors files of a model folder, by their headers; a broken header counts as none."""
    return sum(prod(entry["shape"]) for path in root.glob("*.safetensors") for entry in _entries(path))


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size)) if size <= _LARGEST_HEADER else {}
        return [entry for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, AttributeError):
        return []


def check_memory(name: object, root: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `UserError` where a model's weights are larger than the memory that is free on a device."""
    need, free = weight_count(root) * dtype.itemsize, free_memory(device)
    if device.type == "cpu":
        free += int(psutil.swap_memory().free)
    if need > free:
        raise UserError(
            f"{name} needs {in_words(need)} of memory in {str(dtype).removeprefix('torch.')}, and {in_words(free)} are "
            f"free on {device}; choose a smaller 'dtype' or another device, or free some memory."
        )


def check_disk(place: Path, need: int) -> None:
    """Raise `NoSpaceError` where the disk of a place has fewer bytes free than are needed."""
    there = next(p for p in (place, *place.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise NoSpaceError(f"{place} ({in_words(need)} are needed, {in_words(free)} are free)")


def check_features(job: Job, layers: int, metrics: int) -> None:
    """Check the disk for the experts' features that a fit will put into the store.

    Args:
        job: the run.
        layers: decoder layers whose states are kept, beside the final ones.
        metrics: decoder layers whose metric is kept.
    """
    from .models import load_config

    width = int(load_config(job.merged).hidden_size)
    need = 0
    for domain in job.domains:
        asked = domain.prompts.subset(domain.unanswered)
        written = domain.unanswered and domain.rollout
        if written and job.store(domain.expert_print, asked).is_local(f"rollout-{domain.rollout}"):
            continue  # a run that is taken up: what is missing is reserved when it is made
        if not written and job.store(domain.expert_print, domain.prompts).is_local("final"):
            continue
        need += (layers + 1) * domain.prompts.tokens * width * job.dtype.itemsize
        need += metrics * width * width * torch.float32.itemsize
    check_disk(cache_dir(), need)
