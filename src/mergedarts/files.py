"""Files that appear whole or not at all: written beside the target, then renamed.

Knows temporary names, renames and digests; knows nothing of what is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import NoSpaceError, UserError

#: What a disk that is full, a quota and a limit on file size say.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EISDIR)


def cache_dir() -> Path:
    """Folder for what can be made again: `$MERGEDARTS_CACHE`, or `mergedarts` in the user's cache folder."""
    named = os.environ.get("MERGEDARTS_CACHE")
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mergedarts"
    return Path(os.path.abspath(folder.expanduser()))


@contextmanager
def new_folder(target: Path, marker: str | None = None) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, and is removed otherwise.

    `marker` names a file by which an existing `target` is known as ours, so that it may be replaced; without it, or
    where the file is missing, an existing folder with anything in it is a `UserError`.
    """
    check_replaceable(target, marker)
    with readable_os_errors(target):
        target = Path(os.path.realpath(target))  # a link keeps its place; what it points to is replaced
        made = _make_parents(target.parent)
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent))
        except BaseException:
            _remove_empty(made)
            raise
    try:
        with readable_os_errors(target):
            temporary.chmod(0o777 & ~_umask())
            yield temporary
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".old", dir=target.parent))
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


def is_file(path: Path) -> bool:
    """Whether a path is a file; false where its name is too long to be one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether a path exists; false where its name is too long to exist."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` by way of a temporary file in the same folder."""
    with readable_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """Parse a JSON file; a missing or broken one is a `UserError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); make it again.") from None


def digest_text(*parts: str) -> str:
    """A short hexadecimal digest of some strings, for names of cache folders."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def digest_files(paths: list[Path], root: Path) -> str:
    """Digest of the names (relative to `root`) and contents of files.

    A file's own digest is remembered by path, size and time of change, so that a model of many gigabytes is read once.
    """
    known = cache_dir() / "digests"
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        stat = path.stat()
        seen = digest_text(
            str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns), str(stat.st_ino)
        )
        try:
            digest = (known / seen).read_text(encoding="ascii")
        except OSError:
            digest = ""
        if len(digest) != 32:
            with path.open("rb") as stream:
                digest = _digest_stream(stream)
            write_text(known / seen, digest)
        whole.update(f"{path.relative_to(root)}\0{digest}\0".encode())
    return whole.hexdigest()


def _digest_stream(stream: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    while chunk := stream.read(1 << 22):
        digest.update(chunk)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def readable_os_errors(target: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoSpaceError(target) from None
        if error.errno in _NO_PLACE:
            raise UserError(f"{target} cannot be made there ({error.strerror}); name another folder.") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(f"{target} cannot be written ({error.strerror}); name a folder you may write to.") from None
        raise
