"""`calibrate --ray`: a Ray task for each domain, the same repaired model as without; Ray goes when the run goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mergedarts.fanout import _joined

from .conftest import World, environment, is_mistake, ran, write_yaml

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

FILES = ("corrections.safetensors", "router.safetensors")


def traces() -> set[str]:
    """Processes and temporary folders of Ray."""
    found = {str(path) for path in Path("/tmp").glob(".ray.*.tmp")}
    for process in psutil.process_iter(["name", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["name"] in ("raylet", "gcs_server") or line.startswith("ray::"):
            found.add(f"{process.pid} {line[:80]}")
    return found


def homes() -> set[Path]:
    return set(Path.home().glob(".ray*"))


@pytest.fixture(scope="module")
def cluster(world: World) -> Iterator[Any]:
    """A Ray as a run starts it, which the tests here share; it leaves no process and no file."""
    before, home = traces(), homes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with _joined("local") as ray:
            yield ray
    deadline = time.monotonic() + 60  # idle workers look now and then whether they are wanted
    while traces() - before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert traces() - before == set()
    assert homes() == home


def test_ray_repairs_as_one_process_does(
    world: World, cluster: Any, tmp_path: Path, fresh_cache: Path, request: pytest.FixtureRequest
) -> None:
    """Each task runs one thread, as this process does: the same bytes, by features made anew."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    run = write_yaml(tmp_path / "darts.yml", world.run("code", "maths"))
    by_ray = ran("calibrate", run, "--out", tmp_path / "ray", "--json", "--ray")
    assert by_ray.code == 0, by_ray.err
    assert len(list(fresh_cache.glob("features/*"))) >= 4
    assert [path.name for path in fresh_cache.iterdir() if path.name.startswith(".")] == []
    os.environ["MERGEDARTS_CACHE"] = str(tmp_path / "cache")  # what other tests left in theirs was made by more threads
    plain = ran("calibrate", run, "--out", tmp_path / "plain", "--json")
    one, other = by_ray.json, plain.json
    assert set(one.pop("seconds")) == set(other.pop("seconds")) | {"ray"}
    assert one == other
    assert by_ray.err == plain.err
    for name in FILES:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name


@pytest.mark.usefixtures("cluster")
def test_a_mistake_in_a_task_is_the_same_sentence(
    world: World, tmp_path: Path, fresh_cache: Path, copy_of: Any
) -> None:
    """Weights that are not numbers are found where they run."""
    from safetensors.torch import load_file, save_file

    broken = copy_of(Path(world.expert("code")), "broken")
    file = broken / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    settings = world.run("code", "maths")
    settings["domains"]["code"]["expert"] = str(broken)
    run = write_yaml(tmp_path / "darts.yml", settings)
    by_ray = ran("calibrate", run, "--out", tmp_path / "out", "--ray")
    is_mistake(by_ray)
    assert by_ray.err == ran("calibrate", run, "--out", tmp_path / "out").err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("cluster")
def test_a_bug_in_a_task_keeps_its_traceback(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    import ray

    from mergedarts import fanout
    from mergedarts.config import parse_run
    from mergedarts.job import prepare

    job = prepare(parse_run(world.run("code")), tmp_path)
    wrong = fanout.Origin("not", "a", "domain", "number")
    ref = ray.remote(fanout._task).remote(job, 7, wrong, 1)
    with pytest.raises(IndexError, match=r"(?s)fanout\.py.*in _task.*IndexError"):
        fanout._report(ray, ref.future(), "code")


@pytest.mark.usefixtures("cluster")
def test_a_task_whose_process_dies_is_said() -> None:
    import ray

    from mergedarts import fanout
    from mergedarts.errors import UserError

    ref = ray.remote(max_retries=0)(lambda: os._exit(9)).remote()
    with pytest.raises(UserError, match="that repaired domain 'code' died"):
        fanout._report(ray, ref.future(), "code")


def test_no_cluster_at_an_address(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(
        "ray.init", lambda **options: (_ for _ in ()).throw(ConnectionError(f"no {options['address']}"))
    )
    monkeypatch.setattr("ray.shutdown", lambda: None)
    run = write_yaml(tmp_path / "darts.yml", world.run())
    is_mistake(
        ran("calibrate", run, "--out", tmp_path / "out", "--ray", "host:1"), "does not answer at host:1 (no host"
    )


def test_ctrl_c_leaves_a_cluster_that_was_joined(world: World, cluster: Any, tmp_path: Path, fresh_cache: Path) -> None:
    """By another process that is given the address: its tasks end, the cluster goes on."""
    run = write_yaml(tmp_path / "darts.yml", world.run("chat", "maths"))
    address = cluster.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "mergedarts.cli", "calibrate", str(run), "--out", str(tmp_path / "out"), "--ray"]
    process = subprocess.Popen([*command, address], stderr=subprocess.PIPE, text=True, env=environment(fresh_cache))
    deadline = time.monotonic() + 200
    while not list(fresh_cache.glob("features/*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "goes on from what is in the feature store" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
    assert cluster.get(cluster.remote(lambda: 1).remote(), timeout=100) == 1
