"""One at a time: who works on a folder, and what the dead left behind.

Knows locks (of the operating system, so that a dead owner's is free), owners by host and process id, and the names of
temporary files; knows nothing of what is made.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from .checksums import read_checked, write_checked
from .files import TEMPORARY, cache_dir, digest_text, host_token, readable_os_errors
from .progress import warn

#: Seconds between two looks at a lock that another holds.
POLL = 0.2


@contextmanager
def claim(place: Path) -> Iterator[None]:
    """Hold a place alone, among all processes of this cache folder; waits for another owner, whom it names.

    May be nested by the same process. What dead processes left in the cache is swept at the first claim.
    """
    place = Path(os.path.realpath(place))
    folder = cache_dir() / "locks"
    with readable_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep_once(cache_dir())
        lock = FileLock(folder / f"{digest_text(str(place))}.lock", is_singleton=True)
        owner = folder / f"{digest_text(str(place))}.owner"
        try:
            lock.acquire(blocking=False)
        except Timeout:
            warn(f"waiting for {_said(owner)}, which works on {place}.")
            lock.acquire(poll_interval=POLL)
    try:
        with readable_os_errors(folder):
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def made_once(path: Path, work: Callable[[], str]) -> str:
    """A text that is kept on disk with its checksum: made where it is missing, by one process alone."""
    if not path.is_file():
        with claim(path):
            if not path.is_file():
                write_checked(path, work())
    return read_checked(path)


def _said(owner: Path) -> str:
    """Who says to hold a lock; the owner writes its name just after it has it."""
    for _ in range(10):
        with suppress(OSError, UnicodeDecodeError):
            if text := owner.read_text(encoding="utf-8")[:200].strip():
                return text
        time.sleep(0.02)
    return "another process"


@cache
def _sweep_once(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sweep(Path(folder))


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders of dead processes of this host from a folder (those for `name` alone).

    A folder that was put aside for a new one that never came takes its place again.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        found = TEMPORARY.fullmatch(entry.name)
        if found is None or (name is not None and found["name"] != name[: len(found["name"])]):
            continue
        path = Path(entry.path)
        if found["host"] != host_token() or _lives(int(found["pid"]), path):
            continue
        with suppress(OSError):
            target = folder / (name or found["name"])
            if found["kind"] == "old" and not target.exists():
                path.replace(target)
            elif entry.is_dir(follow_symlinks=False):
                shutil.rmtree(path)
            else:
                path.unlink()


def _lives(pid: int, path: Path) -> bool:
    """Whether the process that made a file still runs: one of its number that is not younger than the file."""
    try:
        return pid == os.getpid() or psutil.Process(pid).create_time() <= path.lstat().st_ctime + 1
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True
