"""How much of the drift is systematic: what a constant by position and a low-rank linear map of h take away.

Knows states of two sets of sequences, one to fit on and one to score on; the algebra is in `fit.closed_form`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..correction import Position
from ..fit.closed_form import Statistics, choose_ridge, solve
from ..fit.positions import functions_of
from .bins import Array, assign, position_bins
from .bootstrap import Resampler
from .tokens import points
from .types import Systematic

RANK = 16
RIDGES = (0.1, 1.0, 10.0)
FOLDS = 2


@dataclass(frozen=True)
class Side:
    """Counted tokens of some sequences: states and target [n, d], positions [n] and sequences [n]."""

    states: torch.Tensor
    target: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor


def systematic(fitted: Side, held: Side, rank: int = RANK) -> Systematic:
    """Fit three forms of repair on one side and score them on the other, never on what they were fitted on.

    The share is 1 - sum |e - e^|^2 / sum |e|^2 with e = h* - h; it is negative where a form does harm. The constants
    are drawn to the mean over all positions, as those of a position table are (`fit.positions`).
    """
    bins = position_bins(int(max(fitted.positions.max(), held.positions.max())))
    table = Position("table", max(2, len(bins)))

    def functions(side: Side) -> tuple[torch.Tensor, torch.Tensor]:
        return functions_of(table, torch.from_numpy(assign(bins, side.positions.numpy())))

    f, penalty = functions(fitted)
    h, error = fitted.states.float(), fitted.target.float() - fitted.states.float()
    fold = fitted.sequence.unique(return_inverse=True)[1] % FOLDS
    parts = [
        Statistics.of(h[fold == i], f[fold == i], error[fold == i], torch.ones(int((fold == i).sum())))
        for i in range(FOLDS)
        if (fold == i).any()
    ]
    parts = [part.penalised(penalty / len(parts)) for part in parts]
    rank = min(rank, h.shape[1])
    ridge = choose_ridge([_linear(p) for p in parts], RIDGES, rank, None)[0] if len(parts) > 1 else RIDGES[-1]
    whole = sum(parts[1:], start=parts[0])
    n, k = h.shape[1], f.shape[1]
    constants = torch.linalg.pinv(whole.xx[n:, n:], rtol=1e-10, hermitian=True) @ whole.xd[n:]
    linear = solve(_linear(whole), ridge).at_rank(rank).factors(0)
    maps = {
        "constant": (torch.cat([torch.zeros(n, k, dtype=torch.float64), torch.eye(k, dtype=torch.float64)]), constants),
        "linear": (torch.cat([linear[0], torch.zeros(k, rank, dtype=torch.float64)]), linear[1]),
        "both": solve(whole, ridge).at_rank(rank).factors(k),
    }
    left, power = _left(held, functions(held)[0], maps)
    resampler = Resampler(held.sequence.numpy())
    # A point's mean of 1 - left / power, weighted by power, is its share of power.
    sums = resampler.sums(power)[:, 0]
    total = {name: resampler.ratio(sums - resampler.sums(value)[:, 0], sums) for name, value in left.items()}
    index = assign(bins, held.positions.numpy())
    everything = np.ones(len(index), dtype=bool)
    by_position = points([(b, None) for b in bins], index, everything, {}, resampler)
    seen = [bins.index(b) for b in bins if any(p.low == b.low for p in by_position)]
    base = resampler.sums(power, index, len(bins))
    for name, value in left.items():
        found = resampler.ratios(base - resampler.sums(value, index, len(bins)), base)
        for point, i in zip(by_position, seen, strict=True):
            point.measures[name] = found[i]
    return Systematic(
        total["constant"], total["linear"], total["both"], by_position, rank, ridge,
        len(h), int(fitted.sequence.unique().numel()),
    )  # fmt: skip


def _linear(statistics: Statistics) -> Statistics:
    """Without the position functions."""
    n = len(statistics.xx) - statistics.functions
    return Statistics(statistics.xx[:n, :n], statistics.xd[:n], statistics.dd, statistics.weight, 0)


def _left(
    held: Side, f: torch.Tensor, maps: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, Array], Array]:
    """Power of what each map of (h, f), in two factors, leaves of the drift, and of the drift, token by token [n]."""
    h = held.states.double()
    error = held.target.double() - h
    phi = torch.cat([h, f.double()], 1)
    left = {name: (error - phi @ a @ b).square().sum(1).numpy() for name, (a, b) in maps.items()}
    return left, error.square().sum(1).numpy()
