"""Memory that runs out: the batch is halved and tried again, down to one sequence, then said in one sentence.

Knows how torch, Python and the devices say that memory is out, and how much there is; knows nothing of models.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from .errors import UserError
from .progress import warn

T = TypeVar("T")

_SAYS_SO = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|not enough memory|out of memory|Cannot allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_TRIED = re.compile(r"allocate (?P<size>[\d.]+) ?(?P<unit>bytes|[KMG]i?B)", re.IGNORECASE)
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class OutOfMemoryError(UserError):
    """Memory that does not suffice for the smallest piece of the work."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is out: Python's, a device's, or torch's on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_SAYS_SO.search(str(error)))


def wanted_bytes(error: BaseException) -> int | None:
    """How much an allocation that failed asked for, where the error says it."""
    found = _TRIED.search(str(error))
    return int(float(found["size"]) * _UNITS[found["unit"][0].lower()]) if found else None


def in_words(size: int) -> str:
    """A size in GiB or MiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{max(1, round(size / (1 << 20)))} MiB"


def out_of_memory(error: BaseException, what: str) -> OutOfMemoryError:
    """The sentence for a user; `what` is what could not be done."""
    size = wanted_bytes(error)
    asked = "" if size is None else f" ({in_words(size)} more were asked for, {in_words(free_memory())} are free here)"
    return OutOfMemoryError(
        f"{what}: memory ran out{asked}; set a smaller 'max_tokens' or a smaller 'dtype', use another device, or free "
        "some memory."
    )


def by_halves(
    batches: Iterable[list[int]], run: Callable[[list[int]], T], lengths: Callable[[int], int], title: str
) -> Iterator[tuple[list[int], T]]:
    """Run batches of sequences one by one; one that memory does not suffice for is run by halves.

    Later batches are cut to what has fitted since. What `run` did on a batch that failed must not count.

    Args:
        run: called with indices of sequences.
        lengths: tokens of a sequence.
        title: of the work, for the sentence.

    Yields:
        The indices that were run, and what came of it.

    Raises:
        OutOfMemoryError: a single sequence is too much.
    """
    most: int | None = None  # padded tokens that may be too many
    pending: list[list[int]] = []
    for batch in batches:
        pending.append(batch)
        while pending:
            part = pending.pop()
            size = len(part) * max(map(lengths, part))
            if len(part) > 1 and most is not None and size >= most:
                pending += _halves(part)
                continue
            failure: BaseException | None = None
            try:
                result = run(part)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # whose frames hold what filled the memory
            if failure is None:
                yield part, result
                continue
            free_cached()
            if len(part) == 1:
                raise out_of_memory(failure, f"{title}: one sequence of {lengths(part[0])} tokens") from None
            if most is None:
                warn(f"{title}: memory ran out at {len(part)} sequences ({size} tokens) at a time; trying fewer.")
            most = size
            pending += _halves(part)


def _halves(part: list[int]) -> list[list[int]]:
    """The two halves, the first of them last, so that it is taken first."""
    return [part[(len(part) + 1) // 2 :], part[: (len(part) + 1) // 2]]


def free_cached() -> None:
    """Give back what is held for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory(device: torch.device | None = None) -> int:
    """Bytes that this process may still take: on a CUDA device, or of the main memory within its control group."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        group = Path("/sys/fs/cgroup") / ("" if limit == "memory.max" else "memory")
        with suppress(OSError, ValueError):
            # What the kernel caches of files is counted as used and given back when asked for.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left = [int((group / name).read_text()) for name in (limit, used)]
            free = min(free, left[0] - left[1] + int(stat.get("inactive_file", 0)))
    with suppress(ImportError, ValueError):
        import resource

        limit_, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit_ != resource.RLIM_INFINITY:
            free = min(free, limit_ - psutil.Process().memory_info().vms)
    return max(0, free)
