"""Bins of positions, entropies and turns, the same for every merge so that reports can be compared.

Knows edges and labels; nothing of what is averaged in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Bands of the expert's entropy in nats.
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class Bin:
    """Values from `low` (included) to `high` (not included; None where the bin is open)."""

    low: float
    high: float | None
    label: str


def position_bins(last: int) -> tuple[Bin, ...]:
    """Bins of a quarter octave from 0 up to the one that holds position `last`: 0, 1, 2, 3, ..., 8-9, 10, 11-12, ..."""
    return _integers(_octaves(last, 4))


def coarse_position_bins(last: int) -> tuple[Bin, ...]:
    """Bins of two octaves, for crossing with entropy: 0, 1-3, 4-15, 16-63, ..."""
    return _integers(_octaves(last, 0.5))


def turn_bins(last: int) -> tuple[Bin, ...]:
    """Turns 1 to 4 each alone, then octaves: 5-8, 9-16, ..."""
    edges = [1, 2, 3, 4, 5]
    while edges[-1] <= last:
        edges.append(2 * (edges[-1] - 1) + 1)
    return _integers([e for i, e in enumerate(edges) if i == 0 or edges[i - 1] <= last])


def entropy_bins() -> tuple[Bin, ...]:
    """Bands of the expert's entropy in nats."""
    closed = tuple(Bin(a, b, f"{a:g}-{b:g}") for a, b in pairwise(ENTROPY_EDGES))
    return (*closed, Bin(ENTROPY_EDGES[-1], None, f"{ENTROPY_EDGES[-1]:g}+"))


def assign(bins: tuple[Bin, ...], values: Array) -> Array:
    """[n] the number of the bin that holds each value; values below the first bin are in it (rounding of entropies)."""
    found: Array = np.searchsorted([b.low for b in bins], values, side="right") - 1
    return found.clip(min=0)


def _octaves(last: int, per_octave: float) -> list[int]:
    """0 and then rounded powers of 2^(1 / per_octave), up to the first beyond `last`."""
    edges, step = [0], 0
    while edges[-1] <= last:
        edge = round(2 ** (step / per_octave))
        step += 1
        if edge > edges[-1]:
            edges.append(edge)
    return edges


def _integers(edges: list[int]) -> tuple[Bin, ...]:
    return tuple(Bin(a, b, str(a) if b == a + 1 else f"{a}-{b - 1}") for a, b in pairwise(edges))


def middle(low: float, high: float | None) -> float:
    """Where a bin of integers stands on a logarithmic axis of 1 + value."""
    return math.sqrt((low + 1) * (high if high is not None else low + 1)) - 1
