"""The discriminant against sklearn and plain loops; and at run time: which pass is read, what keeps a choice."""

from __future__ import annotations

import copy

import pytest
import torch

from mergedarts.correction import Correction, Position
from mergedarts.errors import UserError
from mergedarts.fit.router import Template
from mergedarts.models import decoder_layers
from mergedarts.router import NAMES, Router, content, mean_state
from mergedarts.runtime import attach, free_depth
from tests.tiny import FAMILIES, LAYERS, D, final_correction, mixed_batch, random_site, states_after, tiny


def plain_router(depth, width=D, prefix=(), suffix=(), limit=1e9, names=("a", "b")):
    """Two classes apart along a random direction, unit covariance."""
    g = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(width, 3, generator=g))[0].T
    tensors = {
        "centre": torch.zeros(width), "scale": torch.ones(width),
        "means": torch.randn(len(names), width, generator=g), "basis": basis,
        "variances": torch.tensor([4.0, 2.0, 0.5]), "levels": torch.tensor([1.5, 0.7, limit]),
    }  # fmt: skip
    return Router(list(names), depth, tensors | Template(tuple(prefix), tuple(suffix)).tensors())


def deep(model, seed=1):
    """A correction that begins after the first layer, large enough to be seen."""
    names = [name for name, _ in decoder_layers(model)]
    first = random_site("residual", D, D, seed, Position("table", 1), relu=False)
    last = random_site("residual", D, D, seed + 1, None, relu=False)
    return Correction({names[0]: first, names[2]: last})


def row_choice(model, router, ids):
    """What a router says of one row alone by the bare model's states, in float64 loops."""
    if router.depth:
        states = states_after(model, tuple(ids), [router.depth - 1])[router.depth - 1]
    else:
        states = model.get_input_embeddings()(torch.tensor(ids)).detach()
    x = states[1:].double().mean(0)
    t = {name: router.get_buffer(name).double() for name in NAMES}
    covariance = t["levels"][0] * torch.eye(D, dtype=torch.float64)
    for direction, variance in zip(t["basis"], t["variances"], strict=True):
        covariance += (variance - t["levels"][0]) * torch.outer(direction, direction)
    offsets = (x - t["centre"]) / t["scale"] - t["means"]
    distances = [float(o @ torch.linalg.solve(covariance, o)) for o in offsets]
    return router.domains[min(range(len(distances)), key=distances.__getitem__)], distances


def test_distances_are_mahalanobis():
    router = plain_router(1)
    model = tiny("llama")
    for seed in range(4):
        ids = mixed_batch("left", (9,), seed)[0][0].tolist()
        name, want = row_choice(model, router, ids)
        x = states_after(model, tuple(ids), [0])[0][1:].mean(0)[None]
        torch.testing.assert_close(router.distances(x)[0], torch.tensor(want).float(), rtol=1e-4, atol=1e-4)
        assert router.choose(x) == [name]
        p = torch.tensor([-0.5 * 0.7 * d for d in want]).softmax(0)
        torch.testing.assert_close(router.probabilities(x)[0], p, rtol=1e-4, atol=1e-4)


def test_unsure_by_distance_by_probability_and_without_content():
    router = plain_router(0, limit=4.0)
    means = router.get_buffer("means")
    assert router.choose(means) == ["a", "b"]
    assert router.choose(means + 50) == [None, None]
    assert router.choose(torch.full((1, D), float("nan"))) == [None]
    three = plain_router(0, names=("a", "b", "c"))
    middle = three.get_buffer("means").mean(0, keepdim=True)
    three.get_buffer("levels")[1] = 1e-9
    assert three.choose(middle) == [None]  # a third of the probability each


def test_content_is_what_stands_between_the_template():
    ids = torch.tensor(
        [[0, 0, 7, 8, 20, 21, 9], [7, 8, 20, 9, 22, 9, 9], [5, 7, 8, 20, 9, 0, 0], [0, 0, 0, 0, 7, 8, 9]]
    )
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]).bool()
    got = content(ids, real, [7, 8], [9]).long().tolist()
    assert got == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0], [0] * 7]
    assert content(None, real, [7, 8], [9])[0].long().tolist() == [0, 0, 0, 1, 1, 1, 1]
    states = torch.randn(4, 7, 3)
    means = mean_state(states, torch.tensor(got).bool())
    torch.testing.assert_close(means[0], states[0, 4:6].mean(0))
    assert means[3].isnan().all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("depth", [0, 1, 2, LAYERS])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_goes_where_its_own_states_say(family, depth, side):
    """With corrections after the first layer: depths beyond it are read in a pass ahead, without corrections."""
    if side == "right" and family in ("mamba", "falcon_h1"):
        pytest.skip("a state carries right padding on")
    model = tiny(family)
    if depth == 0 and family in ("gpt2", "gemma2", "gemma3_text"):
        pytest.skip("what enters its first layer is not the embedding alone")
    corrections = {"a": deep(model, 1), "b": deep(model, 5)}
    router = plain_router(depth)
    ids, mask = mixed_batch(side, (9, 6, 7, 8), seed=11)
    rows = [ids[b][mask[b].bool()].tolist() for b in range(4)]
    want = [row_choice(model, router, row)[0] for row in rows]
    with attach(model, corrections, "auto", router) as handle, torch.no_grad():
        extra = {} if family == "mamba" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        got = model(input_ids=ids, attention_mask=mask, **extra).logits
        assert handle.chosen == want
        handle.domain = want
        torch.testing.assert_close(got, model(input_ids=ids, attention_mask=mask, **extra).logits)


