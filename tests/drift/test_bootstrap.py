"""Ratios and intervals against resampled tokens laid out one after another."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mergedarts.drift.bootstrap import Resampler, draws


def sample(seed=0, n=60, sequences=7):
    rng = np.random.default_rng(seed)
    return rng.integers(0, sequences, n) * 5 + 1, rng.integers(0, 4, n), rng.normal(size=n), rng.random(n) > 0.3


def test_equals_resampled_tokens():
    sequence, bins, values, chosen = sample()
    resampler = Resampler(sequence, 200, seed=4)
    got = resampler.ratios(resampler.sums(values, bins, 4, chosen), resampler.sums(np.ones(60), bins, 4, chosen))
    ids = sorted(set(sequence.tolist()))
    for b in range(4):
        tokens = {i: [t for t in range(60) if sequence[t] == i and bins[t] == b and chosen[t]] for i in ids}
        whole = [t for i in ids for t in tokens[i]]
        assert got[b].value == pytest.approx(np.mean([values[t] for t in whole]), rel=1e-9)
        means = []
        for counts in draws(len(ids), 200, seed=4):
            drawn = [t for i, c in zip(ids, counts, strict=True) for _ in range(int(c)) for t in tokens[i]]
            if drawn:
                means.append(np.mean([values[t] for t in drawn]))
        assert (got[b].low, got[b].high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), rel=1e-9)


def test_draws_are_of_as_many_sequences():
    counts = draws(9, 500)
    assert counts.shape == (500, 9)
    assert (counts.sum(1) == 9).all()
    assert counts.mean() == pytest.approx(1)
    assert len({tuple(row) for row in counts}) > 450


def test_nothing_and_one_sequence():
    resampler = Resampler(np.array([3, 3, 8]))
    values, bins = np.array([1.0, 3.0, 9.0]), np.array([0, 0, 1])
    found = resampler.ratios(resampler.sums(values, bins, 3), resampler.sums(np.ones(3), bins, 3))
    assert [(e.value, e.low) for e in found] == [(2.0, None), (9.0, None), (None, None)]


def test_hundreds_of_bins_are_fast():
    rng = np.random.default_rng(0)
    sequence, bins = np.repeat(np.arange(100), 400), rng.integers(0, 600, 40_000)
    start = time.process_time()
    resampler = Resampler(sequence)
    found = resampler.ratios(
        resampler.sums(rng.normal(size=40_000), bins, 600), resampler.sums(np.ones(40_000), bins, 600)
    )
    assert time.process_time() - start < 5
    assert len(found) == 600
