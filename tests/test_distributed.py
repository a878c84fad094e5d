"""What processes share, by two of them; how sequences are dealt, and what needs one process."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as multiprocessing

from mergedarts import distributed
from mergedarts.config import parse_run
from mergedarts.errors import UserError
from mergedarts.fit import check_processes
from mergedarts.job import DomainJob, Job
from mergedarts.models import ModelRef, pick_device
from tests.tiny import prompt_set


def test_one_process_gives_back_what_it_is_given(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed.group(), distributed.together():
        tensor = torch.arange(3, dtype=torch.float64)
        assert distributed.add_up(tensor)[0] is tensor
        assert distributed.total(2) == 2
        assert distributed.gather("a") == ["a"]
        assert distributed.every([1, 2]) == [1, 2]
        assert distributed.first("b") == "b"
        assert (distributed.size(), distributed.rank()) == (1, 0)


def work(rank, port, folder):
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with distributed.group():
        sums = distributed.add_up(torch.full((2, 2), rank + 1.0).double(), torch.tensor(10.0 * rank).double())
        result = {
            "size": (distributed.size(), distributed.rank()), "sums": [s.tolist() for s in sums],
            "total": distributed.total(rank + 0.5), "every": distributed.every([rank, "x"]),
            "first": distributed.first(f"from {rank}"),
        }  # fmt: skip
        said = None
        try:
            with distributed.together():
                if rank == 1:
                    raise UserError("only here.")
        except UserError as error:
            said = str(error)
        except SystemExit as stop:
            said = stop.code
        torch.save(result | {"said": said}, folder / f"{rank}.pt")
        if rank == 0:
            os._exit(0)  # what others wait for


@pytest.mark.slow
def test_two_processes(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (port, tmp_path), nprocs=2)
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (zero.pop("size"), one.pop("size")) == ((2, 0), (2, 1))
    assert (zero.pop("said"), one.pop("said")) == ("only here.", 2)
    want = {"sums": [[[3.0, 3.0], [3.0, 3.0]], 10.0], "total": 2.0, "every": [0, "x", 1, "x"], "first": "from 0"}
    assert zero == one == want


@pytest.fixture
def two(monkeypatch):
    """As if this were one of two processes; returns what sets which."""
    monkeypatch.setattr("mergedarts.job.size", lambda: 2)
    monkeypatch.setattr("mergedarts.fit.size", lambda: 2)
    monkeypatch.setattr(distributed, "size", lambda: 2)
    return lambda rank: monkeypatch.setattr("mergedarts.job.rank", lambda: rank)


def domain(lengths, unanswered=()):
    return DomainJob("a", ModelRef("m"), "m", prompt_set(lengths), 8, unanswered)


def test_sequences_are_dealt_evenly_and_splits_are_those_of_the_whole(two, monkeypatch):
    from mergedarts.prompts import split

    lengths = (9, 3, 8, 8, 2, 7, 5, 9, 4, 6, 5, 3)
    whole = domain(lengths, unanswered=(1, 4, 7))
    shares = []
    for rank in range(2):
        two(rank)
        shares.append(whole.share(0.25, 0))
    places = [set(share.places) for share in shares]
    assert places[0] | places[1] == set(range(12))
    assert not places[0] & places[1]
    fitted, held = split(12, 0.25, 0)
    monkeypatch.setattr("mergedarts.job.total", lambda n: 12)
    tokens = []
    for share in shares:
        assert [whole.prompts.sequences[i] for i in share.places] == list(share.prompts.sequences)
        assert {share.places[i] for i in share.unanswered} == {1, 4, 7} & set(share.places)
        mine = [[share.places[i] for i in part] for part in share.split(0.25, 0)]
        assert mine == [[i for i in part if i in share.places] for part in (fitted, held)]
        tokens.append(share.prompts.tokens)
    assert abs(tokens[0] - tokens[1]) <= max(lengths)


def test_too_few_sequences_for_the_processes(two):
    two(0)
    with pytest.raises(UserError, match="too few for 2 processes"):
        domain((5, 5, 5)).share(0.2, 0)
    assert len(domain((5, 5, 5)).share(0, 0).places) > 0


@pytest.mark.parametrize(
    ("correction", "fine"),
    [({"svd_share": 0}, True), ({"sites": "final"}, False), ({"form": "svd"}, False), ({"svd_share": 0.5}, False)],
    ids=str,
)
def test_fits_that_need_one_process_say_so(two, correction, fine):
    run = parse_run({"merged": "m", "domains": {"a": {"expert": "e", "prompts": "p"}}, "correction": correction})
    job = Job(run, ModelRef("m"), "m", torch.float32, torch.device("cpu"), frozenset(), ())
    if fine:
        check_processes(job)
    else:
        with pytest.raises(UserError, match="in depth only"):
            check_processes(job)


@pytest.mark.parametrize(("number", "want"), [(None, "cuda"), ("0", "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")])
def test_each_process_of_a_launcher_takes_a_gpu_of_its_own(number, want, monkeypatch):
    """On a stand-in for a machine with two GPUs, which no machine here has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", number)
    assert pick_device("auto") == torch.device(want)
