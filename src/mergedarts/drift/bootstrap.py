"""95% bootstrap intervals over whole sequences, of many ratios at once.

Knows sums by sequence and resampled counts of them; never resamples tokens, which are alike inside a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DRAWS = 2000
#: Resampled values held at once.
BLOCK = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% percentile interval over sequences.

    Attributes:
        value: None where there is nothing to average.
        low, high: None where fewer than two sequences are behind the value.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


def draws(sequences: int, count: int = DRAWS, seed: int = 0) -> Array:
    """[count, sequences] how often each of some sequences is in each draw with replacement of as many."""
    drawn = np.random.default_rng(seed).integers(0, sequences, (count, sequences))
    flat = (drawn + sequences * np.arange(count)[:, None]).ravel()
    return np.bincount(flat, minlength=drawn.size).reshape(drawn.shape).astype(float)


class Resampler:
    """Draws of whole sequences with replacement, the same for everything measured on them (so that it is paired).

    Args:
        sequence: [n] the sequence of each token; any integers.
        count: number of draws.
    """

    def __init__(self, sequence: Array, count: int = DRAWS, seed: int = 0) -> None:
        self.ids, self.index = np.unique(np.asarray(sequence), return_inverse=True)
        self.count = len(self.ids)
        self._counts = draws(self.count, count, seed)

    def sums(self, values: Array, bins: Array | None = None, size: int = 1, chosen: Array | None = None) -> Array:
        """[sequences, size] sums of values [n] by sequence and bin [n]; of all tokens, or of those where `chosen`."""
        at = self.index * size + (0 if bins is None else bins)
        values = np.asarray(values, dtype=float)
        if chosen is not None:
            at, values = at[chosen], values[chosen]
        out: Array = np.bincount(at, values, minlength=self.count * size).reshape(self.count, size)
        return out

    def ratios(self, numerator: Array, denominator: Array) -> list[Estimate]:
        """Estimates of sum(numerator) / sum(denominator), both [sequences, k], one for each of the k columns."""
        total, weight = numerator.sum(0), denominator.sum(0)
        behind = (denominator != 0).sum(0)
        low, high = np.full(len(total), np.nan), np.full(len(total), np.nan)
        width = max(1, BLOCK // max(1, len(self._counts)))
        for start in range(0, len(total), width):
            part = slice(start, start + width)
            with np.errstate(divide="ignore", invalid="ignore"):
                drawn = (self._counts @ numerator[:, part]) / (self._counts @ denominator[:, part])
            drawn[~np.isfinite(drawn)] = np.nan
            low[part], high[part] = _interval(drawn)
        return [
            Estimate(None)
            if weight[i] == 0
            else Estimate(float(total[i] / weight[i]))
            if behind[i] < 2
            else Estimate(float(total[i] / weight[i]), float(low[i]), float(high[i]))
            for i in range(len(total))
        ]

    def ratio(self, numerator: Array, denominator: Array) -> Estimate:
        """The same for one pair of sums [sequences]."""
        return self.ratios(numerator[:, None], denominator[:, None])[0]


def _interval(drawn: Array) -> tuple[Array, Array]:
    """2.5th and 97.5th percentile of each column [draws, k], those draws left out that hold nothing of it."""
    drawn = np.sort(drawn, axis=0)  # what is not a number goes to the end
    valid = np.isfinite(drawn).sum(0)
    out = []
    for q in (0.025, 0.975):
        at = q * (valid - 1).clip(min=0)
        below = np.floor(at).astype(int)
        above = np.minimum(below + 1, (valid - 1).clip(min=0))
        columns = np.arange(drawn.shape[1])
        a, b = drawn[below, columns], drawn[above, columns]
        out.append(a + (b - a) * (at - below))
    return out[0], out[1]
