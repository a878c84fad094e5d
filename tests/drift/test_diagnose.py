"""Planted drifts are found as what they are, at the right place and of the right size."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mergedarts.prompts import PromptSet, TokenSequence
from tests.drift.planted import planted
from tests.tiny import D, prompt_set


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def value(point, measure):
    return point.measures[measure].value


def test_a_constant_vector_from_position_20_on():
    v = 0.05 * torch.randn(D, generator=generator())  # too short to be read off h itself by a linear map
    drift, _ = planted(lambda h, p, e: h + v * (p >= 20)[:, None])
    domain = drift.domains["code"]
    points = domain.models["merged"].axes["position"]
    size = float(v.abs().mean())
    for point in points:
        if point.high <= 20:
            assert value(point, "drift") == 0
            assert value(point, "kl") < 1e-9
            assert value(point, "cosine") == 1
        elif point.low >= 20:
            assert value(point, "drift") == pytest.approx(size, rel=1e-5)
            assert value(point, "kl") > 1e-6
    assert sum(p.high <= 20 for p in points) > 5
    assert sum(p.low >= 20 for p in points) > 3
    found = domain.systematic
    assert found.constant.low > 0.9, "all but the bin that holds positions 19 to 22"
    assert found.constant.value > found.linear.value + 0.1
    assert found.both.value > 0.9
    for point in found.by_position:
        if 23 <= point.low < 38:  # a bin of few fitted tokens lies nearer the mean of all
            assert value(point, "constant") > 0.95
    answer = drift.answers["position"]
    assert answer.answer == "yes"
    assert answer.sentence.startswith("Does the drift grow with position? Yes: the drift rises by ")
    assert f"{domain.tokens:,} tokens of 12 sequences" in answer.sentence


def test_a_low_rank_map_everywhere():
    a, b = torch.randn(D, 4, generator=generator(1)), torch.randn(4, D, generator=generator(2))
    # h = h* + A B h* with a small map, so that e = h* - h is a rank-4 map of h.
    drift, _ = planted(lambda h, p, e: h + 0.02 * h @ (a @ b).T)
    found = drift.domains["code"].systematic
    assert found.linear.low > 0.95
    assert found.constant.high < 0.4
    assert found.both.value > 0.95
    assert found.rank == 16
    assert found.fitted_sequences == 20
    for point in found.by_position:
        assert value(point, "linear") > 0.9
    assert drift.answers["position"].answer == "no"


def test_noise_at_high_entropy_alone():
    prompts = prompt_set(tuple(30 + (7 * i) % 20 for i in range(32)), None)
    nats = 4 * torch.rand(prompts.tokens, generator=generator(3)) ** 2
    noise = 0.5 * torch.randn(prompts.tokens, D, generator=generator(4))
    drift, _ = planted(lambda h, p, e: h + noise * (e > 1)[:, None], prompts, entropy=nats)
    domain = drift.domains["code"]
    for point in domain.models["merged"].axes["entropy"]:
        if point.low < 1:
            assert value(point, "drift") == 0
        else:
            assert value(point, "drift") == pytest.approx(0.5 * math.sqrt(2 / math.pi), rel=0.1)
    for point in domain.models["merged"].axes["position_entropy"]:
        low = float(point.band.split("-")[0].rstrip("+"))
        assert (value(point, "kl") > 0.001) == (low >= 1)
    assert domain.high_entropy_kl == pytest.approx(1)
    for share in (domain.systematic.constant, domain.systematic.linear, domain.systematic.both):
        assert share.value < 0.1, "noise is not systematic; a score on fitted sequences would say it is"
    assert drift.answers["entropy"].answer == "yes"
    assert drift.answers["position"].answer == "no"
    assert "carry 100% of the KL" in drift.answers["entropy"].sentence


def test_no_drift_at_all():
    drift, _ = planted(lambda h, p, e: h.clone(), repair=lambda h: h.clone())
    domain = drift.domains["code"]
    overall = domain.models["merged"].overall.measures
    assert (overall["drift"].value, overall["relative"].value, overall["cosine"].value) == (0, 0, 1)
    assert overall["agreement"].value == 1
    assert overall["kl"].value == pytest.approx(0, abs=1e-9)
    assert domain.systematic.both.value is None
    assert domain.closed["drift"].value is None
    assert [a.answer for a in drift.answers.values()] == ["no", "no"]
    json.dumps(drift.to_json(), allow_nan=False)


def test_a_repair_is_paired_with_what_it_repairs():
    v = torch.randn(D, generator=generator())
    drift, _ = planted(lambda h, p, e: h + v, repair=lambda h: h - 0.75 * v)
    closed = drift.domains["code"].closed["drift"]
    assert closed.value == pytest.approx(0.75, rel=1e-4)
    assert closed.low == pytest.approx(closed.high, rel=1e-4)
    assert "After the repair:" in drift.answers["position"].sentence
    for item in drift.domains["code"].disagreements:
        assert item.kl["repaired"] < item.kl["merged"]
        assert list(item.top) == ["expert", "merged", "repaired"]


def test_two_tokens_a_sequence():
    prompts = PromptSet(tuple(TokenSequence((i + 3, i + 4), (True, False)) for i in range(12)))
    drift, _ = planted(lambda h, p, e: h + 0.1, prompts, fitted=4)
    domain = drift.domains["code"]
    assert (domain.tokens, domain.sequences) == (8, 8)
    assert [p.label for p in domain.models["merged"].axes["position"]] == ["0"]
    assert drift.answers["position"].answer == "unknown"
    assert "all measured tokens have the same position" in drift.answers["position"].sentence
    json.dumps(drift.to_json(), allow_nan=False)


def test_one_sequence_has_no_interval():
    prompts = prompt_set((30, 40), 10)
    drift, _ = planted(lambda h, p, e: h + 0.1 * torch.sin(h), prompts, fitted=1)
    domain = drift.domains["code"]
    assert domain.models["merged"].overall.measures["drift"].low is None
    assert all(p.measures["drift"].low is None for p in domain.models["merged"].axes["position"])
    assert "1 sequence is too few to tell" in drift.answers["position"].sentence
    assert drift.answers["entropy"].answer == "unknown"


def test_huge_outlier_dimensions():
    """A dimension a million times the others: values stay finite, and drift is what it is."""
    scale = torch.ones(D)
    scale[3] = 1e6

    def change(h, p, e):
        return h + 0.1 * scale

    drift, _ = planted(change)
    domain = drift.domains["code"]
    assert domain.models["merged"].overall.measures["drift"].value == pytest.approx(
        float((0.1 * scale).abs().mean()), rel=1e-3
    )
    assert domain.systematic.constant.value > 0.95
    json.dumps(drift.to_json(), allow_nan=False)


def test_the_measured_are_not_the_fitted():
    """A random direction for each fitted sequence alone says nothing of the others."""
    prompts = prompt_set((40,) * 26, None)
    own = torch.randn(26, D, generator=generator(5))[torch.from_numpy(prompts.sequence_index())]
    drift, _ = planted(lambda h, p, e: h + own, prompts)
    assert drift.domains["code"].systematic.constant.value < 0.2
