"""Token weights and L1 losses against loops."""

from __future__ import annotations

import pytest
import torch

from mergedarts.fit.losses import token_weights, weighted_l1

ENTROPY = torch.tensor([2.0, 0.5, 0.0, 1.0, 3.0, 0.25])
PREDICTS = torch.tensor([False, False, True, True, True, False])


def by_hand(entropy, predicts, loss, gamma, prompt):
    raw = []
    for e, p in zip(entropy.tolist(), predicts.tolist(), strict=True):
        value = 1.0 if p or not any(predicts.tolist()) else prompt
        raw.append(value * (e**gamma if loss == "ewl1" else 1.0))
    return [r * len(raw) / sum(raw) for r in raw]


@pytest.mark.parametrize("predicts", [PREDICTS, torch.zeros(6, dtype=torch.bool)], ids=["responses", "prompts alone"])
@pytest.mark.parametrize("prompt", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("loss", ["l1", "ewl1"])
def test_token_weights(loss, gamma, prompt, predicts):
    got = token_weights(ENTROPY, predicts, loss, gamma, prompt)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(by_hand(ENTROPY, predicts, loss, gamma, prompt))
    assert float(got.mean()) == pytest.approx(1.0)


def test_no_entropy_anywhere_counts_tokens_alike():
    got = token_weights(torch.zeros(6), PREDICTS, "ewl1", 1.0, 0.0)
    assert got.tolist() == pytest.approx([0, 0, 2, 2, 2, 0])


def test_entropy_of_rounding_below_zero_is_none():
    """Entropies that float arithmetic leaves a little below zero: no NaN from a fractional power."""
    got = token_weights(torch.tensor([-1e-7, 1.0]), torch.tensor([True, True]), "ewl1", 0.5, 0.0)
    assert got.tolist() == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("kind", ["ones", "entropy"])
def test_weighted_l1(kind):
    g = torch.Generator().manual_seed(0)
    corrected, target = torch.randn(6, 5, generator=g), torch.randn(6, 5, generator=g)
    weights = torch.ones(6) if kind == "ones" else ENTROPY
    total = below = 0.0
    for t in range(6):
        for j in range(5):
            total += float(weights[t]) * abs(float(corrected[t, j]) - float(target[t, j]))
        below += float(weights[t])
    assert float(weighted_l1(corrected, target, weights)) == pytest.approx(total / (5 * below), rel=1e-6)
