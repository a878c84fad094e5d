"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from mergedarts import files
from mergedarts.errors import UserError
from mergedarts.files import (
    cache_dir,
    digest_text,
    read_json,
    readable_os_errors,
    write_text,
)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_write_text_replaces_or_leaves(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "a.json"
    write_text(path, "é1")
    assert path.read_bytes() == "é1".encode()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask

    def fail(*_args):
        raise RuntimeError

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(RuntimeError):
        write_text(path, "2")
    assert tree(tmp_path) == {"deep/a.json": "é1"}


def test_read_json(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match="a.json is missing"):
        read_json(path)
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}
    for bad in (b"{", b"\xff", b""):
        path.write_bytes(bad)
        with pytest.raises(UserError, match="a.json is not valid JSON"):
            read_json(path)


def test_digest_of_texts():
    texts = [("a",), ("b",), ("ab",), ("a", "b"), ("", "ab"), ("ab", "")]
    assert len({digest_text(*t) for t in texts}) == 6
    assert digest_text("a", "b") == digest_text("a", "b")
    assert set(digest_text("é")) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "No space left to write"), (errno.EDQUOT, "No space left"), (errno.EFBIG, "No space left"),
     (errno.EACCES, "cannot be written"), (errno.EROFS, "cannot be written")],
)  # fmt: skip
def test_errors_of_the_system_become_sentences(tmp_path, number, words):
    with pytest.raises(UserError, match=words) as caught, readable_os_errors(tmp_path / "out"):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path / "out") in str(caught.value)


def test_other_errors_keep_their_traceback(tmp_path):
    with pytest.raises(OSError, match="odd"), readable_os_errors(tmp_path):
        raise OSError(errno.EIO, "odd")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"
    monkeypatch.delenv("MERGEDARTS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "mergedarts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "mergedarts"
