"""The feature store: hidden states and entropies on disk, keyed by the content of model and prompts.

Knows files and keys; does not know how the features are made. Every file is a safetensors file that appears whole and
carries a checksum, which is compared once in a process before the file is used. Behind it there may be a shared place,
with what other machines have made.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .checksums import CRC, check_seal, seal
from .claims import claim
from .errors import NoSpaceError, UserError
from .files import NO_SPACE, cache_dir, digest_text, readable_os_errors, temporary_prefix, umask
from .progress import bar
from .shared import Shared
from .streaming import mapped

if TYPE_CHECKING:
    from .prompts import PromptSet

VERSION = "4"
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class FeatureStore:
    """Features of one model on one set of sequences.

    Args:
        model: fingerprint of the model.
        prompts: digest of the sequences.
        dtype: of the forward pass; part of the key, since it changes the features.
        shared: where files are looked for that are missing here, and put that are missing there.
    """

    def __init__(self, model: str, prompts: str, dtype: torch.dtype, shared: Shared | None = None) -> None:
        self.path = cache_dir() / "features" / digest_text(VERSION, model, prompts, str(dtype))
        self.shared = shared
        self._folder = f"features/{self.path.name}"

    def is_local(self, name: str) -> bool:
        """Whether a name need not be fetched to be read."""
        return (self.path / f"{name}.safetensors").is_file()

    def has(self, name: str) -> bool:
        return not self.missing([name])

    def missing(self, names: Sequence[str]) -> list[str]:
        """Which of some names are neither here nor in the shared place."""
        missing = [name for name in names if not self.is_local(name)]
        if missing and self.shared is not None:
            there = self.shared.names(self._folder)
            missing = [name for name in missing if f"{name}.safetensors" not in there]
        return missing

    @contextmanager
    def making(self, *names: str) -> Iterator[list[str]]:
        """Which of some names are missing; while any is, no other process makes features of this store.

        When the block ends well, the shared place gets what it lacks.
        """
        if self.missing(names):
            with claim(self.path):
                yield self.missing(names)
        else:
            yield []
        self._share()

    def _share(self) -> None:
        """Put every file of this store that the shared place lacks there, in the order in which they were made."""
        if self.shared is None:
            return
        there = self.shared.names(self._folder)
        lacking = [path for path in self.path.glob("*.safetensors") if path.name not in there]
        if not lacking:
            return
        with bar(f"features to {self.shared}", len(lacking), "files") as advance:
            for path in sorted(lacking, key=lambda path: (path.stat().st_mtime_ns, path.name)):
                self.shared.put(f"{self._folder}/{path.name}", path)
                advance(1)

    def _checked(self, name: str) -> Path:
        """The file of a name, fetched where it is in the shared place alone; a broken one is a `UserError`."""
        path = self.path / f"{name}.safetensors"
        if self.shared is not None and not path.is_file():
            self.shared.fetch(f"{self._folder}/{path.name}", path, check_seal)
        check_seal(path)
        return path

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors stored under a name; a broken file is a `UserError` that names it."""
        return load_tensors(self._checked(name), "remove it, and it will be made again")

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """The open file of a name, whose tensors are read when asked for; a broken one is a `UserError`."""
        path = self._checked(name)
        try:
            opened = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise _broken(path, error, "remove it, and it will be made again") from None
        with opened as stored:
            yield stored

    @contextmanager
    def reading(self, names: list[str]) -> Iterator[Callable[[str, int, int], torch.Tensor]]:
        """Yields a function of name, first row and end row: those rows of the tensor `hidden`, read when asked for."""
        with ExitStack() as stack:
            slices = {name: stack.enter_context(self.opened(name)).get_slice("hidden") for name in names}
            yield lambda name, start, stop: slices[name][start:stop]

    def rows(self, name: str, prompts: PromptSet, chosen: list[int]) -> torch.Tensor:
        """[n, d] the states stored under a name, of some of the sequences they were made of; in a file, mapped."""
        hidden, offsets = self.load(name)["hidden"], prompts.offsets
        out = mapped((prompts.subset(chosen).tokens, hidden.shape[1]), hidden.dtype)
        start = 0
        for i in chosen:
            end = start + int(offsets[i + 1] - offsets[i])
            out[start:end] = hidden[offsets[i] : offsets[i + 1]]
            start = end
        return out

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_tensors(self.path / f"{name}.safetensors", tensors, CRC, seal)

    @contextmanager
    def writers(self, shapes: dict[str, tuple[int, int]], dtype: torch.dtype) -> Iterator[dict[str, RowWriter]]:
        """Open one file a name, each with a single tensor `hidden` of the given shape, to be filled by rows.

        The files take their names when the block ends well; nothing is kept otherwise.
        """
        opened: dict[str, RowWriter] = {}
        with readable_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                for name, shape in shapes.items():
                    opened[name] = RowWriter(self.path, name, shape, dtype)
                yield opened
                for writer in opened.values():
                    writer.finish()
            finally:
                for writer in opened.values():
                    writer.discard()


