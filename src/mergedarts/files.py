"""Files that appear whole or not at all: written beside the target, then renamed.

Knows temporary names, what the system says of full disks and places it refuses; knows nothing of what is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import NoSpaceError, UserError

#: What a disk that is full, a quota and a limit on file size say.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: A temporary name: what it is for, who made it (host and process id), and whether it is new or an old one put aside.
TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d{1,10})\.[A-Za-z0-9_]{8}\.(?P<kind>tmp|old)", re.DOTALL
)
#: Bytes of a JSON file that is read whole.
MAX_JSON_BYTES = 1 << 28
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.EISDIR)


def cache_dir() -> Path:
    """Folder for what can be made again: `$MERGEDARTS_CACHE`, or `mergedarts` in the user's cache folder."""
    named = os.environ.get("MERGEDARTS_CACHE")
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mergedarts"
    return Path(os.path.abspath(folder.expanduser()))


def host_token() -> str:
    """This host in the names of temporary files."""
    return digest_text(socket.gethostname())[:8]


def temporary_prefix(name: str) -> str:
    """How the name of a temporary file or folder for `name` begins; `TEMPORARY` reads it."""
    short = os.fsencode(name)[:150].decode("utf-8", errors="ignore")
    return f".{short}.{host_token()}-{os.getpid()}."


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
        handle, name = tempfile.mkstemp(prefix=temporary_prefix(path.name), suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(name, 0o666 & ~umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """Parse a JSON file; a missing or broken one is a `UserError` that names it."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; is it the right file?")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, numbers of too many digits, or nested too deep
        raise UserError(f"{path} is not valid JSON ({str(error)[:160]}); make it again.") from None


def digest_text(*parts: str) -> str:
    """A short hexadecimal digest of some strings, for names of cache folders."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def umask() -> int:
    """Bits that new files and folders of this process do not get."""
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
