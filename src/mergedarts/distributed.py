"""Several processes at one job, as `torchrun` or `accelerate launch` starts them: sums and lists over all of them.

Knows torch.distributed (gloo) and the order of ranks; where there is one process, values are given back as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from .errors import UserError

T = TypeVar("T")

#: How long ranks wait for the slowest: a stage may take hours.
PATIENCE = timedelta(days=2)


@contextmanager
def group() -> Iterator[None]:
    """Join the other processes inside the block, where a launcher started more than one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or distributed.is_initialized():
        yield
        return
    distributed.init_process_group("gloo", timeout=PATIENCE)
    yield
    # After a failure the connections close when the process has said why and ends.
    distributed.destroy_process_group()


def size() -> int:
    """How many processes are at the job."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process; 0 writes and shows progress."""
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def add_up(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Sums over all ranks of float64 tensors on the CPU, by one all-reduce."""
    if size() == 1:
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    distributed.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


def total(number: float) -> float:
    """The sum of a number over all ranks."""
    return float(add_up(torch.tensor(number, dtype=torch.float64))[0])


def gather(value: T) -> list[T]:
    """The values of all ranks, in their order."""
    if size() == 1:
        return [value]
    out: list[T] = [value] * size()
    distributed.all_gather_object(out, value)
    return out


def every(values: list[T]) -> list[T]:
    """The members of all ranks' lists."""
    return [value for part in gather(values) for value in part]


def first(value: T) -> T:
    """Rank 0's value, on every rank: what each computed for itself may differ by rounding between machines."""
    if size() == 1:
        return value
    out = [value]
    distributed.broadcast_object_list(out, src=0)
    return out[0]


@contextmanager
def together() -> Iterator[None]:
    """A stage without sums: where it fails on some rank, it fails on all, and one of them says it.

    Raises:
        UserError: on rank 0, the first mistake of any rank.
        SystemExit: on the others, with the same exit code.
    """
    if size() == 1:
        yield
        return
    failed: BaseException | None = None
    try:
        yield
    except UserError as error:
        failed = error
    mistakes = [mistake for mistake in gather(str(failed) if failed else None) if mistake is not None]
    if mistakes and rank() == 0:
        raise UserError(mistakes[0]) from None
    if mistakes:
        # The launcher ends all ranks as soon as one has failed: rank 0 shall be the first.
        with suppress(RuntimeError):
            distributed.barrier()
        raise SystemExit(2)


def deal(lengths: list[int]) -> list[list[int]]:
    """Indices of sequences by rank, about the same number of tokens each: the longest first, to and fro."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    out: list[list[int]] = [[] for _ in range(size())]
    for turn, i in enumerate(order):
        lap, place = divmod(turn, size())
        out[place if lap % 2 == 0 else size() - 1 - place].append(i)
    return out
