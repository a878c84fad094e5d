"""Slopes against least squares on tokens laid out, and the sentences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mergedarts.drift.bootstrap import Estimate, draws
from mergedarts.drift.slopes import SlopeSums, _said, _sums, slope, verdict
from mergedarts.drift.types import Slope


def data(seed, sequences, beta, noise=0.5):
    rng = np.random.default_rng(seed)
    sequence = np.sort(rng.integers(0, sequences, sequences * 12))
    x = rng.normal(size=len(sequence)) + seed
    return sequence, x, beta * x + noise * rng.normal(size=len(sequence)) + 3


def test_one_domain_by_least_squares():
    sequence, x, y = data(0, 9, 0.7)
    found = slope([_sums(sequence, x, y)], "u")
    assert found.slope.value == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-9)
    assert found.mean == pytest.approx(y.mean())
    assert (found.tokens, found.sequences) == (len(x), len(set(sequence.tolist())))
    values = []
    for counts in draws(9, seed=0):
        weight = counts[sequence]
        values.append(np.polyfit(x, y, 1, w=np.sqrt(weight))[0])
    assert (found.slope.low, found.slope.high) == pytest.approx(tuple(np.percentile(values, [2.5, 97.5])), rel=1e-6)


def test_domains_keep_their_own_means():
    """Two domains far apart, each with slope 0.5: their distance is no slope."""
    a, b = data(0, 9, 0.5, 0.1), data(20, 9, 0.5, 0.1)
    b = (b[0], b[1], b[2] - 100)
    found = slope([_sums(*a), _sums(*b)], "u")
    assert found.slope.value == pytest.approx(0.5, abs=0.03)
    assert 0 < found.slope.high - found.slope.low < 0.1
    assert found.sequences == 18


@pytest.mark.slow
def test_interval_covers():
    """Sequences with slopes of their own: the interval holds the common one about as often as it says."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(150):
        own = 0.3 + 0.4 * rng.normal(size=30)
        sequence = np.repeat(np.arange(30), 10)
        x = rng.normal(size=300)
        found = slope([_sums(sequence, x, own[sequence] * x + 0.1 * rng.normal(size=300))], "u").slope
        hits += found.low <= 0.3 <= found.high
    assert 0.86 * 150 <= hits <= 149


def test_no_spread_is_no_slope():
    found = slope([_sums(np.arange(8), np.full(8, 2.5), np.arange(8.0))], "u")
    assert found.slope.value is None
    assert verdict(found) == "unknown"
    assert _said("position", found) == "Not known: all measured tokens have the same position"


def test_a_domain_of_one_sequence_gives_no_interval():
    one = _sums(np.zeros(5, dtype=int), np.arange(5.0), np.arange(5.0))
    many = _sums(*data(0, 9, 0.5))
    assert slope([one], "u").slope == Estimate(pytest.approx(1.0))
    assert slope([one, many], "u").slope.low is None


def made(value, low, high, sequences=10, mean=0.5):
    return Slope(Estimate(value, low, high), mean, "u", 100, sequences)


EACH = "for each doubling of the position"


@pytest.mark.parametrize(
    ("found", "answer", "sentence"),
    [
        (made(0.02, 0.01, 0.03), "yes", f"Yes: the drift rises by 0.02 [0.01, 0.03] {EACH}, 4% of its mean"),
        (
            made(0.01, -0.01, 0.03),
            "no",
            f"No: the slope of the drift is 0.01 [-0.01, 0.03] {EACH}, and its interval holds zero",
        ),
        (made(-0.02, -0.03, -0.01), "no", f"No: the drift falls, by 0.02 [0.01, 0.03] {EACH}"),
        (made(0.0, 0.0, 0.0), "no", f"No: the slope of the drift is 0 [0, 0] {EACH}, and its interval holds zero"),
        (
            made(0.02, 0.01, 0.03, 5),
            "unknown",
            f"Not known: 5 sequences are too few to tell; the slope is 0.02 [0.01, 0.03] {EACH}",
        ),
    ],
)
def test_sentences(found, answer, sentence):
    assert verdict(found) == answer
    assert _said("position", found) == sentence


def test_sums_are_of_values_less_their_mean():
    sums = _sums(np.array([0, 0, 1]), np.array([1e9, 1e9 + 1, 1e9 + 2]), np.array([5.0, 6.0, 7.0]))
    assert isinstance(sums, SlopeSums)
    assert slope([replace(sums)], "u").slope.value == pytest.approx(1.0)
