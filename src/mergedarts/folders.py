"""Folders of results that appear whole or not at all, one writer at a time.

Knows temporary folders, renames, and by what an earlier result is known; knows nothing of what is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .claims import claim, sweep
from .errors import NoSpaceError, UserError
from .files import readable_os_errors, temporary_prefix, umask


@contextmanager
def new_folder(target: Path, marker: str | None = None) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, and is removed otherwise.

    `marker` names a file by which an existing `target` is known as ours, so that it may be replaced; without it, or
    where the file is missing, an existing folder with anything in it is a `UserError`. While the block runs, no other
    process of this cache folder writes there.
    """
    check_replaceable(target, marker)
    with readable_os_errors(target):
        target = Path(os.path.realpath(target))  # a link keeps its place; what it points to is replaced
    with claim(target):
        sweep(target.parent, target.name)
        check_replaceable(target, marker)
        with _replacing(target) as temporary:
            yield temporary


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    with readable_os_errors(target):
        made = _make_parents(target.parent)
        try:
            temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(target.name), suffix=".tmp", dir=target.parent))
        except BaseException:
            _remove_empty(made)
            raise
    try:
        with readable_os_errors(target):
            temporary.chmod(0o777 & ~umask())
            yield temporary
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=temporary_prefix(target.name), suffix=".old", dir=target.parent))
                target.replace(old)
                try:
                    temporary.replace(target)
                except BaseException:
                    old.replace(target)
                    raise
                shutil.rmtree(old)
            else:
                temporary.replace(target)
    except NoSpaceError:
        raise NoSpaceError(target) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and what is above it; returns what was made, deepest first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    """Take back folders that were made for nothing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def check_replaceable(target: Path, marker: str | None) -> None:
    """Raise `UserError` where `target` exists and is not an empty folder or one that holds `marker`."""
    with readable_os_errors(target):
        if not target.exists():
            return
    if not target.is_dir():
        raise UserError(f"{target} is a file; name a folder to write to.")
    ours = marker is not None and (target / marker).is_file()
    if not ours and any(target.iterdir()):
        raise UserError(f"{target} exists and is not a result of mergedarts; name another folder, or remove it first.")
