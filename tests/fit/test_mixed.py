"""Splitting a budget between weight updates and corrections in depth."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from mergedarts.correction import Correction, SiteCorrection
from mergedarts.fit.linear import factors_of, keep_weights, linear_layers, rank_one_cost
from mergedarts.fit.mixed import SHARES, choose_share, fit_share, updates
from mergedarts.store import FeatureStore
from tests.tiny import D, prompt_set, tiny


def planted(family="llama"):
    """A merged model, and an expert that differs from it by rank 1 in each linear layer."""
    merged = tiny(family)
    expert = copy.deepcopy(merged)
    g = torch.Generator().manual_seed(0)
    for module in linear_layers(expert).values():
        out, into = module.weight.shape
        module.weight += 0.1 * torch.outer(torch.randn(out, generator=g), torch.randn(into, generator=g)) / into**0.5
    store = FeatureStore("expert", "weights", torch.float32)
    keep_weights(expert, store)
    return merged, expert, factors_of(merged, store, rank_one_cost(merged), "t")


def marker(parameters: int) -> Correction:
    site = SiteCorrection("residual", torch.zeros(1, D), torch.zeros(D, 1))
    return Correction({"model.layers.0": site}) if parameters else Correction()


def test_updates_spend_a_budget_and_all_of_it_is_the_expert():
    merged, expert, factors = planted()
    one = rank_one_cost(merged)
    assert one == sum(f.cost for f in factors.values())
    for budget in (0, one // 3, one):
        assert updates(factors, budget).parameter_count <= budget
    ids = torch.tensor([prompt_set((12,)).sequences[0].ids])
    seen = {}

    def depth(fitted, left):
        seen["logits"], seen["left"], seen["fitted"] = merged(ids).logits, left, fitted
        return marker(1)

    bare = merged(ids).logits
    got = fit_share(merged, factors, 0.5, 2 * one, [3, 1], depth)
    torch.testing.assert_close(seen["logits"], expert(ids).logits, atol=1e-3, rtol=1e-3)
    assert (seen["logits"] - bare).abs().max() > 0.05
    assert seen["left"] == 2 * one - updates(factors, one).parameter_count
    assert seen["fitted"] == [3, 1]
    assert {name for name, _ in got.items()} == set(linear_layers(merged)) | {"model.layers.0"}
    assert torch.equal(merged(ids).logits, bare)


def test_no_share_is_the_fit_in_depth_alone():
    merged, _, factors = planted()
    got = fit_share(merged, factors, 0.0, 1000, [0], lambda fitted, left: marker(left == 1000))
    assert [name for name, _ in got.items()] == ["model.layers.0"]


class Fake:
    """Held-out measures that know only how much of a correction is weight updates."""

    def __init__(self, kl, kept, budget=1):
        self.kl, self.kept, self.budget = kl, kept, budget

    def __len__(self):
        return len(self.kept)

    def corrected(self, correction):
        spent = sum(sum(p.numel() for p in s.parameters()) for _, s in correction.items() if s.kind == "linear")
        share = min(SHARES, key=lambda s: abs(s - spent / self.budget))
        return SimpleNamespace(kl=torch.full((4,), self.kl[share], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kl", "want"),
    [
        ((1.0, 0.9, 0.8, 0.7), SHARES[3]),
        ((1.0, 0.7, 0.8, 0.9), SHARES[1]),
        ((1.0, 1.2, 0.96, 1.0), 0.0),
        ((0.5, 0.6, 0.7, 0.8), 0.0),
    ],
    ids=["most", "middle", "too little gained", "none"],
)
def test_the_share_of_least_kl_on_sequences_kept_back(kl, want):
    merged, _, factors = planted()
    one = rank_one_cost(merged)
    table = dict(zip(SHARES, kl, strict=True))
    kept_back, used = [], []

    def held(kept):
        kept_back.extend(kept)
        return Fake(table, kept, one)

    def depth(fitted, left):
        used.append(fitted)
        return marker(1)

    share, scores = choose_share(merged, factors, one, list(range(10, 19)), depth, held)
    assert share == want
    assert scores == {f"{s:g}": pytest.approx(table[s]) for s in SHARES}
    assert kept_back == [10, 13, 16]
    assert used == [[11, 12, 14, 15, 17, 18]] * len(SHARES)


def test_too_few_sequences_to_compare_on():
    merged, _, factors = planted()
    assert choose_share(merged, factors, 3000, [0, 1, 2, 3, 4], lambda f, left: marker(1), lambda k: Fake({}, k)) == (
        0.0,
        {},
    )
