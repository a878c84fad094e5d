"""The sweep against a plain loop that reruns the whole model with the sites fitted so far, and a planted truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mergedarts import features
from mergedarts.config import PositionForm
from mergedarts.correction import Correction, Position, SiteCorrection
from mergedarts.fit.fisher import Metric
from mergedarts.fit.sweep import Site, SweepSettings, apply_site, sweep
from mergedarts.models import decoder_layers
from mergedarts.runtime import attach
from tests.fit import slow
from tests.tiny import LAYERS, D, head_input, prompt_set, states_after, tiny

LENGTHS = (20, 31, 9, 26, 31, 17)


def setting(ranks, form="constant", size=0, inside=True, ridge=0.05):
    return SweepSettings(ranks, (PositionForm(form=form, size=size),), inside, (ridge,))


def functions(form, size, positions):
    """[n, k] position functions of the forms without a penalty, written out."""
    if form == "none":
        return np.zeros((len(positions), 0))
    if form == "constant":
        return np.ones((len(positions), 1))
    last = max(positions)
    return np.array(
        [[math.cos(math.pi * j * math.log1p(p) / math.log1p(last)) for j in range(size)] for p in positions]
    )


def flat_states(model, prompts, layer):
    return torch.cat([states_after(model, s.ids, [layer])[layer] for s in prompts.sequences])


def by_hand(model, prompts, targets, weights, metrics, settings):
    """By layer the dense map [d + k, d]: every site is fitted on a rerun of the model with those before it."""
    form, ridge = settings.forms[0], settings.ridges[0]
    names = [name for name, _ in decoder_layers(model)]
    positions = np.concatenate([np.arange(len(s)) for s in prompts.sequences])
    sites, maps, after = {}, {}, {}
    for layer, rank in sorted(settings.ranks.items()):
        with attach(model, {"a": Correction(sites)}, "a"):
            states = flat_states(model, prompts, layer)
        w = weights(layer).double().numpy()
        kept = w > 0
        h, d = states.double().numpy(), (targets[layer] - states).double().numpy()
        f = functions(form.form, form.size, positions[kept])
        metric = np.eye(D)
        if metrics(layer) is not None:
            metric = metrics(layer).matrix.numpy()
            metric = metric + 0.05 * np.trace(metric) / D * np.eye(D)
        dense = slow.truncated(h[kept], f, d[kept], w[kept], metric, ridge, rank, settings.inside)
        maps[layer] = dense
        # As a site: h' = h - up down h - bias(p), of full width where it is not of low rank by construction.
        position = {
            "none": None,
            "constant": Position("table", 1),
            "smooth": Position("smooth", form.size, int(positions[kept].max())),
        }[form.form]
        bias = None if position is None else -torch.tensor(dense[D:]).float()
        sites[names[layer]] = SiteCorrection(
            "residual", torch.eye(D), -torch.tensor(dense[:D].T).float(), bias, position
        )
        after[layer] = (
            states + torch.tensor(h @ dense[:D] + functions(form.form, form.size, positions) @ dense[D:]).float()
        )
    return maps, after


def dense_of(site):
    """[d + k, d] what a fitted site adds, as one map of (h, f)."""
    low = (site.up @ site.down).T if site.rank else torch.zeros(D, D)
    of_f = torch.zeros(0, D)
    if site.position_bias is not None:
        of_f = site.position_bias
    if site.position_inner is not None:
        of_f = site.position_inner @ site.up.T
    return -torch.cat([low, of_f]).detach().double().numpy()


@pytest.mark.parametrize("fisher", [False, True], ids=["euclidean", "fisher"])
@pytest.mark.parametrize(
    ("form", "size", "inside"),
    [("constant", 0, True), ("smooth", 3, False), ("none", 0, True)],
    ids=["constant inside", "smooth outside", "none"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "gpt2"])
def test_equals_rerunning_the_whole_model(family, form, size, inside, fisher, monkeypatch):
    monkeypatch.setattr(features.batches, "__defaults__", (64,))
    merged, expert, prompts = tiny(family), tiny(family, seed=1), prompt_set(LENGTHS)
    targets = [flat_states(expert, prompts, i) for i in range(LAYERS)]
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(LAYERS, prompts.tokens, generator=g).double()
    drawn[:, torch.rand(prompts.tokens, generator=g) < 0.2] = 0.0
    roots = torch.randn(LAYERS, D, D, generator=g).double()

    def metric(layer):
        return Metric(roots[layer] @ roots[layer].T, 1.0, 0.5) if fisher else None

    settings = setting({0: 2, 2: 3} if form == "none" else {0: 2, 1: 1, 2: 3}, form, size, inside)
    result = sweep(merged, prompts, targets.__getitem__, drawn.__getitem__, metric, settings, "test")
    maps, after = by_hand(merged, prompts, targets, drawn.__getitem__, metric, settings)
    sites = dict(result.correction.items())
    names = [name for name, _ in decoder_layers(merged)]
    assert list(sites) == [names[i] for i in settings.ranks]
    for layer, rank in settings.ranks.items():
        site = sites[names[layer]]
        assert site.rank == rank
        want = maps[layer]
        np.testing.assert_allclose(dense_of(site), want, atol=3e-3 * np.abs(want).max())
    assert result.helped == []
    with attach(merged, {"a": result.correction}, "a"):
        got = []
        for s in prompts.sequences:
            caught = []
            handle = decoder_layers(merged)[2][1].register_forward_hook(lambda m, a, o, c=caught: c.append(o))
            head_input(merged, s.ids)
            handle.remove()
            got.append((caught[0][0] if isinstance(caught[0], tuple) else caught[0])[0])
    torch.testing.assert_close(torch.cat(got), after[2], atol=1e-2, rtol=1e-2)


def planted(expert, layer, rank, seed=0):
    """An expert whose stream after a layer is bent by h + U V h + c, in place, and the hook that does it."""
    g = torch.Generator().manual_seed(seed)
    u, v = 0.5 * torch.randn(D, rank, generator=g), torch.randn(rank, D, generator=g) / math.sqrt(D)
    c = 0.3 * torch.randn(D, generator=g)

    def bend(_module, _args, out):
        h = out[0] if isinstance(out, tuple) else out
        bent = h + (h @ v.T) @ u.T + c
        return (bent, *out[1:]) if isinstance(out, tuple) else bent

    return decoder_layers(expert)[layer][1].register_forward_hook(bend)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "gpt2"])
def test_planted_map_is_undone_at_its_rank(family, rank, inside):
    """Rank r and a constant (inside the rank, the constant takes one more): the expert's logits come back."""
    expert, prompts = tiny(family), prompt_set(LENGTHS)
    targets = [flat_states(expert, prompts, i) for i in range(LAYERS)]
    want = [head_input(expert, s.ids)[1] for s in prompts.sequences]
    planted(expert, 1, rank)  # from here on the expert is the merged model
    ones = torch.ones(prompts.tokens, dtype=torch.float64)
    drift = max(
        float((head_input(expert, s.ids)[1] - w).abs().max()) for s, w in zip(prompts.sequences, want, strict=True)
    )
    assert drift > 0.5
    settings = setting({1: rank + inside, 2: 1}, inside=inside, ridge=0.0)
    result = sweep(expert, prompts, targets.__getitem__, lambda i: ones, lambda i: None, settings, "test")
    with attach(expert, {"a": result.correction}, "a"):
        for s, w in zip(prompts.sequences, want, strict=True):
            torch.testing.assert_close(head_input(expert, s.ids)[1], w, atol=2e-3 * drift, rtol=0)
        fresh = prompt_set((14,), seed=99).sequences[0]
        repaired = head_input(expert, fresh.ids)[1]
    clean = head_input(tiny(family), fresh.ids)[1]
    torch.testing.assert_close(repaired, clean, atol=5e-3 * drift, rtol=0)
    # One rank less does not do it, so the rank is what was planted.
    less = setting({1: rank - 1 + inside}, inside=inside, ridge=0.0)
    if less.ranks[1]:
        result = sweep(expert, prompts, targets.__getitem__, lambda i: ones, lambda i: None, less, "test")
        with attach(expert, {"a": result.correction}, "a"):
            left = max(
                float((head_input(expert, s.ids)[1] - w).abs().max())
                for s, w in zip(prompts.sequences, want, strict=True)
            )
        assert left > 0.02 * drift


