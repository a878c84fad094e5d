"""Features against plain passes of the whole model, one sequence at a time."""

from __future__ import annotations

import math

import pytest
import torch

from mergedarts import features
from mergedarts.errors import UserError
from mergedarts.features import (
    Readout,
    batches,
    collect,
    continuations,
    entropy,
    final_states,
    keep_entropies,
    padded,
)
from mergedarts.heads import keep_head, load_head
from mergedarts.store import FeatureStore
from tests.tiny import FAMILIES, LAYERS, VOCAB, D, head_input, prompt_set, slow_logits, states_after, tiny

LENGTHS = (7, 12, 1, 12, 4, 10)


@pytest.fixture(params=[1, 24, 4096], ids=lambda n: f"{n} tokens a batch")
def budget(request, monkeypatch):
    monkeypatch.setattr(features.batches, "__defaults__", (request.param,))
    return request.param


def slow_entropy(logits):
    """-sum p log p of one row, in Python floats."""
    values = [float(v) for v in logits]
    top = max(values)
    z = sum(math.exp(v - top) for v in values)
    return -sum(math.exp(v - top) / z * (v - top - math.log(z)) for v in values if v > -math.inf)


@pytest.mark.parametrize("tokens", [1, 11, 24, 25, 30, 4096])
def test_batches_hold_every_sequence_once_within_the_budget(tokens):
    prompts = prompt_set((7, 12, 1, 12, 4, 10, 10, 3))
    out = batches(prompts, tokens)
    assert sorted(i for batch in out for i in batch) == list(range(8))
    for batch in out:
        longest = max(len(prompts.sequences[i]) for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= tokens
    assert len(out) == 1 or tokens < 8 * 12


def test_padded_rows_begin_with_their_tokens():
    prompts = prompt_set((3, 5))
    ids = padded(prompts, [1, 0], torch.device("cpu"))
    assert ids.tolist() == [list(prompts.sequences[1].ids), [*prompts.sequences[0].ids, 0, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_final_states_are_the_input_of_the_head(family):
    model, prompts = tiny(family), prompt_set(LENGTHS)
    got = {}

    def take(batch, state):
        for row, i in enumerate(batch):
            got[i] = state[row, : len(prompts.sequences[i])].clone()

    final_states(model, prompts, take, "test")
    for i, s in enumerate(prompts.sequences):
        torch.testing.assert_close(got[i], head_input(model, s.ids)[0], atol=2e-5, rtol=2e-5)
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("chunk", [16, None], ids=["16 tokens a chunk", "one chunk"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mamba", "falcon_h1"])
def test_collect(family, budget, chunk, monkeypatch):
    """Final states, layers and entropies in flat order, whatever the batches and the chunks of the read-out."""
    if chunk:
        monkeypatch.setattr(features, "CHUNK_ELEMENTS", 1)
    model, prompts = tiny(family), prompt_set(LENGTHS)
    store = FeatureStore("m", prompts.digest, torch.float32)
    collect(model, prompts, store, "test", [0, LAYERS - 1])
    assert not store.has("entropy")
    keep_entropies(model, store, "test")
    final, logits, layers = [], [], {0: [], LAYERS - 1: []}
    for s in prompts.sequences:
        state, out = head_input(model, s.ids)
        final.append(state)
        logits.append(out)
        for i, value in states_after(model, s.ids, list(layers)).items():
            layers[i].append(value)
    close = {"atol": 3e-5, "rtol": 3e-5}
    torch.testing.assert_close(store.load("final")["hidden"], torch.cat(final), **close)
    for i, values in layers.items():
        torch.testing.assert_close(store.load(f"layer-{i}")["hidden"], torch.cat(values), **close)
    want = torch.tensor([slow_entropy(row) for row in torch.cat(logits)])
    torch.testing.assert_close(store.load("entropy")["entropy"], want, atol=2e-4, rtol=2e-4)
    assert float(want.max() - want.min()) > 0.1


def test_collect_without_entropies_or_layers():
    model, prompts = tiny("llama"), prompt_set((5, 3))
    store = FeatureStore("m", prompts.digest, torch.float32)
    collect(model, prompts, store, "test", [])
    assert store.has("final")
    assert not store.has("entropy")


def test_states_that_are_not_finite_are_said_and_not_kept():
    model, prompts = tiny("llama"), prompt_set((5, 3))
    model.get_decoder().norm.weight.fill_(float("inf"))
    store = FeatureStore("m", prompts.digest, torch.float32)
    with pytest.raises(UserError, match=r"expert: hidden states are not finite.*dtype"):
        collect(model, prompts, store, "expert", [])
    assert not store.has("final")
    assert list(store.path.iterdir()) == []
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_readout_equals_the_models_logits(family):
    """Soft-capping (gemma2) and multipliers (falcon_h1) included."""
    model = tiny(family)
    states, logits = head_input(model, prompt_set((9,)).sequences[0].ids)
    readout = Readout(model)
    torch.testing.assert_close(readout(states), logits, atol=2e-5, rtol=2e-5)
    assert readout(states[:1]).shape == (1, VOCAB)
    after = head_input(model, prompt_set((9,)).sequences[0].ids)[1]
    assert torch.equal(after, logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_readout_with_another_head(family):
    """Another model's head of another vocabulary and with a bias: the family's own soft-cap and scale still apply."""
    model = tiny(family)
    states, _ = head_input(model, prompt_set((9,)).sequences[0].ids)
    g = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(70, D, generator=g) * 0.3, torch.randn(70, generator=g)
    got = Readout(model)(states, (weight, bias))

    class Other:
        config = model.config

        @staticmethod
        def get_output_embeddings():
            head = torch.nn.Linear(D, 70)
            head.weight.data, head.bias.data = weight, bias
            return head

    with torch.no_grad():
        want = slow_logits(Other, states)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    again = Readout(model)(states)
    torch.testing.assert_close(again, slow_logits(model, states), atol=2e-5, rtol=2e-5)


def test_readout_is_differentiable():
    model = tiny("gemma2")
    states, _ = head_input(model, prompt_set((4,)).sequences[0].ids)
    h = states.clone().requires_grad_()
    Readout(model).logits(h)[:, 5].sum().backward()
    want = states.clone().requires_grad_()
    slow_logits(model, want)[:, 5].sum().backward()
    torch.testing.assert_close(h.grad, want.grad, atol=1e-5, rtol=1e-5)


def test_entropy_against_a_loop():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=g) * torch.tensor([0.0, 0.1, 1.0, 5.0, 50.0, 500.0])[:, None]
    want = [slow_entropy(row) for row in logits.double()]
    torch.testing.assert_close(entropy(logits).double(), torch.tensor(want).double(), atol=1e-5, rtol=1e-5)
    masked = torch.tensor([[0.0, 0.0, -math.inf]])
    assert float(entropy(masked)) == pytest.approx(math.log(2), rel=1e-6)


def greedy(model, ids, eos, tokens):
    """One full pass a token, no cache, no padding; the stop token is kept."""
    row = list(ids)
    for _ in range(tokens):
        with torch.no_grad():
            row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        if row[-1] in eos:
            break
    return row


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon_h1"])
def test_continuations_equal_a_greedy_loop(family, budget):
    model, prompts = tiny(family), prompt_set((7, 9, 1, 4), response=None)
    free = [greedy(model, s.ids, set(), 8) for s in prompts.sequences]
    # Stop tokens that some of the sequences do write, at different places.
    eos = {free[0][-6], free[1][-3]}
    got = continuations(model, prompts, eos, 8, "test")
    want = [greedy(model, s.ids, eos, 8) for s in prompts.sequences]
    assert len({len(w) - len(s) for w, s in zip(want, prompts.sequences, strict=True)}) > 1
    for s, g, w in zip(prompts.sequences, got, want, strict=True):
        assert list(g.ids) == w
        n = len(s)
        assert g.predicts == tuple(n - 1 <= t < len(w) - 1 for t in range(len(w)))


def test_continuations_without_stop_tokens():
    """No stop token known: the model writes on, even past the one that its own configuration names."""
    model, prompts = tiny("llama"), prompt_set((7, 4), response=None)
    free = [greedy(model, s.ids, set(), 6) for s in prompts.sequences]
    model.generation_config.eos_token_id = free[0][-5]
    got = continuations(model, prompts, set(), 6, "test")
    assert [list(g.ids) for g in got] == free


def test_the_head_is_stored_once_and_loaded_where_it_differs(own_cache):
    same, other = tiny("llama"), tiny("llama", seed=1)
    stores = [FeatureStore(n, "p", torch.float32) for n in ("a", "b", "c")]
    for store, model in zip(stores, (same, same, other), strict=True):
        keep_head(model, store)
    assert len(list((own_cache / "heads").iterdir())) == 2
    assert load_head(stores[0], same) is None
    assert load_head(stores[1], tiny("llama")) is None
    weight, bias = load_head(stores[2], same)
    assert torch.equal(weight, other.get_output_embeddings().weight)
    assert bias is None
    back, _ = load_head(stores[0], other)
    assert torch.equal(back, same.get_output_embeddings().weight)


def test_a_bias_belongs_to_the_head():
    model = tiny("llama")
    plain, biased = FeatureStore("a", "p", torch.float32), FeatureStore("b", "p", torch.float32)
    keep_head(model, plain)
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.arange(float(VOCAB)))
    keep_head(model, biased)
    _, bias = load_head(biased, tiny("llama"))
    assert torch.equal(bias, torch.arange(float(VOCAB)))
    assert load_head(biased, model) is None


def test_a_lost_head_is_said(own_cache):
    store = FeatureStore("a", "p", torch.float32)
    keep_head(tiny("llama"), store)
    next((own_cache / "heads").iterdir()).unlink()
    with pytest.raises(UserError, match="heads.*is missing"):
        load_head(store, tiny("llama", seed=1))
