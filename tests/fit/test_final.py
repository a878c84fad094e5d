"""The final site: position tables, the KL objective and the choice by folds, against what is written out here."""

from __future__ import annotations

import pytest
import torch

from mergedarts.config import PositionForm
from mergedarts.correction import Position, SiteCorrection
from mergedarts.errors import UserError
from mergedarts.features import Readout
from mergedarts.fit.final import FinalData, fit_final
from mergedarts.fit.kl import fit_kl
from mergedarts.fit.positions import ROW_PRIOR
from tests.tiny import D, tiny


def tokens(count=240, seed=0, shift=None):
    """States, a target that differs by a low-rank map (and a shift by position), 12 sequences of 20."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(count, D, generator=g)
    low = torch.randn(D, 2, generator=g) @ torch.randn(2, D, generator=g) / D
    positions = torch.arange(count) % 20
    target = h + h @ low.T + 0.01 * torch.randn(count, D, generator=g)
    if shift is not None:
        target = target + shift[positions]
    return FinalData(h, target, torch.ones(count, dtype=torch.float64), positions, torch.arange(count) // 20)


def fitted(data, forms, **changes):
    settings = {
        "rank": 2, "ridge": 1e-4, "metric": "states", "l1": False, "objective": "states", "top_k": 8,
        "expert_head": None, "title": "t",
    } | changes  # fmt: skip
    return fit_final(data, Readout(tiny("llama")), forms=forms, **settings)


def test_a_low_rank_map_is_found():
    data = tokens()
    site, _, notes = fitted(data, (PositionForm(form="none"),))
    left = (site(data.states, data.states, data.positions) - data.target).abs().mean()
    assert left < 0.02
    assert notes == []


def test_rows_never_seen_are_the_mean_and_rows_seen_are_drawn_to_it():
    """With no low-rank difference, a row is (n mean_p + prior c) / (n + prior), c the constant of the same fit."""
    g = torch.Generator().manual_seed(5)
    shift = torch.randn(20, D, generator=g)
    data = tokens()
    data = FinalData(data.states, data.states + shift[data.positions], *(data.weights, data.positions, data.sequence))
    site, _, _ = fitted(data, (PositionForm(form="table", size=40),), ridge=1e9)
    rows = -site.position_bias.detach()
    constant = rows[20]
    assert torch.allclose(rows[20:], constant.expand(20, D), atol=1e-5)
    assert constant.abs().mean() > 0.05
    want = (12 * shift + ROW_PRIOR * constant) / (12 + ROW_PRIOR)
    torch.testing.assert_close(rows[:20], want, atol=2e-3, rtol=2e-3)


def test_the_form_that_generated_the_data_is_chosen():
    steps = torch.zeros(20, D)
    steps[10:] = 1.0
    forms = (PositionForm(form="none"), PositionForm(form="constant"), PositionForm(form="smooth", size=6))
    _, choices, _ = fitted(tokens(shift=steps), forms)
    assert choices["position"] == "smooth: 6"
    _, choices, _ = fitted(tokens(shift=torch.ones(20, D)), (forms[0], forms[1]))
    assert choices["position"] == "constant"


def kl_by_hand(model, site, data, head=None):
    """Mean KL(expert || corrected) over tokens by full softmaxes."""
    total = 0.0
    weight = model.get_output_embeddings().weight
    for h, goal, p in zip(data.states, data.target, data.positions, strict=True):
        fixed = site(h[None], h[None], p[None])[0]
        log_q = torch.log_softmax((weight @ fixed).double(), -1)
        log_p = torch.log_softmax(((head[0] if head else weight) @ goal).double(), -1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(data.states)


@pytest.mark.parametrize("other_head", [False, True])
def test_with_the_whole_vocabulary_the_objective_is_the_kl(other_head):
    """Its decrease equals that of the KL by full softmaxes, and it does decrease."""
    model = tiny("llama")
    data = tokens(60)
    head = (model.get_output_embeddings().weight + 0.05 * torch.randn(96, D), None) if other_head else None
    zero = SiteCorrection("final", torch.randn(2, D) / D, torch.zeros(D, 2), torch.zeros(1, D), Position("table", 1))
    before = kl_by_hand(model, zero, data, head)
    site, told = fit_kl(
        zero, data.states, data.target, data.weights, data.positions, Readout(model), head, 96, "t"
    )  # fmt: skip
    after = kl_by_hand(model, site, data, head)
    assert after < 0.9 * before
    assert told["before"] - told["after"] == pytest.approx(before - after, rel=1e-3)


def test_fewer_tokens_keep_the_mass_outside_them():
    """At the start the top-k objective is exactly the full one, whatever k."""
    model = tiny("llama")
    data = tokens(40)
    values = []
    for k in (1, 5, 96):
        zero = SiteCorrection("final", torch.zeros(1, D), torch.zeros(D, 1), torch.zeros(1, D), Position("table", 1))
        _, told = fit_kl(zero, data.states, data.target, data.weights, data.positions, Readout(model), None, k, "t")
        values.append(told["before"])
    assert values == pytest.approx([values[-1]] * 3, rel=1e-5)


def test_logits_that_are_bent_are_refused():
    model = tiny("gemma2")
    data = tokens(20)
    zero = SiteCorrection("final", torch.zeros(1, D), torch.zeros(D, 1))
    with pytest.raises(UserError, match="bends them"):
        fit_kl(zero, data.states, data.target, data.weights, data.positions, Readout(model), None, 8, "t")
