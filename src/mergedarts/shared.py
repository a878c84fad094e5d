"""What machines share of the feature store: a folder on any file system that fsspec knows, files put there whole.

Knows file systems by fsspec and says in one sentence what is wrong with one; knows nothing of what the files hold. They
are made, and mapped into memory, in the local store alone.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import NoSpaceError, UserError
from .files import NO_SPACE, readable_os_errors, temporary_prefix, umask

#: Where an object appears when it is whole, and folders are but the beginnings of names.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "ocilake", "obs", "tos"})
MARK = "README.txt"
_SAID = b"Features that mergedarts has stored. They can be deleted at any time and are then made again.\n"


@dataclass(frozen=True)
class Shared:
    """A folder of features that several machines reach.

    Args:
        url: as fsspec reads it, such as `s3://bucket/features`, or an absolute path.
    """

    url: str

    @classmethod
    def opened(cls, named: str | None, base: Path) -> Shared | None:
        """The place that a run file or `$MERGEDARTS_STORE` names, tried by a small file; None where neither does.

        Args:
            named: what the run file says.
            base: folder that a relative path in it is relative to; the variable's is relative to the working folder.

        Raises:
            UserError: fsspec does not know the protocol, lacks a package for it, or the place refuses.
        """
        variable = os.environ.get("MERGEDARTS_STORE")
        if named is None and not variable:
            return None
        text, folder = (named, base) if named is not None else (str(variable), Path.cwd())
        if "://" not in text and "::" not in text:
            text = os.path.abspath(folder / Path(text).expanduser())
        shared = cls(text)
        with shared._asked(shared):
            if not shared._fs.exists(shared._at(MARK)):
                shared._folder("")
                shared._fs.pipe_file(shared._at(MARK), _SAID)
        return shared

    def __str__(self) -> str:
        """The address without a password in it."""
        return re.sub(r"//[^/@]*@", "//", self.url)

    def named(self, key: str) -> str:
        """What a user calls a file."""
        return f"{str(self).rstrip('/')}/{key}"

    @cached_property
    def _fs(self) -> Any:
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.url)
        return fs, root.rstrip("/")

    def _at(self, key: str) -> str:
        return f"{self._found[1]}/{key}"

    def _is_object_store(self) -> bool:
        names = self._fs.protocol
        return not OBJECT_STORES.isdisjoint((names,) if isinstance(names, str) else names)

    def _folder(self, key: str) -> None:
        """Make a folder where there are folders; elsewhere it could make a bucket that was misspelt."""
        if not self._is_object_store():
            self._fs.makedirs(self._at(key).rstrip("/"), exist_ok=True)

    @contextmanager
    def _asked(self, place: object) -> Iterator[None]:
        """Say in one sentence what a file system says; `place` is what is full where a disk is."""
        try:
            yield
        except UserError:
            raise
        except ImportError as error:
            raise UserError(f"The store {self} needs a package that is not installed ({_first_line(error)}).") from None
        except Exception as error:  # file systems have exceptions of their own
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise NoSpaceError(place) from None
            if isinstance(error, ValueError) and "rotocol not known" in str(error):
                raise UserError(
                    f"The store {self} is of a kind that fsspec does not know; write a folder, or an address such as "
                    "s3://bucket/features."
                ) from None
            raise UserError(
                f"The store {self} cannot be used ({type(error).__name__}: {_first_line(error)}); check the address, "
                "and whether you may read and write there."
            ) from None

    def names(self, folder: str) -> set[str]:
        """Names of the files in a folder, as they are now; none where it is missing."""
        with self._asked(self):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return set()
            return {str(path).rstrip("/").rpartition("/")[2] for path in found}

    def has(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        return name in self.names(folder)

    def fetch(self, key: str, target: Path, check: Callable[[Path], object]) -> None:
        """Copy a file to a local path: beside it, checked, and renamed; nothing happens where it is missing.

        Raises:
            UserError: the place cannot be read, or `check` does not take the file, which is then named as here.
        """
        if not self.has(key):
            return
        with readable_os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=temporary_prefix(target.name), suffix=".tmp", dir=target.parent)
            os.close(handle)
        temporary = Path(name)
        try:
            with self._asked(target):
                self._fs.get_file(self._at(key), name)
            try:
                check(temporary)
            except UserError as error:
                raise UserError(str(error).replace(name, self.named(key))) from None
            temporary.chmod(0o666 & ~umask())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, key: str, source: Path) -> None:
        """Copy a local file there: under a temporary name and moved, or at once where an object appears when whole."""
        folder, _, name = key.rpartition("/")
        beside = f"{folder}/" if folder else ""
        with self._asked(self.named(key)):
            if self._is_object_store():
                self._fs.put_file(str(source), self._at(key))
                return
            self._folder(folder)
            temporary = self._at(f"{beside}.{name}.{uuid.uuid4().hex[:8]}.tmp")
            try:
                self._fs.put_file(str(source), temporary)
                self._fs.mv(temporary, self._at(key))
            except BaseException:
                if self._fs.exists(temporary):
                    self._fs.rm_file(temporary)
                raise

    def remove(self, key: str) -> None:
        """Remove a file that is there."""
        with self._asked(self.named(key)):
            self._fs.rm_file(self._at(key))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else "no reason given"
