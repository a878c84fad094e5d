"""Distances, places and means in bins against loops over tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mergedarts.drift import tokens
from mergedarts.drift.bins import entropy_bins, position_bins
from mergedarts.drift.bootstrap import Resampler
from mergedarts.drift.tokens import Places, axes, distances, overall, points
from mergedarts.prompts import PromptSet, TokenSequence


def test_distances_by_hand(monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 3)
    g = torch.Generator().manual_seed(0)
    h, e = torch.randn(8, 5, generator=g), torch.randn(8, 5, generator=g)
    e[2], h[4], e[5] = h[2], 0.0, 0.0
    got = distances(h, e)
    for t in range(8):
        a, b = h[t].tolist(), e[t].tolist()
        off, size = sum(abs(x - y) for x, y in zip(a, b, strict=True)), sum(map(abs, b))
        assert got["drift"][t] == pytest.approx(off / 5, rel=1e-6)
        norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
        if size:
            assert got["relative"][t] == pytest.approx(off / size, rel=1e-6)
        else:
            assert np.isnan(got["relative"][t])
        if norms:
            assert got["cosine"][t] == pytest.approx(sum(x * y for x, y in zip(a, b, strict=True)) / norms, abs=1e-6)
        else:
            assert np.isnan(got["cosine"][t])
    assert (got["drift"][2], got["relative"][2], got["cosine"][2]) == (0, 0, 1)


def test_equal_zero_states_are_no_drift():
    got = distances(torch.zeros(1, 4), torch.zeros(1, 4))
    assert [float(got[m][0]) for m in ("drift", "relative", "cosine")] == [0, 0, 1]


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_cosine_of_extreme_states(size):
    h, e = torch.tensor([[3.0, 4.0]]) * size, torch.tensor([[4.0, 3.0]]) * size
    assert float(distances(h, e)["cosine"][0]) == pytest.approx(24 / 25, abs=1e-6)


def held(*marks):
    """A stand-in for HeldOut of sequences given by their marks (1: predicts a response)."""
    prompts = PromptSet(tuple(TokenSequence(tuple(range(3, 3 + len(m))), tuple(map(bool, m))) for m in marks))
    counted = torch.from_numpy(prompts.predicts())
    return SimpleNamespace(
        prompts=prompts, counted=counted, sequence=torch.from_numpy(prompts.sequence_index()) + 10,
        entropy=torch.linspace(0, 3.5, prompts.tokens),
    )  # fmt: skip


def test_places():
    """Turns begin where a run of responses begins; what comes before a response belongs to its turn."""
    places = Places.of(held([0, 0, 1, 1, 0, 0, 1, 0], [1, 1, 0]))
    assert places.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert places.since.tolist() == [-1, -1, 0, 1, -1, -1, 0, 0, 1]
    assert places.turn.tolist() == [1, 1, 1, 1, 2, 2, 2, 1, 1]
    assert places.sequence.tolist() == [10] * 7 + [11] * 2
    assert places.counted.tolist() == [False, False, True, True, False, False, True, True, True]
    assert places.index.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def random_places(seed=0, sequences=6, longest=40):
    rng = np.random.default_rng(seed)
    marks = []
    for _ in range(sequences):
        m = rng.random(int(rng.integers(8, longest))) > 0.4
        m[-1] = False
        marks.append(m.tolist())
    return Places.of(held(*marks))


def test_axes_by_loops():
    places = random_places()
    rng = np.random.default_rng(1)
    n = len(places.position)
    values = {name: rng.normal(size=n) for name in ("drift", "relative", "cosine")}
    values["kl"] = np.where(places.counted, rng.normal(size=n), np.nan)
    values["relative"][3] = np.nan
    resampler = Resampler(places.sequence, 50)
    found = axes(places, values, resampler)
    last = int(places.position.max())

    def mean(name, chosen):
        kept = [values[name][t] for t in range(n) if chosen(t) and not np.isnan(values[name][t])]
        return float(np.mean(kept)) if kept else None

    def check(point, chosen):
        inside = [t for t in range(n) if chosen(t)]
        assert point.tokens == len(inside)
        assert point.sequences == len({int(places.sequence[t]) for t in inside})
        for name in values:
            want = mean(name, chosen)
            assert (point.measures[name].value if name in point.measures else None) == pytest.approx(want)

    position, entropy = {b.label: b for b in position_bins(last)}, {b.label: b for b in entropy_bins()}

    def inside(b, value):
        return b.low <= value and (b.high is None or value < b.high)

    for point in found["position"]:
        check(point, lambda t, b=position[point.label]: places.counted[t] and inside(b, places.position[t]))
    for point in found["since_prompt"]:
        check(point, lambda t, b=position[point.label]: places.counted[t] and inside(b, places.since[t]))
    for point in found["entropy"]:
        check(point, lambda t, b=entropy[point.label]: places.counted[t] and inside(b, places.entropy[t]))
    for point in found["position_entropy"]:
        check(
            point,
            lambda t, p=point, b=entropy[point.band]: (
                places.counted[t] and p.low <= places.position[t] < p.high and inside(b, places.entropy[t])
            ),
        )
    for point in found["prompt_position"]:
        assert "kl" not in point.measures
        b = position[point.label]
        assert point.tokens == sum(not places.counted[t] and inside(b, places.position[t]) for t in range(n))
    for axis, whole in (("position", places.counted), ("prompt_position", ~places.counted), ("turn", places.counted)):
        assert sum(p.tokens for p in found[axis]) == int(whole.sum())
    check(overall(places, values, resampler), lambda t: places.counted[t])


def test_single_turns_have_no_axis_of_turns():
    places = Places.of(held([0, 0, 1, 1, 0], [0, 1, 1, 0]))
    values = {name: np.ones(len(places.position)) for name in ("drift", "relative", "cosine", "kl", "agreement")}
    assert "turn" not in axes(places, values, Resampler(places.sequence))


def test_a_chat_of_eight_thousand_tokens():
    """Positions, turns and places in the response are right to the end."""
    turn = [0] * 300 + [1] * 500
    places = Places.of(held(turn * 10 + [0] * 192, turn * 10 + [0] * 192, [0, 1, 1, 0]))
    values = {name: np.ones(len(places.position)) for name in ("drift", "relative", "cosine", "kl", "agreement")}
    found = axes(places, values, Resampler(places.sequence, 100))
    assert [p.label for p in found["turn"]] == ["1", "2", "3", "4", "5-8", "9-16"]
    assert [p.tokens for p in found["turn"]] == [1002, 1000, 1000, 1000, 4000, 2000]
    assert int(places.since.max()) == 499
    assert found["position"][-1].low <= 7999 < found["position"][-1].high
    assert found["since_prompt"][-1].low <= 499 < found["since_prompt"][-1].high


def test_points_leave_out_empty_bins():
    bins = [(b, None) for b in position_bins(30)]
    index, chosen = np.array([0, 0, 5]), np.array([True, False, True])
    got = points(bins, index, chosen, {"drift": np.array([1.0, 2.0, 3.0])}, Resampler(np.array([0, 1, 1]), 20))
    assert [(p.label, p.tokens, p.measures["drift"].value) for p in got] == [("0", 1, 1.0), ("5", 1, 3.0)]
