"""What a Ray task asks for and what it must find where it runs; Ray itself is in `tests/e2e/test_ray.py`."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mergedarts import __version__, fanout
from mergedarts.cli.main import spelled_out
from mergedarts.config import parse_run
from mergedarts.domains import Clock
from mergedarts.errors import UserError
from mergedarts.files import cache_dir
from mergedarts.job import DomainJob, Job
from mergedarts.models import ModelRef, fingerprint
from mergedarts.progress import collected, warn
from mergedarts.shared import Shared
from tests.tiny import prompt_set, tiny

GB = 1 << 30


@pytest.mark.parametrize(
    ("nodes", "tasks", "memory", "gpu", "want"),
    [
        ([{"CPU": 8, "memory": 9 * GB}], 3, GB, False, {"num_cpus": 2, "memory": GB}),
        ([{"CPU": 2, "memory": 9 * GB}], 3, GB, False, {"num_cpus": 1, "memory": GB}),
        ([{"CPU": 8, "memory": 9 * GB}], 1, 12 * GB, False, {"num_cpus": 8, "memory": 9 * GB}),
        ([{"CPU": 4, "memory": GB}, {"CPU": 4, "memory": 2 * GB}], 1, 3 * GB, True, {"num_cpus": 4, "memory": 2 * GB}),
        ([{"CPU": 4}, {"CPU": 4, "GPU": 2, "memory": GB}], 2, GB, True, {"num_cpus": 4, "num_gpus": 1}),
        ([{"CPU": 4, "GPU": 2}], 2, GB, False, {"num_cpus": 2}),
    ],
)
def test_what_a_task_asks_for_is_to_be_had(nodes, tasks, memory, gpu, want):
    assert fanout.share(nodes, tasks, memory, gpu) == want


def test_a_cluster_without_cpus():
    with pytest.raises(UserError, match="has no CPUs"):
        fanout.share([{"GPU": 1.0}], 2, GB, True)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (["calibrate", "x.yml", "--ray"], ["calibrate", "x.yml", "--ray", "local"]),
        (["calibrate", "--ray", "x.yml", "--out", "o"], ["calibrate", "--ray", "local", "x.yml", "--out", "o"]),
        (["calibrate", "--ray", "--out", "a:b"], ["calibrate", "--ray", "local", "--out", "a:b"]),
        (["calibrate", "--ray", "auto"], ["calibrate", "--ray", "auto"]),
        (["calibrate", "--ray", "host:6379", "x.yml"], ["calibrate", "--ray", "host:6379", "x.yml"]),
        (["generate", "--prompt", "ray"], ["generate", "--prompt", "ray"]),
    ],
)
def test_ray_may_be_said_without_an_address(given, want):
    assert spelled_out(given) == want


def test_ray_and_a_launcher_are_refused(monkeypatch):
    fanout.check_alone()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="leave out '--ray', or start one process"):
        fanout.check_alone()


@pytest.fixture
def job(tmp_path):
    """Of one domain, its models in folders."""
    refs = []
    for seed in (0, 1):
        tiny("llama", seed=seed).save_pretrained(tmp_path / f"model-{seed}")
        refs.append(ModelRef(str(tmp_path / f"model-{seed}")))
    run = parse_run({"merged": "m", "domains": {"a": {"expert": "e", "prompts": "p"}}})
    domain = DomainJob("a", refs[1], fingerprint(refs[1]), prompt_set((5, 6)), 8, ())
    return Job(run, refs[0], fingerprint(refs[0]), torch.float32, torch.device("cpu"), frozenset(), (domain,))


def origin(token="token", version=__version__):
    return fanout.Origin(version, "driver", str(cache_dir()), token)


def test_a_machine_with_all_that_is_needed(job, tmp_path, monkeypatch):
    """The cache folder of where the run was started is used, or the shared place is what counts."""
    start = origin()
    (cache_dir() / "token").write_text("")
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "own"))
    fanout.check_here(job, job.domains[0], start, "there")
    assert os.environ["MERGEDARTS_CACHE"] == start.cache
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "own"))
    shared = Shared.opened(str(tmp_path / "shared"), tmp_path)
    (tmp_path / "shared" / "token").write_text("")
    fanout.check_here(replace(job, shared=shared), job.domains[0], start, "there")
    assert os.environ["MERGEDARTS_CACHE"] == str(tmp_path / "own")


def test_what_a_machine_lacks_is_said(job, tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEDARTS_CACHE", str(cache_dir()))
    domain = job.domains[0]

    def said(job, domain, start):
        with pytest.raises(UserError) as caught:
            fanout.check_here(job, domain, start, "there")
        return str(caught.value)

    assert "On there mergedarts" in said(job, domain, origin(version="0.0"))
    assert f"store {cache_dir()} is not found on there" in said(job, domain, origin("nothing"))
    shared = Shared.opened(str(tmp_path / "shared"), tmp_path)
    (cache_dir() / "token").write_text("")
    assert f"store {tmp_path}/shared is not found on there" in said(replace(job, shared=shared), domain, origin())
    changed = replace(domain, expert_print="another")
    assert f"{domain.expert} on there is another" in said(job, changed, origin())
    (tmp_path / "model-1").rename(tmp_path / "moved")
    assert f"model {domain.expert} is not found on there" in said(job, domain, origin())


def test_a_task_tells_a_mistake_from_a_bug(job, monkeypatch):
    report = fanout._task(job, 0, replace(origin("nothing"), host=socket.gethostname()), 1)
    assert report.outcome is None
    assert report.mistake.startswith("The feature store")
    assert fanout._task(job, 0, origin(version="0"), 1).mistake.startswith("On ")
    monkeypatch.setattr(fanout, "check_here", lambda *args: (_ for _ in ()).throw(MemoryError("allocate 5 bytes")))
    assert "memory ran out" in fanout._task(job, 0, origin(), 1).mistake
    monkeypatch.setattr(fanout, "check_here", lambda *args: (_ for _ in ()).throw(KeyError("bug")))
    with pytest.raises(KeyError):
        fanout._task(job, 0, origin(), 1)


def test_warnings_are_kept_for_another_process(capsys):
    with collected() as outer:
        warn("one")
        with collected() as inner:
            warn("two")
    assert (outer, inner) == (["one"], ["two"])
    assert capsys.readouterr().err == ""


def test_the_token_is_where_features_are_and_goes(job, tmp_path):
    shared = Shared.opened(str(tmp_path / "shared"), tmp_path)
    for made, place in ((job, cache_dir()), (replace(job, shared=shared), tmp_path / "shared")):
        with fanout._token(made) as token:
            assert (place / token).is_file()
        assert not [path for path in (*cache_dir().iterdir(), *Path(shared.url).iterdir()) if path.name == token]


def test_without_ray(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'mergedarts\[ray\]'"):
        fanout.repair_domains(job, "local", Clock())


def test_a_store_in_memory_is_no_store_for_tasks(job):
    with pytest.raises(UserError, match="memory of one process"):
        fanout.repair_domains(replace(job, shared=Shared("memory://x")), "local", Clock())
