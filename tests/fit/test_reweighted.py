"""The reweighted passes against linear programmes, one an output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from mergedarts.fit.closed_form import reweighted
from tests.fit.problems import KINDS, WEIGHTS, problem


def l1_minimum(z, d, w):
    """The least weighted L1 loss of a linear map, one linear programme an output."""
    n, size = z.shape
    total = 0.0
    for c in range(d.shape[1]):
        rows = np.block([[z, -np.eye(n)], [-z, -np.eye(n)]])
        cost = np.concatenate([np.zeros(size), w])
        right = np.concatenate([d[:, c], -d[:, c]])
        bounds = [(None, None)] * size + [(0, None)] * n
        answer = linprog(cost, rows, right, bounds=bounds, method="highs")
        assert answer.status == 0
        total += answer.fun
    return total


def l1_loss(x, f, d, w, down, up, of_f):
    total = 0.0
    for t in range(len(w)):
        total += w[t] * np.abs(d[t] - up @ (down @ x[t]) - of_f.T @ f[t]).sum()
    return total


@pytest.mark.parametrize("low", [False, True], ids=["identity", "rank 2"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reweighted_reaches_the_linear_programme(kind, weights, low):
    x, f, d, w, _ = problem(kind, weights, n=40)
    d = d + 5 * np.random.default_rng(2).standard_t(1.5, d.shape)  # heavy tails, where L1 and L2 part
    down = np.random.default_rng(3).normal(size=(2, 5)) if low else np.eye(5)
    up, of_f = reweighted(*(torch.tensor(a) for a in (x, f, d, w, down)), passes=20)
    assert up.shape == (4, down.shape[0])
    assert of_f.shape == (f.shape[1], 4)
    least = l1_minimum(np.concatenate([x @ down.T, f], 1), d, w)
    got = l1_loss(x, f, d, w, down, up.numpy(), of_f.numpy())
    assert least * (1 - 1e-9) <= got <= least * 1.01
    # Closer by far than plain least squares, so the passes did it.
    start = l1_loss(
        x, f, d, w, down, *(a.numpy() for a in reweighted(*(torch.tensor(a) for a in (x, f, d, w, down)), 0))
    )
    assert got - least < 0.2 * (start - least)


@pytest.mark.parametrize("seed", range(4))
def test_reweighted_stays_at_the_minimum_with_many_passes(seed):
    """More passes than needed: the docstring's limit, not a fit that drifts away again."""
    x, f, d, w, _ = problem("smooth", n=40, seed=seed)
    least = l1_minimum(np.concatenate([x, f], 1), d, w)
    losses = []
    for passes in (20, 80):
        up, of_f = reweighted(*(torch.tensor(a) for a in (x, f, d, w, np.eye(5))), passes=passes)
        losses.append(l1_loss(x, f, d, w, np.eye(5), up.numpy(), of_f.numpy()))
    assert losses[0] <= 1.01 * least
    assert losses[1] <= 1.01 * least


def test_reweighted_with_outputs_of_very_different_scale():
    """An outlier output 1e4 times the others does not keep them from their own minimum."""
    x, f, d, w, _ = problem("constant", n=40)
    d = d + 5 * np.random.default_rng(2).standard_t(1.5, d.shape)
    least = [l1_minimum(np.concatenate([x, f], 1), d[:, c : c + 1], w) for c in range(4)]
    d[:, 0] *= 1e4
    up, of_f = reweighted(*(torch.tensor(a) for a in (x, f, d, w, np.eye(5))), passes=30)
    for c in range(1, 4):
        got = l1_loss(x, f, d[:, c : c + 1], w, np.eye(5), up.numpy()[c : c + 1], of_f.numpy()[:, c : c + 1])
        assert got <= 1.01 * least[c]


def test_reweighted_wide_problem_takes_the_other_path():
    """More than 64 coefficients and more than 64 outputs: the same minimum from the blockwise products."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(150, 66)), rng.uniform(0.5, 2, 150)
    d = x @ rng.normal(size=(66, 66)) + rng.standard_t(1.5, (150, 66))
    up, _ = reweighted(
        torch.tensor(x), torch.zeros(150, 0), torch.tensor(d), torch.tensor(w), torch.eye(66).double(), passes=20
    )
    for c in (0, 65):
        least = l1_minimum(x, d[:, c : c + 1], w)
        got = l1_loss(x, np.zeros((150, 0)), d[:, c : c + 1], w, np.eye(66), up.numpy()[c : c + 1], np.zeros((0, 1)))
        assert got <= 1.01 * least


def test_reweighted_with_dependent_functions():
    """A table with a row for a position that was never seen: finite, and as good as without it."""
    x, f, d, w, _ = problem("table", n=40)
    wide = np.concatenate([f, np.zeros((40, 1)), f[:, :1]], 1)
    up, of_f = reweighted(*(torch.tensor(a) for a in (x, wide, d, w, np.eye(5))), passes=20)
    assert torch.isfinite(up).all()
    assert torch.isfinite(of_f).all()
    least = l1_minimum(np.concatenate([x, f], 1), d, w)
    assert l1_loss(x, wide, d, w, np.eye(5), up.numpy(), of_f.numpy()) <= 1.01 * least
