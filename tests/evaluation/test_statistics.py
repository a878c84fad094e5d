"""Statistics against scipy, a hand-worked example, enumeration, and their coverage in simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from mergedarts.evaluation import statistics
from mergedarts.evaluation.statistics import bootstrap_means, compare, holm_p, paired_test

# Ten questions: merged answers 4, the repaired model 7, the expert 9.
MERGED = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
REPAIRED = [1, 1, 1, 0, 1, 1, 1, 1, 0, 0]
EXPERT = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_a_hand_worked_example():
    got = compare(MERGED, REPAIRED, EXPERT)
    assert (got.examples, got.seeds) == (10, 1)
    assert (got.merged, got.repaired, got.expert) == pytest.approx((0.4, 0.7, 0.9))
    assert got.difference.value == pytest.approx(0.3)
    assert got.gap.value == pytest.approx(0.5)
    assert got.remaining.value == pytest.approx(0.2)
    # Four gained, one lost: twice the chance of at most one head in five throws, 2 (1 + 5) / 32.
    assert got.test.name == "McNemar, exact"
    assert got.test.p == pytest.approx(0.375)
    assert got.share is not None
    assert got.share.value == pytest.approx(0.6)
    assert got.share.low < 0.6 < got.share.high


def test_mcnemar_against_a_sum_of_binomials():
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = (rng.random(40) < rng.random() for _ in range(2))
        gained, lost = int((b & ~a).sum()), int((a & ~b).sum())
        n, k = gained + lost, min(gained, lost)
        tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        assert paired_test(a, b).p == pytest.approx(min(1.0, 2 * tail))


def test_sign_flips_against_all_of_them():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=9), rng.normal(0.6, size=9)
    d = b - a
    flipped = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=9)]
    expected = np.mean([value >= abs(d.sum()) - 1e-12 for value in flipped])
    got = paired_test(a, b)
    assert got.name == "sign flips"
    assert got.p == pytest.approx(expected)
    # On yes/no scores it is McNemar's test; two seeds that agree bring it about.
    twice = paired_test([MERGED, MERGED], [REPAIRED, REPAIRED])
    assert twice.name == "sign flips"
    assert twice.p == pytest.approx(0.375)


def test_equal_models():
    got = compare(MERGED, MERGED, MERGED)
    assert got.test.p == 1
    assert (got.difference.value, got.difference.low, got.difference.high) == (0, 0, 0)
    assert got.share is None


def test_the_interval_against_scipy():
    rng = np.random.default_rng(3)
    a, b, c = rng.normal(size=80), rng.normal(0.3, size=80), rng.normal(1, size=80)
    got = compare(a, b, c)
    theirs = scipy.stats.bootstrap(
        (b - a,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(4)
    ).confidence_interval
    spread = theirs.high - theirs.low
    assert got.difference.low == pytest.approx(theirs.low, abs=0.03 * spread)
    assert got.difference.high == pytest.approx(theirs.high, abs=0.03 * spread)
    ratio = scipy.stats.bootstrap(
        (a, b, c), lambda x, y, z, axis: (y - x).mean(axis) / (z - x).mean(axis), paired=True, vectorized=True,
        n_resamples=10_000, method="percentile", rng=np.random.default_rng(4),
    ).confidence_interval  # fmt: skip
    spread = ratio.high - ratio.low
    assert got.share is not None
    assert got.share.low == pytest.approx(ratio.low, abs=0.04 * spread)
    assert got.share.high == pytest.approx(ratio.high, abs=0.04 * spread)


def test_bootstrap_of_seeds_and_examples_against_loops():
    """Variance of the crossed bootstrap, drawn by plain loops."""
    rng = np.random.default_rng(5)
    grid = rng.normal(size=(4, 1)) + rng.normal(size=(1, 15)) + rng.normal(size=(4, 15))
    slow = []
    for _ in range(4000):
        rows, columns = rng.integers(0, 4, 4), rng.integers(0, 15, 15)
        slow.append(np.mean([[grid[i, j] for j in columns] for i in rows]))
    fast = bootstrap_means([grid], 4000)[0]
    assert fast.mean() == pytest.approx(grid.mean(), abs=0.04)
    assert fast.std() == pytest.approx(np.std(slow), rel=0.06)


def test_long_tasks_are_drawn_in_blocks(monkeypatch):
    grid = np.random.default_rng(6).normal(size=(2, 50))
    monkeypatch.setattr("mergedarts.evaluation.statistics.BLOCK", 50 * 7)
    sample = bootstrap_means([grid, 2 * grid], 100)
    assert len(np.unique(sample[0])) > 90
    np.testing.assert_allclose(2 * sample[0], sample[1])


@pytest.fixture
def intervals_alone(monkeypatch):
    """Simulations look at intervals; the tests of no difference would take most of their time."""
    monkeypatch.setattr(statistics, "paired_test", lambda *_: statistics.Test("none", 1.0))


@pytest.mark.usefixtures("intervals_alone")
@pytest.mark.parametrize("kind", ["normal", "yes/no", "seeds"])
def test_coverage_of_the_difference(kind):
    """95% intervals hold the true difference in about 95% of 400 simulated experiments (a binomial error of 1.1%)."""
    rng = np.random.default_rng(7)
    hits, runs = 0, 400
    for _ in range(runs):
        if kind == "normal":
            a, b, truth = rng.normal(size=100), rng.normal(0.2, size=100), 0.2
        elif kind == "yes/no":
            hard = rng.random(120)
            a, b, truth = hard < 0.4, (hard < 0.4) ^ (rng.random(120) < 0.2), 0.2 * 0.2
        else:
            example = rng.normal(size=(1, 60))
            a, truth = example + rng.normal(size=(1, 60)), 0.2
            b = example + 0.2 + 0.2 * rng.normal(size=(8, 1)) + rng.normal(size=(8, 60))
        got = compare(a, b, b, draws=600).difference
        hits += got.low <= truth <= got.high
    # Crossed resampling errs to the wide side; an interval of examples alone would hold the truth in about 80%.
    assert (0.915 if kind != "seeds" else 0.90) <= hits / runs <= (0.975 if kind != "seeds" else 0.995)


@pytest.mark.usefixtures("intervals_alone")
def test_coverage_of_the_share_and_no_share_without_a_gap():
    rng = np.random.default_rng(8)
    hits = given = 0
    for _ in range(400):
        m = rng.normal(size=100)
        got = compare(m, m + 0.5 + rng.normal(size=100), m + 1 + rng.normal(size=100), draws=600).share
        assert got is not None
        hits += got.low <= 0.5 <= got.high
        given += compare(m, m + rng.normal(size=100), m + 0.1 * rng.normal(size=100), draws=600).share is not None
    assert 0.91 <= hits / 400 <= 0.98
    assert given / 400 < 0.10  # a gap that is not there passes for one in about 6% of the experiments


def test_a_gap_near_zero_widens_the_interval():
    """Some draws have a gap of the other sign: they count against both ends, to infinity where they are many."""
    rng = np.random.default_rng(9)
    noise = rng.normal(size=100)
    noise = (noise - noise.mean()) / noise.std()
    m = np.zeros(100)
    clear, doubtful = (compare(m, m + 1, m + gap + noise) for gap in (1.0, 0.205))
    assert clear.share is not None
    assert doubtful.share is not None
    assert doubtful.share.high > 10 * clear.share.high
    assert compare(m, m + 1, m + 0.15 + noise).share is None


def test_holm_by_hand():
    assert holm_p([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_p([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm_p([]) == []


def test_seeds_broadcast_over_models_without():
    rng = np.random.default_rng(10)
    grid = rng.normal(size=(3, 20))
    got = compare(np.zeros(20), grid, np.ones(20))
    assert (got.seeds, got.examples) == (3, 20)
    assert got.repaired == pytest.approx(grid.mean())


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (([1, 2], [1, 2, 3], [1, 2]), "do not pair"),
        (([1, 2], [1, float("nan")], [1, 2]), "finite"),
        (([], [], []), "shape"),
        (([[1], [2]], [[1], [2], [3]], [1]), "do not pair"),
        (([1, 2], [1], [1, 2]), "do not pair"),
    ],
)
def test_scores_that_cannot_be_compared(scores, words):
    with pytest.raises(ValueError, match=words):
        compare(*scores)
