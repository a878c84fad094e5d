"""LoRA forms: truncated SVD and its version in the metric of the activations, against brute force."""

from __future__ import annotations

import copy

import pytest
import torch

from mergedarts.fit.linear import fit_linear, fit_svd, keep_weights, linear_layers, spend, truncated, weight_of
from mergedarts.runtime import attach
from mergedarts.store import FeatureStore
from tests.tiny import prompt_set, tiny

SHAPES = [(6, 9), (9, 6), (7, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_truncated_svd(shape):
    delta = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = truncated(delta)
    u, s, v = torch.linalg.svd(delta.double(), full_matrices=False)
    torch.testing.assert_close(torch.tensor(found.gains, dtype=torch.float64), s**2, atol=1e-5, rtol=1e-5)
    for rank in (1, 3):
        torch.testing.assert_close(
            (found.up[:, :rank] @ found.down[:rank]).double(), (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_in_the_metric_of_the_inputs_no_other_of_its_rank_is_better(shape):
    """Alternating minimisation of tr((D - L) C (D - L)') from several starts ends where `truncated` is."""
    g = torch.Generator().manual_seed(1)
    delta = torch.randn(*shape, generator=g).double()
    x = torch.randn(50, shape[1], generator=g).double() * torch.linspace(0.1, 3, shape[1])
    gram = x.T @ x
    found = truncated(delta, gram)

    def error(low):
        return float(((delta - low) @ gram * (delta - low)).sum())

    for rank in (1, 2):
        best = float("inf")
        for _ in range(5):
            up = torch.randn(shape[0], rank, generator=g).double()
            for _ in range(500):
                down = torch.linalg.lstsq(up, delta).solution
                up = delta @ gram @ down.T @ torch.linalg.inv(down @ gram @ down.T)
            best = min(best, error(up @ down))
        assert error((found.up[:, :rank] @ found.down[:rank]).double()) <= best * (1 + 1e-5)
        lowered = error(torch.zeros_like(delta)) - error((found.up[:, :rank] @ found.down[:rank]).double())
        assert lowered == pytest.approx(sum(found.gains[:rank]), rel=1e-4)


def test_spend_gives_a_rank_everywhere_before_a_second_and_narrow_layers_first():
    """Ranks cost 4, 4, 4 and 6."""
    factors = {
        str(i): truncated(torch.diag(torch.tensor(d)))
        for i, d in enumerate([[2.5, 0.1], [3.0, 2.0], [0.2, 0.0], [9.0, 9.0, 9.0]])
    }
    assert spend(factors, 3) == {}
    assert spend(factors, 4) == {"1": 1}
    assert spend(factors, 9) == {"1": 1, "0": 1}
    assert spend(factors, 12) == {"1": 1, "0": 1, "2": 1}
    assert spend(factors, 18) == {"1": 1, "0": 1, "2": 1, "3": 1}
    assert spend(factors, 22) == {"1": 2, "0": 1, "2": 1, "3": 1}
    assert spend(factors, 10**6) == {"1": 2, "0": 2, "2": 1, "3": 3}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("form", ["svd", "linear"])
def test_full_rank_is_the_expert(family, form):
    """With the linear layers alone changed and no truncation, the corrected merged model is the expert."""
    merged = tiny(family)
    expert = copy.deepcopy(merged)
    for module in linear_layers(expert).values():
        module.weight += 0.05 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2))
    store = FeatureStore("expert", "weights", torch.float32)
    keep_weights(expert, store)
    prompts = prompt_set((9, 14, 20, 17))
    if form == "svd":
        correction = fit_svd(merged, store, 0, 64, "t")
    else:
        correction = fit_linear(merged, prompts, store, torch.ones(prompts.tokens), 0, 64, 0.1, "t")
    ids = torch.tensor([prompts.sequences[2].ids])
    with torch.no_grad(), attach(merged, {"x": correction}, "x"):
        torch.testing.assert_close(merged(ids).logits, expert(ids).logits, atol=2e-3, rtol=2e-3)


def test_weights_are_out_by_in():
    for family in ("llama", "gpt2"):
        for module in linear_layers(tiny(family)).values():
            x = torch.randn(3, weight_of(module).shape[1])
            bias = 0 if module.bias is None else module.bias
            torch.testing.assert_close(module(x), x @ weight_of(module).T + bias)
