"""Checksums of what is stored, and digests of files: a flipped byte is noticed before it is used.

Knows three carriers: `SHA256SUMS` beside the files of a folder (as `sha256sum -c` reads it), a CRC-32 in a safetensors
header, and a CRC-32 in a text's first line. Knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .errors import UserError
from .files import cache_dir, digest_text, write_text

SUMS = "SHA256SUMS"
#: What a safetensors header says of its own file, to be filled in when the file is whole.
CRC = {"crc32": "00000000"}
#: Bytes from which on a file's digest is remembered.
LEAST_REMEMBERED = 1 << 20
REMAKE = "remove it, and it will be made again"
_CHUNK = 1 << 22
_FIELD = re.compile(rb'"crc32":\s*"([0-9a-f]{8})"')
_LARGEST_HEADER = 100_000_000
_LARGEST_SUMS = 1 << 20

_checked: set[tuple[str, int, int, int]] = set()


# ------------------------------------------------------------------------------------------------- folders of results


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` over all files of a folder, sorted by name."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
    lines = [f"{digest_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    write_text(folder / SUMS, "".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """Digests by name from a folder's `SHA256SUMS`; empty where it has none."""
    path = folder / SUMS
    try:
        with path.open("rb") as stream:
            lines = stream.read(_LARGEST_SUMS).decode("utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, OSError):
        lines = ["?"]
    if not all(re.fullmatch(r"[0-9a-f]{64}  .+", line) for line in lines) or not lines:
        raise UserError(f"{path} is not a list of checksums; make the folder again.")
    return {line[66:]: line[:64] for line in lines}


def check_sum(folder: Path, name: str, mend: str) -> None:
    """Raise `UserError` where a file of a folder is not the one that its `SHA256SUMS` names; read anew each time."""
    if not (folder / name).is_file():
        raise UserError(f"{folder / name} is missing; {mend}.")
    sums = read_sums(folder)
    if name not in sums:
        raise UserError(f"{folder / SUMS} does not name {name}, so it cannot be checked; {mend}.")
    if hash_file(folder / name) != sums[name]:
        raise UserError(f"{folder / name} has changed since it was written (its checksum differs); {mend}.")


def digest_files(paths: list[Path], root: Path) -> str:
    """Digest of the names (relative to `root`) and contents of files, by each file's own digest.

    Raises:
        UserError: a file is not the one that `SHA256SUMS` beside it, or the hub's cache that it lies in, says.
    """
    sums = read_sums(root)
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        name, digest = path.relative_to(root).as_posix(), digest_file(path)
        known = sums.get(name) or _hub_digest(path)
        if known is not None and known != digest:
            place = f" Where the change is meant, remove {SUMS} beside it." if name in sums else ""
            raise UserError(f"{path} has changed since it was written (its checksum differs); make it again.{place}")
        whole.update(f"{name}\0{digest}\0".encode())
    return whole.hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file, remembered by inode, size and times, so that a model of many gigabytes is read once."""
    s = path.stat()
    if s.st_size < LEAST_REMEMBERED:
        return hash_file(path)
    key = digest_text(*(str(n) for n in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)))
    memory = cache_dir() / "digests" / key
    with suppress(UserError, OSError):
        return read_checked(memory)
    digest = hash_file(path)
    write_checked(memory, digest)
    return digest


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read in full."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in _chunks(stream):
            digest.update(chunk)
    return digest.hexdigest()


def _hub_digest(path: Path) -> str | None:
    """The SHA-256 by which the hub's cache names a large file that a snapshot links to."""
    target = Path(os.path.realpath(path))
    return target.name if target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name) else None


# --------------------------------------------------------------------------------------------- single files of a store


def seal(path: Path) -> None:
    """Put into a safetensors file that was saved with `CRC` in its metadata the CRC-32 of all else in it."""
    with path.open("r+b") as stream:
        at, crc = _crc(stream)
        stream.seek(at)
        stream.write(f"{crc:08x}".encode())


def check_seal(path: Path) -> None:
    """Raise `UserError` where a safetensors file is not as `seal` left it; read in full once in a process."""
    try:
        with path.open("rb") as stream:
            s = os.fstat(stream.fileno())
            key = (str(path), s.st_ino, s.st_size, s.st_mtime_ns)
            if key in _checked:
                return
            at, crc = _crc(stream)
            stream.seek(at)
            said = stream.read(8)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REMAKE}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); {REMAKE}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {REMAKE}.") from None
    if said != f"{crc:08x}".encode():
        raise UserError(f"{path} is damaged (its checksum differs); {REMAKE}.")
    _checked.add(key)


def _crc(stream: BinaryIO) -> tuple[int, int]:
    """Where the checksum of a safetensors file stands, and what it should be: over all bytes, its digits as zeros."""
    first = stream.read(8)
    size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    header = stream.read(size) if 0 < size <= _LARGEST_HEADER else b""
    if not header or len(header) != size:
        raise ValueError("its header is cut short")
    field = _FIELD.search(header)
    if field is None:
        raise ValueError("it carries no checksum")
    crc = zlib.crc32(first + header[: field.start(1)] + CRC["crc32"].encode() + header[field.end(1) :])
    for chunk in _chunks(stream):
        crc = zlib.crc32(chunk, crc)
    return 8 + field.start(1), crc


def write_checked(path: Path, text: str) -> None:
    """Write a text behind a line that holds its CRC-32."""
    write_text(path, f"{zlib.crc32(text.encode()):08x}\n{text}")


def read_checked(path: Path) -> str:
    """What `write_checked` wrote; anything else is a `UserError` that names the file."""
    try:
        said, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REMAKE}.") from None
    if said != f"{zlib.crc32(text):08x}".encode():
        raise UserError(f"{path} is damaged (its checksum differs); {REMAKE}.")
    return text.decode()


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk
