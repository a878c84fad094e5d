"""The router's fit against sklearn's and scipy's answers, and what it reads of prompts against plain passes."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize_scalar

from mergedarts.features import hooked
from mergedarts.fit.router import (
    FOLDS,
    Template,
    choose_depth,
    depth_groups,
    fit_router,
    ledoit_wolf,
    prompt_means,
    prompt_part,
)
from mergedarts.models import decoder_layers
from mergedarts.prompts import PromptSet, TokenSequence
from mergedarts.store import FeatureStore
from tests.tiny import LAYERS, D, prompt_set, states_after, tiny

NONE = Template((), ())


def layers(model):
    return [layer for _, layer in decoder_layers(model)]


def clouds(count=20, width=30, apart=1.0, seed=0, classes=3):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g) / width**0.5 + torch.eye(width)
    means = apart * torch.randn(classes, width, generator=g)
    labels = torch.arange(classes).repeat_interleave(count)
    return means[labels] + torch.randn(classes * count, width, generator=g) @ mix, labels


@pytest.mark.parametrize(("count", "width"), [(8, 40), (60, 12), (30, 30)])
def test_shrinkage_is_that_of_the_paper(count, width):
    """Ledoit & Wolf (2004), their definitions by loops over samples."""
    x = clouds(count, width, 0.0)[0].double()[:count]
    x = x - x.mean(0)
    s = x.T @ x / count
    m = s.trace() / width
    d2 = ((s - m * torch.eye(width)) ** 2).sum() / width
    b2 = sum(((torch.outer(row, row) - s) ** 2).sum() / width for row in x) / count**2
    shrinkage, power = ledoit_wolf(x)
    assert shrinkage == pytest.approx(float(min(b2, d2) / d2), rel=1e-9)
    assert power == pytest.approx(float(m), rel=1e-9)


@pytest.mark.parametrize(("count", "width"), [(10, 50), (40, 8)])
def test_decisions_are_those_of_a_dense_discriminant(count, width):
    """Class means and the whole d x d covariance, inverted; scores to a constant a row."""
    x, labels = clouds(count, width)
    fitted = fit_router(x, labels, ["a", "b", "c"], 2, NONE)
    x = x.double()
    means = torch.stack([x[labels == k].mean(0) for k in range(3)])
    residual = x - means[labels]
    scale = residual.square().mean(0).sqrt()
    z = residual / scale
    shrinkage, power = ledoit_wolf(z)
    covariance = (1 - shrinkage) * z.T @ z / len(z) + shrinkage * power * torch.eye(width, dtype=torch.float64)
    probes = clouds(5, width, seed=9)[0].double()
    offsets = (probes[:, None] - means) / scale
    want = torch.einsum("bkd,de,bke->bk", offsets, torch.linalg.inv(covariance), offsets)
    torch.testing.assert_close(fitted.router.distances(probes).double(), want, rtol=2e-4, atol=1e-3)
    assert fitted.router.depth == 2


def test_temperature_is_the_likeliest_on_folds_and_the_limit_a_quantile():
    x, labels = clouds(15, 40, apart=0.25, seed=3)
    fitted = fit_router(x, labels, ["a", "b", "c"], 0, NONE)
    fold = torch.cat([torch.arange(15) % FOLDS] * 3)
    distances = torch.empty(45, 3, dtype=torch.float64)
    for i in range(FOLDS):
        rest = fold != i
        part = fit_router(x[rest], labels[rest], ["a", "b", "c"], 0, NONE).router
        distances[~rest] = part.distances(x[~rest]).double()

    def loss(t):
        return -float((-0.5 * t * distances).log_softmax(-1).gather(1, labels[:, None]).sum())

    best = minimize_scalar(loss, bounds=(1e-6, 1.0), method="bounded", options={"xatol": 1e-8}).x
    _, temperature, limit = fitted.router.get_buffer("levels").tolist()
    assert temperature == pytest.approx(best, rel=1e-3)
    assert temperature < 0.9  # the classes overlap, so the plain posterior is too sure of itself
    own = distances.gather(1, labels[:, None]).squeeze(1)
    assert limit == pytest.approx(float(own.quantile(0.99)), rel=1e-3)
    chosen = (-0.5 * temperature * distances).softmax(-1)
    want = torch.where((distances.min(1).values <= limit) & (chosen.max(1).values >= 0.5), chosen.argmax(1), -1)
    assert fitted.chosen.tolist() == want.tolist()


def test_constant_states_and_one_domain():
    x = torch.ones(6, 4)
    router = fit_router(x, torch.zeros(6, dtype=torch.long), ["a"], 0, NONE).router
    assert router.is_consistent()
    assert router.choose(torch.stack([torch.ones(4), torch.full((4,), 9.0)])) == ["a", None]


def test_depth_is_free_where_that_is_good_enough():
    good, labels = clouds(20, 20, apart=3.0)
    noise = torch.randn(60, 20, generator=torch.Generator().manual_seed(1))

    def chosen(depths, free):
        means = torch.stack([good if deep else noise for deep in depths], 1)
        asked = []

        def some(wanted):
            asked.extend(wanted)
            return means[:, wanted]

        groups = depth_groups(len(depths) - 1, free)
        found, accuracy = choose_depth(some, labels, ["a", "b", "c"], groups, free, NONE)
        assert sorted(asked) == sorted(accuracy)
        return found.router.depth, accuracy

    everywhere, _ = chosen([1] * 9, 1)
    assert everywhere in (0, 1)
    assert chosen([0, 1, 1, 1, 1, 1, 1, 1, 1], 1)[0] == 1
    depth, accuracy = chosen([0, 0, 1, 1, 1, 1, 1, 1, 1], 1)
    assert depth == 2  # the earliest that is good, in a second pass
    assert set(accuracy) == {0, 1, 2}  # which are a quarter of the layers: no more were run
    assert accuracy[0] < 0.6 < accuracy[2]
    depth, accuracy = chosen([0, 0, 0, 0, 1, 1, 1, 1, 1], 1)
    assert depth == 4
    assert set(accuracy) == {0, 1, 2, 4, 6, 8}
    assert chosen([0, 0, 0, 0, 1, 1, 1, 1, 1], 8)[0] == 4


@pytest.mark.parametrize(
    ("layers", "free", "want"),
    [(1, 1, [(0, 1)]), (2, 1, [(0, 1), (2,)]), (30, 1, [(0, 1, 8), (15, 22, 30)]), (30, 0, [(0, 8), (15, 22, 30)])],
)
def test_depths_are_tried_in_two_groups(layers, free, want):
    assert depth_groups(layers, free) == want


def test_prompt_part_ends_with_the_token_that_predicts_the_answer():
    def part(marks):
        s = TokenSequence(tuple(range(len(marks))), tuple(m == "1" for m in marks))
        return prompt_part(s).ids

    assert part("000110") == (0, 1, 2, 3)
    assert part("0110011") == (0, 1, 2, 3, 4, 5)  # the last of two answers
    assert part("0000") == (0, 1, 2, 3)
    assert part("110") == (0,)


def test_template_of_prompts():
    assert Template.of([(1, 2, 5, 9), (1, 2, 6, 7, 9)]) == Template((1, 2), (9,))
    assert Template.of([(1, 2, 9), (1, 2, 9)]) == Template((1, 2, 9), ())
    assert Template.of([(1, 2), (1, 2, 2)]) == Template((1, 2), ())


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"])
def test_means_are_those_of_plain_passes(family):
    model = tiny(family)
    inner = prompt_set((4, 9, 6), response=None)
    template = Template((40, 41), (42,))
    prompts = PromptSet(tuple(TokenSequence((40, 41, *s.ids, 42), (False,) * (len(s) + 3)) for s in inner.sequences))
    store = FeatureStore("m", prompts.digest, torch.float32)
    depths = tuple(range(LAYERS + 1))
    means = prompt_means(model, prompts, template, store, depths, "t")
    for i, s in enumerate(prompts.sequences):
        states = states_after(model, s.ids, list(range(LAYERS)))
        for layer in range(LAYERS):
            torch.testing.assert_close(means[i, layer + 1], states[layer][2:-1].mean(0), atol=1e-5, rtol=1e-4)
    assert means.shape == (3, LAYERS + 1, D)
    assert torch.equal(prompt_means(None, prompts, template, store, depths, "t"), means)  # from the store
    ran = []
    with hooked(*(layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers(model)))):
        for some in ((0,), (0, 1), (1,), (LAYERS,)):
            ran.clear()
            assert torch.equal(prompt_means(model, prompts, template, store, some, "t"), means[:, some])
            assert set(ran) == set(range(max(1, *some)))  # and no further
