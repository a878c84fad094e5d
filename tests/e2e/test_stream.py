"""`calibrate --stream`: layers from disk, the same repaired model as in memory."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .conftest import DOMAINS, Ran, World, environment, ran, started, write_yaml

pytestmark = pytest.mark.slow


def same(a: Path, b: Path) -> None:
    """Corrections that agree to rounding; the products compared, since a low-rank pair may turn."""
    one, two = (load_file(folder / "corrections.safetensors") for folder in (a, b))
    assert one.keys() == two.keys()
    for name in one:
        if name.endswith("down.weight"):
            products = [t[name.removesuffix("down.weight") + "up.weight"] @ t[name] for t in (one, two)]
            torch.testing.assert_close(*products, atol=2e-3 * float(products[0].abs().max()), rtol=0)


def test_streamed_equals_in_memory(world: World, repaired: tuple[Path, Ran], tmp_path: Path, fresh_cache: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run(*DOMAINS))
    done = ran("calibrate", run, "--out", tmp_path / "out", "--json", "--stream")
    assert done.code == 0, done.err
    assert done.json["settings"]["stream"] is True
    gc.collect()
    assert list((fresh_cache / "scratch").iterdir()) == []
    for name, entry in done.json["domains"].items():
        plain = repaired[1].json["domains"][name]
        assert entry["shipped"]
        for which in ("merged", "repaired", "expert"):
            assert entry["held_out"][which] == pytest.approx(plain["held_out"][which], rel=2e-3, abs=1e-6)
    same(repaired[0], tmp_path / "out")


@pytest.mark.parametrize(
    "correction",
    [
        {"sites": "final", "rank": 4},
        {"form": "svd", "rank": 2},
        {"form": "linear", "sites": [1], "rank": 2, "svd_share": 0},
    ],
    ids=str,
)
def test_other_fits(world: World, tmp_path: Path, correction: dict[str, object]) -> None:
    found = []
    for stream in (True, False):
        settings = world.run("code", correction=correction, stream=stream, fit={"metric": "states"})
        run = write_yaml(tmp_path / f"{stream}.yml", settings)
        out = tmp_path / str(stream)
        done = ran("calibrate", run, "--out", out, "--json")
        assert done.code == 0, done.err
        found.append((out, done.json["domains"]["code"]["held_out"]["repaired"]["kl"]))
    assert found[0][1] == pytest.approx(found[1][1], rel=2e-3)
    same(found[0][0], found[1][0])


def test_a_run_that_was_killed_goes_on(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """Killed after the expert's second layer: what was finished is not run again."""
    run = write_yaml(tmp_path / "darts.yml", world.run("code", fit={"metric": "states"}, stream=True))
    code = (
        "import os, signal, sys; from mergedarts.store import RowWriter; own, n = RowWriter.finish, []\n"
        "def finish(self):\n"
        "    own(self); n.append(self)\n"
        "    if len(n) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "RowWriter.finish = finish\n"
        f"sys.argv = ['mergedarts', 'calibrate', {str(run)!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "from mergedarts.cli.main import run; run()"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], env=environment(fresh_cache), capture_output=True, timeout=300
    )
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()
    finished = {p: p.stat().st_mtime_ns for p in fresh_cache.rglob("layer-*.safetensors")}
    assert [p.name for p in sorted(finished)] == ["layer-0.safetensors", "layer-1.safetensors"]
    done = started(fresh_cache, "calibrate", run, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert {p: p.stat().st_mtime_ns for p in finished} == finished
    plain = started(fresh_cache, "calibrate", run, "--out", tmp_path / "plain", "--no-stream")
    assert plain.code == 0, plain.err
    same(tmp_path / "out", tmp_path / "plain")
