"""Full disks, folders that cannot be written, broken features: one sentence, exit code 2, and nothing lost."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import World, is_mistake, listing, ran, started, write_yaml

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave about so many bytes of a file system free."""
    with (disk / "filler").open("wb", buffering=0) as stream:
        try:
            while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > leave:
                stream.write(b"\0" * 4096)
        except OSError:
            pass  # full


@pytest.mark.parametrize("leave", [0, 4096, 16384])
def test_no_space_for_the_result(world: World, tmp_path: Path, small_disk: Path, leave: int) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="paper", fit={"steps": 2}, budget=1))
    fill(small_disk, leave)
    before = listing(small_disk)
    is_mistake(ran("calibrate", run, "--out", small_disk / "out"), "No space left", str(small_disk))
    assert listing(small_disk) == before


def test_no_space_keeps_the_old_result(world: World, tmp_path: Path, small_disk: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="paper", fit={"steps": 2}, budget=1))
    out = small_disk / "out"
    assert ran("calibrate", run, "--out", out).code == 0
    fill(small_disk, 0)
    before = listing(small_disk)
    is_mistake(ran("calibrate", run, "--out", out), "No space left", str(out))
    assert listing(small_disk) == before
    assert ran("info", out).code == 0


@pytest.mark.parametrize("leave", [0, 8192, 65536])
def test_no_space_for_features(
    world: World, tmp_path: Path, small_disk: Path, leave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEDARTS_CACHE", str(small_disk / "cache"))
    fill(small_disk, leave)
    run = write_yaml(tmp_path / "darts.yml", world.run("code", "maths"))
    is_mistake(ran("calibrate", run, "--out", tmp_path / "out"), "No space left")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["darts.yml", "disk"]
    # What the store kept is whole: with space, the same command ends well.
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = ran("calibrate", run, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert not [p for p in (small_disk / "cache").rglob("*") if p.name.endswith(".tmp")]


def test_no_space_for_a_merge(world: World, small_disk: Path) -> None:
    fill(small_disk, 32768)
    before = listing(small_disk)
    is_mistake(ran("merge", world.root / "models" / "merge.yml", small_disk / "out"), "No space left", str(small_disk))
    assert listing(small_disk) == before


def test_a_limit_on_the_size_of_files(world: World, tmp_path: Path) -> None:
    """As `ulimit -f` sets it: Python ignores the signal, and writing fails."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = started(world.cache, "merge", world.root / "models" / "merge.yml", tmp_path / "out", preexec_fn=limited)
    is_mistake(done, "No space left", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="surgery", fit={"steps": 2}, budget=1))
    (tmp_path / "file").write_text("x")
    before = listing(tmp_path)
    for target in (tmp_path / "file" / "out", tmp_path / ("x" * 300), Path("/proc/out"), Path("/dev/null/x")):
        is_mistake(ran("calibrate", run, "--out", target), str(target)[:60])
        is_mistake(ran("merge", world.root / "models" / "merge.yml", target), str(target)[:60])
    assert listing(tmp_path) == before


def test_a_cache_that_cannot_be_written(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code"))
    (tmp_path / "file").write_text("x")
    before = listing(tmp_path)
    for cache in (tmp_path / "file" / "cache", Path("/proc/cache")):
        monkeypatch.setenv("MERGEDARTS_CACHE", str(cache))
        is_mistake(ran("calibrate", run, "--out", tmp_path / "out"), str(cache))
        assert listing(tmp_path) == before


def test_out_of_awkward_shape(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="surgery", fit={"steps": 2}, budget=1))
    deep = tmp_path / "new" / "deep" / "out"
    assert ran("calibrate", run, "--out", deep).code == 0
    assert ran("calibrate", run, "--out", f"{deep}/").code == 0
    odd = tmp_path / "a b é 🙂 [red]x[/red]"
    done = ran("calibrate", run, "--out", odd)
    assert done.code == 0, done.err
    assert "[red]x[/red]" in done.out.replace("\n", "")
    assert ran("info", odd).code == 0
    os.symlink(deep, tmp_path / "link")
    assert ran("calibrate", run, "--out", tmp_path / "link").code == 0
    assert ran("info", tmp_path / "link").code == 0
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    assert ran("calibrate", run, "--out", tmp_path / "dangling").code in (0, 2)
    here = tmp_path / "here"
    here.mkdir()
    is_mistake(ran("calibrate", run, "--out", ".", cwd=tmp_path))
    done = ran("calibrate", run, "--out", ".", cwd=here)
    assert done.code in (0, 2), done.err
    assert not list(tmp_path.rglob(".*.tmp"))
    assert not list(tmp_path.rglob(".*.old"))


# -------------------------------------------------------------------------------------------------- the feature store


def test_broken_features_are_said_or_made_again(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    assert ran("calibrate", run, "--out", tmp_path / "out").code == 0
    before = listing(tmp_path)
    files = [p for p in sorted(fresh_cache.rglob("*")) if p.is_file() and "digests" not in p.parts]
    one_a_kind = {re.sub(r"\d+", "", p.name) + p.parent.parent.name: p for p in files}
    for path in one_a_kind.values():
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        done = ran("calibrate", run, "--out", tmp_path / "out2")
        if done.code:
            is_mistake(done, str(fresh_cache))
            assert listing(tmp_path) == before
        shutil.rmtree(tmp_path / "out2", ignore_errors=True)
        path.unlink()
        done = ran("calibrate", run, "--out", tmp_path / "out2")
        if done.code:
            is_mistake(done)
        shutil.rmtree(tmp_path / "out2", ignore_errors=True)
        path.write_bytes(whole)


def test_a_killed_run_is_taken_up(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """Every moment of death: after each file that appears in the store, the next run ends well and alike."""
    import mergedarts.store

    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    real = os.replace
    deaths = 0
    for survive in range(1, 60, 8):
        shutil.rmtree(fresh_cache, ignore_errors=True)
        count = 0

        def dying(*args: Any) -> None:
            nonlocal count
            count += 1
            if count > survive:  # noqa: B023
                raise KeyboardInterrupt
            real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mergedarts.store.os, "replace", dying)
            killed = ran("calibrate", run, "--out", tmp_path / "out")
        if killed.code == 0:
            break
        assert killed.code == 130
        deaths += 1
        assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]
        after = ran("calibrate", run, "--out", tmp_path / "out")
        assert after.code == 0, after.err
        shutil.rmtree(tmp_path / "out")
    assert deaths > 2
