"""Paired comparisons: differences with intervals, exact tests, Holm's correction, the share of a gap that is closed.

Knows arrays of scores by seed and example; knows no models, tasks or evaluators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, permutation_test

Array = NDArray[np.float64]

DRAWS = 10_000
LEVEL = 0.95
#: Elements of one block of bootstrap weights, so that a long task needs no [draws, examples] array at once.
BLOCK = 1 << 24


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Test:
    """A two-sided test of no difference: its p-value and name, and the p-value after Holm's correction."""

    name: str
    p: float
    holm: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The repaired model against the merged one, and both against the expert, on the same examples.

    Attributes:
        examples: number of examples.
        seeds: number of repaired models (fits with other seeds); 1 where there is one.
        merged, repaired, expert: mean scores.
        difference: repaired minus merged.
        gap: expert minus merged.
        remaining: expert minus repaired.
        share: difference / gap; None where the interval of the gap holds zero, so that there is no gap to close.
        test: of the difference.
    """

    examples: int
    seeds: int
    merged: float
    repaired: float
    expert: float
    difference: Estimate
    gap: Estimate
    remaining: Estimate
    share: Estimate | None
    test: Test


def compare(merged: Any, repaired: Any, expert: Any, draws: int = DRAWS, seed: int = 0) -> Comparison:
    """Compare three models by their scores on the same examples.

    Args:
        merged, repaired, expert: scores [examples] or [seeds, examples]; a model without seeds of its own counts for
            each seed of the others.
        draws: bootstrap draws.
        seed: of the draws.

    Raises:
        ValueError: shapes that do not pair, no example, or a score that is not a finite number.
    """
    m, r, e = (_grid(scores) for scores in (merged, repaired, expert))
    try:
        shape = np.broadcast_shapes(m.shape, r.shape, e.shape)
    except ValueError:
        raise ValueError(f"scores of shapes {m.shape}, {r.shape} and {e.shape} do not pair") from None
    if m.shape[1] != r.shape[1] or r.shape[1] != e.shape[1]:
        raise ValueError(f"scores of {m.shape[1]}, {r.shape[1]} and {e.shape[1]} examples do not pair")
    grids = [np.broadcast_to(grid, shape) for grid in (r - m, e - m, e - r)]
    resampled = bootstrap_means(grids, draws, seed)
    difference, gap, remaining = (_estimate(grid, sample) for grid, sample in zip(grids, resampled, strict=True))
    return Comparison(
        examples=shape[1],
        seeds=shape[0],
        merged=float(m.mean()),
        repaired=float(r.mean()),
        expert=float(e.mean()),
        difference=difference,
        gap=gap,
        remaining=remaining,
        share=_share(difference, gap, resampled[0], resampled[1]),
        test=paired_test(m, r, seed),
    )


def bootstrap_means(grids: Sequence[Array], draws: int = DRAWS, seed: int = 0) -> list[Array]:
    """Means [draws] of grids [seeds, examples] under resampling, the same draw for all of them.

    Examples are drawn with replacement; where there are several seeds, so are the seeds, independently of the
    examples, since each example occurs under each seed (the pigeonhole bootstrap of crossed factors: Owen, Ann. Appl.
    Stat. 2007, which errs towards wide intervals).
    """
    seeds, examples = grids[0].shape
    rng = np.random.default_rng(seed)
    out = [np.empty(draws) for _ in grids]
    block = max(1, BLOCK // examples)
    for start in range(0, draws, block):
        count = min(block, draws - start)
        weights = rng.multinomial(examples, np.full(examples, 1 / examples), count) / examples
        rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), count) / seeds
        for sample, grid in zip(out, grids, strict=True):
            sample[start : start + count] = ((weights @ grid.T) * rows).sum(-1)
    return out


def paired_test(a: Any, b: Any, seed: int = 0) -> Test:
    """Two-sided test that two models score alike on the same examples, scores [examples] or [seeds, examples].

    Yes/no scores of one seed: McNemar's exact test (binomial on the examples where they differ). Other scores, or
    several seeds: the sign-flip test on the examples' differences (means over the seeds), exact where its 10,000
    flips are enough to try all.
    """
    a, b = _grid(a), _grid(b)
    if a.shape[0] == b.shape[0] == 1 and _is_binary(a) and _is_binary(b):
        gained, lost = int(((b == 1) & (a == 0)).sum()), int(((b == 0) & (a == 1)).sum())
        p = binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
        return Test("McNemar, exact", float(p))
    differences = b.mean(0) - a.mean(0)
    differences = differences[differences != 0]  # a flipped zero changes nothing
    if len(differences) == 0:
        return Test("sign flips", 1.0)
    result = permutation_test(
        (differences,), np.mean, permutation_type="samples", vectorized=True, n_resamples=9_999, batch=1_000,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return Test("sign flips", float(result.pvalue))


def holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons with p-values corrected for their number (Holm, Scand. J. Statist. 1979)."""
    corrected = holm_p([c.test.p for c in comparisons])
    return [replace(c, test=replace(c.test, holm=p)) for c, p in zip(comparisons, corrected, strict=True)]


def holm_p(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the running maximum of (n - rank) p over the sorted values, at most 1."""
    count, worst = len(values), 0.0
    out = [0.0] * count
    for rank, i in enumerate(sorted(range(count), key=lambda i: values[i])):
        worst = max(worst, min(1.0, (count - rank) * values[i]))
        out[i] = worst
    return out


def _grid(scores: Any) -> Array:
    grid = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if grid.ndim != 2 or grid.size == 0:
        raise ValueError(f"scores must be [examples] or [seeds, examples], not of shape {np.shape(scores)}")
    if not np.isfinite(grid).all():
        raise ValueError("a score is not a finite number")
    return grid


def _is_binary(grid: Array) -> bool:
    return bool(np.isin(grid, (0.0, 1.0)).all())


def _estimate(grid: Array, resampled: Array) -> Estimate:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Estimate(float(grid.mean()), float(low), float(high))


def _share(difference: Estimate, gap: Estimate, above: Array, below: Array) -> Estimate | None:
    """Ratio of the two differences with a percentile interval over the paired draws.

    The ratio means nothing where the gap may be zero. Where the gap's interval excludes zero, the draws that still
    have a gap of the other sign (at most one in forty) count against both ends of the interval.
    """
    if gap.low <= 0 <= gap.high:
        return None
    odd = np.sign(below) != np.sign(gap.value)
    ratio = np.divide(above, below, out=np.zeros_like(above), where=~odd)
    tail = 100 * (1 - LEVEL) / 2
    low = np.percentile(np.where(odd, -np.inf, ratio), tail, method="inverted_cdf")
    high = np.percentile(np.where(odd, np.inf, ratio), 100 - tail, method="inverted_cdf")
    return Estimate(difference.value / gap.value, float(low), float(high))