def digest_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Digest of names, types, shapes and bytes of some tensors."""
    whole = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


class RowWriter:
    """A safetensors file of one tensor `hidden` [rows, width] that is written row range by row range."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._target = folder / f"{name}.safetensors"
        self._width = shape[1]
        self._dtype = dtype
        size = shape[0] * shape[1] * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": CRC, "hidden": entry}).encode()
        header += b" " * (-len(header) % 8)
        self._start = 8 + len(header)
        self._handle, self._name = tempfile.mkstemp(prefix=temporary_prefix(name), suffix=".tmp", dir=folder)
        self._put(memoryview(struct.pack("<Q", len(header)) + header), 0)
        _reserve(self._handle, self._start + size)

    def write(self, row: int, values: torch.Tensor) -> None:
        """Write [n, width] values from a row on."""
        data = values.detach().to(self._dtype).contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        at = self._start + row * self._width * self._dtype.itemsize
        self._put(memoryview(data).cast("B"), at)

    def _put(self, rest: memoryview, at: int) -> None:
        while len(rest):
            done = os.pwrite(self._handle, rest, at)
            rest, at = rest[done:], at + done

    def finish(self) -> None:
        """The file takes its name; a second call does nothing."""
        if self._handle < 0:
            return
        os.close(self._handle)
        self._handle = -1
        seal(Path(self._name))
        os.replace(self._name, self._target)

    def discard(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        Path(self._name).unlink(missing_ok=True)


def _reserve(handle: int, size: int) -> None:
    """Make a file so long, its place on the disk taken before the work that fills it begins."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
            return
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
    os.truncate(handle, size)


def save_tensors(
    path: Path,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    finish: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a safetensors file beside `path`, let `finish` work on it, and rename it."""
    with readable_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=temporary_prefix(path.name), suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, temporary, metadata=metadata)
            finish(temporary)
            temporary.chmod(0o666 & ~umask())
            os.replace(temporary, path)
        except SafetensorError as error:
            raise_if_full(error, path)
            raise
        finally:
            temporary.unlink(missing_ok=True)


def raise_if_full(error: SafetensorError, path: Path) -> None:
    """Say in one sentence that safetensors met a full disk, a quota or a limit on file size."""
    if any(f"os error {number})" in str(error) for number in NO_SPACE):
        raise NoSpaceError(path) from None


def load_tensors(path: Path, mend: str) -> dict[str, torch.Tensor]:
    """Read a safetensors file; `mend` ends the sentence where it is missing or broken."""
    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {mend}.") from None
    except (SafetensorError, OSError) as error:
        raise _broken(path, error, mend) from None


def _broken(path: Path, error: Exception, mend: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file ({str(error).splitlines()[0][:120]}); {mend}.")