def test_an_expert_equal_to_the_merged_model_needs_nothing():
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    targets = [flat_states(model, prompts, i) for i in range(LAYERS)]
    ones = torch.ones(prompts.tokens, dtype=torch.float64)
    result = sweep(
        model, prompts, targets.__getitem__, lambda i: ones, lambda i: None, setting({0: 2, 1: 2, 2: 2}), "t"
    )
    for _, site in result.correction.items():
        assert np.abs(dense_of(site)).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_site_that_was_chosen_at_fits_as_one_that_was_not(dtype):
    """The folds' sums are the sums of all tokens; with tokens left out, a form with penalties, and one empty fold."""
    g = torch.Generator().manual_seed(4)
    states = torch.randn(60, 6, generator=g).to(dtype)
    target = (states.float() @ torch.randn(6, 6, generator=g)).to(dtype)
    weights = torch.rand(60, generator=g).double() * (torch.arange(60) % 7 > 0)
    positions, sequence = torch.arange(60) % 10, (torch.arange(60) // 10) % 2
    forms = (PositionForm(form="table", size=4), PositionForm(form="constant"))
    fits = []
    for chooses in (True, False):
        site = Site(states, target, weights, positions, sequence, None)
        if chooses:
            site.choose(SweepSettings({}, forms, False, (0.1, 1.0)), 2)
        fits.append(site.fit(forms[0], 0.1, 2, False)[0])
    for name, value in fits[0].state_dict().items():
        torch.testing.assert_close(value, fits[1].state_dict()[name], rtol=1e-4, atol=1e-5)
    assert len(fits[0].state_dict()) > 2


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_the_ridge_is_chosen_under_the_first_form_and_the_form_at_that_ridge(inside):
    """Held-out errors against refits without each fold; a drift that grows with position picks the form."""
    g = torch.Generator().manual_seed(2)
    states = torch.randn(48, 5, generator=g)
    positions, sequence = torch.arange(48) % 8, torch.arange(48) // 8
    drift = torch.log1p(positions)[:, None] * torch.randn(5, generator=g)
    target = states + 0.3 * states @ torch.randn(5, 5, generator=g) + drift + torch.randn(48, 5, generator=g)
    forms, ridges = (PositionForm(form="constant"), PositionForm(form="smooth", size=2)), (0.01, 0.3, 3.0)
    site = Site(states, target, torch.ones(48), positions, sequence, None)
    form, ridge, errors = site.choose(SweepSettings({}, forms, inside, ridges), 2)

    def held_out(form, ridge):
        x, d, w = states.double().numpy(), (target - states).double().numpy(), np.ones(48)
        f = functions(form.form, form.size, positions.tolist())
        left = 0.0
        for fold in range(3):
            rest, held = (sequence % 3 != fold).numpy(), (sequence % 3 == fold).numpy()
            dense = slow.truncated(x[rest], f[rest], d[rest], w[rest], np.eye(5), ridge, 2, inside)
            left += np.square(d[held] - np.concatenate([x, f], 1)[held] @ dense).sum()
        return left / np.square(d).sum()

    first = {r: held_out(forms[0], r) for r in ridges}
    assert ridge == min(first, key=first.get) != ridges[0]
    want = {f"constant, ridge {r:g}": e for r, e in first.items()}
    want[f"{forms[1].label}, ridge {ridge:g}"] = held_out(forms[1], ridge)
    assert errors == pytest.approx(want, abs=2e-5)
    assert form == forms[1]


def test_no_sites_no_correction():
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    result = sweep(model, prompts, lambda i: None, lambda i: None, lambda i: None, setting({}), "test")
    assert dict(result.correction.items()) == {}


def test_apply_site_rounds_as_the_runtime_does():
    """bf16 states: bit-equal to what the attached site gives."""
    model, prompts = tiny("llama", torch.bfloat16), prompt_set((9,))
    g = torch.Generator().manual_seed(0)
    site = SiteCorrection(
        "residual", torch.randn(2, D, generator=g), torch.randn(D, 2, generator=g), torch.randn(1, D, generator=g),
        Position("table", 1),
    )  # fmt: skip
    name = decoder_layers(model)[1][0]
    plain = states_after(model, prompts.sequences[0].ids, [1])[1]
    with attach(model, {"a": Correction({name: site})}, "a"):
        corrected = states_after(model, prompts.sequences[0].ids, [1])[1]
    got = apply_site(site, plain, torch.arange(9))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, corrected)
    assert site.down.dtype == torch.float32
