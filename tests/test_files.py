"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from mergedarts import files
from mergedarts.errors import UserError
from mergedarts.files import (
    cache_dir,
    check_replaceable,
    digest_files,
    digest_text,
    new_folder,
    read_json,
    readable_os_errors,
    write_text,
)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def make(target, text="new", marker="m"):
    with new_folder(target, marker) as folder:
        (folder / "m").write_text(text)
        (folder / "deep").mkdir()
        (folder / "deep" / "x").write_text(text)


def test_a_new_folder_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "a" / "b" / "out"
    with new_folder(target) as folder:
        (folder / "m").write_text("1")
        assert not target.exists()
        assert folder.parent == target.parent
    assert tree(tmp_path) == {"a/b/out/m": "1"}
    assert stat.S_IMODE(target.stat().st_mode) & 0o700 == 0o700


def test_a_result_is_replaced_whole(tmp_path):
    target = tmp_path / "out"
    make(target, "old")
    (target / "left over").write_text("x")
    make(target)
    assert tree(tmp_path) == {"out/deep/x": "new", "out/m": "new"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [False, True], ids=["nothing there", "a result there"])
def test_an_exception_leaves_things_as_they_were(tmp_path, error, before):
    target = tmp_path / "out"
    if before:
        make(target, "old")
    kept = tree(tmp_path)

    def fail():
        with new_folder(target, "m") as folder:
            (folder / "m").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert tree(tmp_path) == kept
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if before else [])


def test_a_rename_that_fails_leaves_the_old_result(tmp_path, monkeypatch):
    """The old folder has been put aside already when the new one cannot take its place."""
    target = tmp_path / "out"
    make(target, "old")
    real = Path.replace

    def replace(self, to):
        if Path(to) == target and self.name.endswith(".tmp"):
            raise OSError(errno.EIO, "no")
        return real(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises((OSError, UserError)):
        make(target)
    monkeypatch.undo()
    assert target.is_dir()
    assert tree(target) == {"deep/x": "old", "m": "old"}


def test_an_empty_folder_may_be_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert tree(tmp_path) == {"out/deep/x": "new", "out/m": "new"}


def test_folders_of_others_are_left_alone(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.tex").write_text("years")
    for marker in ("m", None):
        with pytest.raises(UserError, match=f"{target} exists and is not a result"):
            make(target, marker=marker)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; name a folder"):
        make(tmp_path / "file")
    assert tree(tmp_path) == {"file": "x", "out/thesis.tex": "years"}
    check_replaceable(tmp_path / "nothing", None)


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


def test_digest_of_files(tmp_path):
    def digest(contents):
        root = tmp_path / digest_text(repr(contents))
        root.mkdir(exist_ok=True)
        for name, text in contents.items():
            (root / name).write_text(text)
        return digest_files([root / n for n in contents], root)

    base = digest({"a": "1", "b": "2"})
    assert digest({"b": "2", "a": "1"}) == base  # neither order nor folder counts
    others = [
        digest(c) for c in ({"a": "1", "b": "3"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}, {"a": "1"}, {"a": "12"})
    ]
    assert len({base, *others}) == 6


def test_digest_of_a_changed_file_is_made_anew(tmp_path):
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    assert digest_files([path], tmp_path) == first
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    second = digest_files([path], tmp_path)
    assert second != first
    path.write_text("one")
    assert digest_files([path], tmp_path) == first


def test_digests_are_remembered(tmp_path, monkeypatch):
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    monkeypatch.setattr(files, "_digest_stream", lambda stream: pytest.fail("read twice"))
    assert digest_files([path], tmp_path) == first


def test_a_broken_memory_of_a_digest_is_not_trusted(tmp_path, own_cache):
    path = tmp_path / "w"
    path.write_text("one")
    first = digest_files([path], tmp_path)
    for known in (own_cache / "digests").iterdir():
        known.write_text("half")
    assert digest_files([path], tmp_path) == first


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
