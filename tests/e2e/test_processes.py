"""`torchrun -m mergedarts.cli calibrate`: prompts over two processes, the same repaired model as by one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import DOMAINS, Ran, World, environment, ran, write_yaml

pytestmark = pytest.mark.slow


def launched(cache: Path, *args: object, processes: int = 2) -> subprocess.Popen[str]:
    """`torchrun` with the command, started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    command = [*launcher, "-m", "mergedarts.cli", "calibrate", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cache))


def finished(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=300)
    return Ran(process.returncode, out, err)


def settings(world: World, **changes: object) -> dict[str, object]:
    """What several processes can do: no weight updates."""
    return world.run(*DOMAINS, correction={"svd_share": 0}, **changes)


def test_two_processes_equal_one(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """Within 0.2% of each held-out measure: sums over tokens are taken in another order."""
    run = write_yaml(tmp_path / "darts.yml", settings(world))
    done = finished(launched(fresh_cache, run, "--out", tmp_path / "out", "--json"))
    assert done.code == 0, done.err
    config = done.json
    assert json.loads((tmp_path / "out" / "darts_config.json").read_text())["domains"] == config["domains"]
    plain = ran("calibrate", run, "--out", tmp_path / "plain", "--json").json
    for name, entry in plain["domains"].items():
        theirs = config["domains"][name]
        for key in ("prompts", "tokens", "sequences", "parameters", "shipped"):
            assert theirs[key] == entry[key], (name, key)
        for which in ("merged", "repaired", "expert"):
            assert theirs["held_out"][which] == pytest.approx(entry["held_out"][which], rel=2e-3, abs=1e-6)
    assert config["router"]["depth"] == plain["router"]["depth"]
    assert config["router"]["held_out"] == plain["router"]["held_out"]


def test_a_run_that_was_killed_goes_on(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """All ranks are killed while they stream; the layers that each has finished are not run again."""
    run = write_yaml(tmp_path / "darts.yml", world.run("code", correction={"svd_share": 0}, stream=True))
    process = launched(fresh_cache, run, "--out", tmp_path / "out", "--json")
    deadline = time.monotonic() + 200
    while len(made := list(fresh_cache.glob("features/*/layer-1.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(made) == 2
    assert not (tmp_path / "out").exists()
    times = {path: path.stat().st_mtime_ns for path in made}
    done = finished(launched(fresh_cache, run, "--out", tmp_path / "out", "--json"))
    assert done.code == 0, done.err
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_mistake_ends_all_processes(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", settings(world, fit={"holdout": 0.05}))
    done = finished(launched(world.cache, run, "--out", tmp_path / "out", "--json"))
    assert done.code != 0
    assert done.out == ""
    said = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.err
    assert "too few for 2 processes" in said[0]
    assert not (tmp_path / "out").exists()
