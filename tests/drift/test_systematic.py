"""Shares against plain means, least squares and their error on other sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergedarts.drift.bins import assign, position_bins
from mergedarts.drift.systematic import Side, systematic
from mergedarts.fit.positions import ROW_PRIOR

WIDTH = 12


def side(seed, sequences=10, length=24, change=None):
    g = torch.Generator().manual_seed(seed)
    n = sequences * length
    h = torch.randn(n, WIDTH, generator=g)
    positions = torch.arange(length).repeat(sequences)
    e = change(h, positions) + 0.3 * torch.randn(n, WIDTH, generator=g)
    return Side(h, h + e, positions, torch.arange(sequences).repeat_interleave(length))


def wave(h, positions):
    g = torch.Generator().manual_seed(9)
    low = torch.randn(WIDTH, 2, generator=g) @ torch.randn(2, WIDTH, generator=g) / 4
    table = torch.randn(24, WIDTH, generator=g)
    return table[positions] * (positions >= 12)[:, None] + h @ low


def test_constant_by_slow_means():
    """The penalised table solved by plain normal equations, scored on the other side."""
    fitted, held = side(0, change=wave), side(1, change=wave)
    found = systematic(fitted, held)
    bins = position_bins(23)

    def design(s):
        index = assign(bins, s.positions.numpy())
        return np.concatenate([np.ones((len(index), 1)), np.eye(len(bins))[index]], 1)

    a, e = design(fitted), (fitted.target - fitted.states).double().numpy()
    penalty = np.diag([0.0] + [ROW_PRIOR] * len(bins))
    coefficients = np.linalg.solve(a.T @ a + penalty, a.T @ e)
    off = (held.target - held.states).double().numpy()
    left = ((off - design(held) @ coefficients) ** 2).sum(1)
    power = (off**2).sum(1)
    assert found.constant.value == pytest.approx(1 - left.sum() / power.sum(), abs=1e-4)
    index = assign(bins, held.positions.numpy())
    for point in found.by_position:
        mine = index == next(i for i, b in enumerate(bins) if b.label == point.label)
        assert point.measures["constant"].value == pytest.approx(1 - left[mine].sum() / power[mine].sum(), abs=1e-4)
        assert point.tokens == mine.sum()


def test_linear_by_slow_regression():
    """Full rank, so that the map is a ridge regression: each input's ridge is in units of its own power."""
    fitted, held = side(0, change=wave), side(1, change=wave)
    found = systematic(fitted, held, rank=WIDTH)
    x, e = fitted.states.double().numpy(), (fitted.target - fitted.states).double().numpy()
    dense = np.linalg.solve(x.T @ x + found.ridge * np.diag((x**2).sum(0)), x.T @ e)
    off = (held.target - held.states).double().numpy()
    left = ((off - held.states.double().numpy() @ dense) ** 2).sum()
    assert found.linear.value == pytest.approx(1 - left / (off**2).sum(), abs=1e-4)


def test_both_reach_further():
    fitted, held = side(0, 40, change=wave), side(1, 40, change=wave)
    found = systematic(fitted, held)
    assert found.both.value > max(found.constant.value, found.linear.value) + 0.05
    assert found.both.low < found.both.value < found.both.high


def test_rank_is_bounded_by_width_and_ridge_is_chosen():
    found = systematic(side(0, change=wave), side(1, change=wave))
    assert found.rank == WIDTH
    assert found.ridge == 0.1
    noise = systematic(side(0, 3, change=lambda h, p: 0 * h), side(1, change=lambda h, p: 0 * h))
    assert noise.ridge == 10
    assert noise.both.value < 0.05


def test_positions_never_fitted_take_the_mean():
    def shift(h, positions):
        return torch.ones_like(h)

    fitted, held = side(0, length=8, change=shift), side(1, length=40, change=shift)
    found = systematic(fitted, held)
    assert found.by_position[-1].measures["constant"].value > 0.8


def test_one_fitted_sequence():
    found = systematic(side(0, 1, change=wave), side(1, change=wave))
    assert found.fitted_sequences == 1
    assert found.ridge == 10
