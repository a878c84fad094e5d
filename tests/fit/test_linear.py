"""Truncated SVD of weight differences against dense ones, and where a budget goes."""

from __future__ import annotations

import copy

import pytest
import torch

from mergedarts.fit.linear import fit_svd, keep_weights, linear_layers, spend, truncated, weight_of
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


def test_spend_gives_the_same_rank_everywhere_and_the_rest_by_gain_or_to_the_narrow():
    """Ranks cost 4, 4, 4 and 6; the widest layer has the largest gains a parameter."""
    factors = {
        str(i): truncated(torch.diag(torch.tensor(d)))
        for i, d in enumerate([[2.5, 0.1], [3.0, 2.0], [0.2, 0.0], [9.0, 8.0, 7.0]])
    }
    every = {"0": 1, "1": 1, "2": 1, "3": 1}
    for budget, by_gain, narrow in (
        (3, {}, {}),
        (6, {"3": 1}, {"1": 1}),
        (9, {"3": 1}, {"1": 1, "0": 1}),
        (17, {"3": 2, "1": 1}, {"1": 2, "0": 1, "2": 1}),
        (18, every, every),
        (24, every | {"3": 2}, every | {"1": 2}),
        (28, every | {"3": 2, "1": 2}, every | {"1": 2, "0": 2}),
        (10**6, {"0": 2, "1": 2, "2": 1, "3": 3}, {"0": 2, "1": 2, "2": 1, "3": 3}),
    ):
        assert spend(factors, budget) == by_gain, budget
        assert spend(factors, budget, narrow=True) == narrow, budget


def test_layers_that_do_not_differ_get_nothing():
    factors = {"a": truncated(torch.zeros(4, 5)), "b": truncated(torch.ones(4, 5))}
    assert spend(factors, 18) == {"b": 1}
    assert spend(factors, 18, narrow=True) == {"b": 1}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_full_rank_is_the_expert(family):
    """With the linear layers alone changed and no truncation, the corrected merged model is the expert."""
    merged = tiny(family)
    expert = copy.deepcopy(merged)
    for module in linear_layers(expert).values():
        module.weight += 0.05 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2))
    store = FeatureStore("expert", "weights", torch.float32)
    keep_weights(expert, store)
    prompts = prompt_set((9, 14, 20, 17))
    correction = fit_svd(merged, store, 0, 64, "t")
    ids = torch.tensor([prompts.sequences[2].ids])
    with torch.no_grad(), attach(merged, {"x": correction}, "x"):
        torch.testing.assert_close(merged(ids).logits, expert(ids).logits, atol=2e-3, rtol=2e-3)


def test_weights_are_out_by_in():
    for family in ("llama", "gpt2"):
        for module in linear_layers(tiny(family)).values():
            x = torch.randn(3, weight_of(module).shape[1])
            bias = 0 if module.bias is None else module.bias
            torch.testing.assert_close(module(x), x @ weight_of(module).T + bias)
