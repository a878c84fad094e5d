"""The paper's fit against Adam written out in numpy: own gradients of the weighted L1, own moments, same start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mergedarts.correction import Position
from mergedarts.fit import adam
from mergedarts.fit.adam import fit_adam

N, D_MODEL, RANK = 40, 12, 3


def data(seed=0, dtype=torch.float32, zero=False):
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(N, D_MODEL, generator=g).to(dtype)
    target = (states.float() + 0.5 * torch.randn(N, D_MODEL, generator=g) + 0.3).to(dtype)
    weights = torch.rand(N, generator=g, dtype=torch.float64) + 0.1
    if zero:
        weights[::3] = 0.0
    return states, target, weights, torch.arange(N) % 9


def by_hand(states, target, weights, positions, rank, rows, steps, lr, seed):
    """Full-batch Adam (0.9, 0.999, 1e-8) in float64 on L = sum_t w_t |h' - h*|_1 / (d sum_t w_t)."""
    h, goal, w = (a.double().numpy() for a in (states, target, weights))
    n, d = h.shape
    bound = 1 / math.sqrt(d)
    start = torch.empty(rank, d).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    values = {"down": start.double().numpy(), "up": np.zeros((d, rank)), "bias": np.zeros((max(rows, 1), d))}
    first = {k: np.zeros_like(v) for k, v in values.items()}
    second = {k: np.zeros_like(v) for k, v in values.items()}
    losses = []
    for step in range(1, steps + 1):
        grads = {k: np.zeros_like(v) for k, v in values.items()}
        loss = 0.0
        for t in range(n):
            row = min(int(positions[t]), rows - 1) if rows else 0
            z = values["down"] @ h[t]
            a = np.maximum(z, 0)
            r = h[t] - values["up"] @ a - values["bias"][row] - goal[t]
            scale = w[t] / (d * w.sum())
            loss += scale * np.abs(r).sum()
            s = scale * np.sign(r)
            grads["up"] -= np.outer(s, a)
            grads["down"] -= np.outer((values["up"].T @ s) * (z > 0), h[t])
            if rows:
                grads["bias"][row] -= s
        losses.append(loss)
        for k, g in grads.items():
            first[k] = 0.9 * first[k] + 0.1 * g
            second[k] = 0.999 * second[k] + 0.001 * g * g
            m, v = first[k] / (1 - 0.9**step), second[k] / (1 - 0.999**step)
            values[k] = values[k] - lr * m / (np.sqrt(v) + 1e-8)
    return values, losses


def compare(site, want, rows):
    np.testing.assert_allclose(site.down.numpy(), want["down"], atol=1e-5)
    np.testing.assert_allclose(site.up.numpy(), want["up"], atol=1e-5)
    if rows:
        np.testing.assert_allclose(site.position_bias.numpy(), want["bias"], atol=1e-5)
    else:
        assert site.position_bias is None


@pytest.mark.parametrize("chunk", [1, 7, 8192])
@pytest.mark.parametrize("rows", [0, 1, 5, 20], ids=lambda r: f"{r} rows")
@pytest.mark.parametrize("zero", [False, True], ids=["all counted", "prompts at 0"])
def test_equals_adam_by_hand(monkeypatch, chunk, rows, zero):
    monkeypatch.setattr(adam, "CHUNK_TOKENS", chunk)
    position = Position("table", rows) if rows else None
    for steps in (1, 2, 3, 12):
        site = fit_adam(*data(zero=zero), rank=RANK, position=position, steps=steps, lr=1e-2, seed=4)
        want, _ = by_hand(*data(zero=zero), RANK, rows, steps, 1e-2, 4)
        compare(site, want, rows)
    assert np.abs(want["up"]).max() > 0.05  # it moved by far more than the tolerance


def test_half_precision_states_are_fitted_in_float32():
    site = fit_adam(*data(dtype=torch.bfloat16), rank=RANK, position=Position("table", 5), steps=6, lr=1e-2, seed=0)
    want, _ = by_hand(*data(dtype=torch.bfloat16), RANK, 5, 6, 1e-2, 0)
    compare(site, want, 5)
    assert site.down.dtype == torch.float32


def test_lowers_the_loss_and_leaves_its_inputs():
    states, target, weights, positions = data()
    kept = [a.clone() for a in (states, target, weights, positions)]
    site = fit_adam(
        states, target, weights, positions, rank=RANK, position=Position("table", 5), steps=300, lr=1e-2, seed=0
    )
    for a, b in zip((states, target, weights, positions), kept, strict=True):
        assert torch.equal(a, b)
    losses = []
    for h in (states, site(states, states, positions)):
        losses.append(sum(float(weights[t]) * float((h[t] - target[t]).abs().sum()) for t in range(N)))
    assert losses[1] < 0.8 * losses[0]
    assert not any(p.requires_grad for p in site.parameters())


def test_seed_decides_the_start():
    fits = [fit_adam(*data(), rank=RANK, position=None, steps=1, lr=1e-3, seed=s).down for s in (0, 0, 1)]
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fit_adam(*data(), rank=RANK, position=None, steps=2, lr=1e-3, seed=0)
    assert torch.equal(before, torch.get_rng_state())
