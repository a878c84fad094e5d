"""Folders that appear whole or not at all, one writer at a time."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from mergedarts.errors import UserError
from mergedarts.folders import check_replaceable, new_folder


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