def test_free_depth():
    model = tiny("llama")
    names = [name for name, _ in decoder_layers(model)]
    assert free_depth(model, ["final"]) == LAYERS
    assert free_depth(model, [names[1], "final"]) == 2
    assert free_depth(model, [names[2], names[0] + ".mlp.up_proj"]) == 0


def counting(router):
    """The router, keeping count of how many rows it was asked about."""
    asked = []
    choose = router.choose
    router.choose = lambda x: asked.append(len(x)) or choose(x)
    return asked


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"},
                                     {"prefill_chunk_size": 4}], ids=str)  # fmt: skip
@pytest.mark.parametrize("depth", [1, 3])
def test_one_choice_a_call_of_generate(depth, options):
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    router = plain_router(depth)
    asked = counting(router)
    ids, mask = mixed_batch("left", (9, 6, 7), seed=11)
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    corrections = {"a": deep(model, 1), "b": deep(model, 5)}
    want = [row_choice(model, router, ids[b][mask[b].bool()].tolist())[0] for b in range(3)]
    with attach(model, corrections, "auto", router) as handle, torch.no_grad():
        got = model.generate(input_ids=ids, attention_mask=mask, **common)
        assert asked == [3 * options.get("num_beams", 1)]
        rows = handle.chosen[:: options.get("num_beams", 1)]
        if "prefill_chunk_size" not in options:
            assert rows == want
        handle.domain = rows
        assert model.generate(input_ids=ids, attention_mask=mask, **common).tolist() == got.tolist()
        handle.domain = "auto"
        model.generate(input_ids=ids, attention_mask=mask, **common)
    assert len(asked) == 2  # the next turn is asked anew
    assert "generate" not in vars(model)


def test_a_cache_keeps_its_choice_and_a_new_one_is_asked():
    model = tiny("llama")
    router = plain_router(1)
    asked = counting(router)
    ids = mixed_batch("left", (9,), 4)[0]
    with attach(model, {"a": deep(model, 1), "b": deep(model, 5)}, "auto", router) as handle, torch.no_grad():
        cache = model(input_ids=ids[:, :5], use_cache=True).cache
        first = handle.chosen
        for t in range(5, 9):
            model(input_ids=ids[:, t : t + 1], cache=cache, use_cache=True)
            assert handle.chosen == first
        assert asked == [1]
        model(input_ids=ids, use_cache=True)
        assert asked == [1, 1]
        handle.domain = "auto"  # a new turn on the old cache
        model(input_ids=ids[:, :3], cache=cache, use_cache=True)
        assert asked == [1, 1, 1]


def test_named_rows_and_routed_rows_in_one_batch():
    model = tiny("llama")
    router = plain_router(1)
    corrections = {"a": final_correction(1), "b": final_correction(2)}
    ids, mask = mixed_batch("left", (8, 8, 8))
    with attach(model, corrections, router=router) as handle, torch.no_grad():
        handle.domain = ["b", "auto", None]
        got = model(input_ids=ids, attention_mask=mask).logits
        handle.domain = ["b", handle.chosen[1], None]
        torch.testing.assert_close(got, model(input_ids=ids, attention_mask=mask).logits)


def test_unsure_is_the_uncorrected_model_bit_equal():
    model = tiny("llama")
    ids, mask = mixed_batch("left")
    with torch.no_grad():
        bare = model(input_ids=ids, attention_mask=mask).logits
        with attach(model, {"a": final_correction(1), "b": final_correction(2)}, "auto", plain_router(1, limit=0.0)):
            assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, bare)


def test_a_router_that_does_not_fit_itself():
    router = plain_router(1)
    assert router.is_consistent()
    for name in NAMES:
        broken = copy.deepcopy(router)
        broken.register_buffer(name, torch.zeros(5, 5, 5))
        assert not broken.is_consistent()
    with pytest.raises(UserError, match="no router"), attach(tiny("llama"), {"a": final_correction()}, "auto"):
        pass
