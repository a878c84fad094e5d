"""The Fisher metric against explicit gradients of each sequence, and against its exact sum over the vocabulary."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mergedarts.features import Readout, collect
from mergedarts.fit import fisher, plan
from mergedarts.fit.fisher import LEAST_TOKENS, FisherPass, head_metric, load_metric, metric_sequences
from mergedarts.fit.plan import fisher_name, measured_on
from mergedarts.models import decoder_layers
from mergedarts.prompts import PromptSet, TokenSequence
from mergedarts.store import FeatureStore
from tests.tiny import LAYERS, VOCAB, D, head_input, prompt_set, slow_logits, tiny

LENGTHS = (9, 6, 12, 6, 7)
CHOSEN = [0, 1, 2, 4]


def by_hand(model, prompts, chosen, layers, seed, longest=2.0):
    """Gradients [T, d] by sequence and layer of the combined logits, each weighed on its own; a backward pass each."""
    part = prompts.subset(chosen)
    answered = any(any(s.predicts) for s in part.sequences)
    marks = [s.predicts if answered else (*[True] * (len(s) - 1), False) for s in part.sequences]
    combined = []
    for i, s in enumerate(part.sequences):
        copy = part.sequences[:i].count(s)
        key = hashlib.sha256(repr(s.ids).encode()).digest()[:8]
        generator = np.random.default_rng([seed, copy, *key])
        probabilities = head_input(model, s.ids)[1].double().softmax(-1)
        own = torch.zeros_like(probabilities)
        for t in range(len(s)):
            if marks[i][t]:
                p, drawn = probabilities[t].tolist(), generator.bytes(4 * math.ceil(len(probabilities[t]) / 32))
                signed = [math.sqrt(p[v]) * (1 if drawn[v // 8] >> (7 - v % 8) & 1 else -1) for v in range(len(p))]
                own[t] = torch.tensor([signed[v] - p[v] * math.fsum(signed) for v in range(len(p))])
        combined.append(own)
    gradients = []
    for i, s in enumerate(part.sequences):
        caught = {}

        def keep(layer, caught=caught):
            def hook(_module, _args, out):
                caught[layer] = out[0] if isinstance(out, tuple) else out

            return hook

        handles = [decoder_layers(model)[j][1].register_forward_hook(keep(j)) for j in layers]
        embedded = model.get_input_embeddings()(torch.tensor([s.ids])).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        mask = torch.tensor(marks[i])
        loss = (combined[i].float() * logits).sum()
        taken = torch.autograd.grad(loss, [caught[j] for j in layers])
        gradients.append((mask, {j: g[0].clone() for j, g in zip(layers, taken, strict=True)}))
    for j in layers:
        for kind in (True, False):  # response tokens, and the others
            own = [g[j][t] for m, g in gradients for t in range(len(m)) if m[t] == kind]
            mean = math.fsum(float(v.square().sum()) for v in own) / max(1, len(own))
            for v in own:
                if float(v.norm()) > longest * math.sqrt(mean):
                    v *= longest * math.sqrt(mean) / v.norm()
    return gradients


def collected(model, prompts, chosen, layers, seed=0):
    store = FeatureStore("e", prompts.digest, torch.float32)
    collect(model, prompts, store, "test", list(range(min(layers), LAYERS)))
    FisherPass(prompts, chosen, layers, store, lambda i: f"fisher-{i}", seed, "test").run(model)
    return {i: load_metric(store, f"fisher-{i}") for i in layers}


@pytest.mark.parametrize("answered", [True, False], ids=["responses", "prompts alone"])
@pytest.mark.parametrize("budget", [512, 25, 1])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_powers_and_last_matrix_equal_explicit_gradients(family, budget, answered, monkeypatch):
    """Mean |g|^2 of response and of prompt tokens at every layer; g g' where only response tokens have a gradient."""
    monkeypatch.setattr(fisher, "BATCH_TOKENS", budget)
    model, prompts = tiny(family), prompt_set(LENGTHS, response=3 if answered else None)
    layers = [0, LAYERS - 1]
    got = collected(model, prompts, CHOSEN, layers, seed=2)
    gradients = by_hand(model, prompts, CHOSEN, layers, 2)
    for i in layers:
        response = [float(g[i][t].square().sum()) for m, g in gradients for t in range(len(m)) if m[t]]
        prompt = [float(g[i][t].square().sum()) for m, g in gradients for t in range(len(m)) if not m[t]]
        assert got[i].response == pytest.approx(sum(response) / len(response), rel=1e-3)
        assert got[i].prompt == pytest.approx(sum(prompt) / len(prompt), rel=1e-3, abs=1e-9)
    want = torch.zeros(D, D, dtype=torch.float64)
    for m, g in gradients:
        for t in range(len(m)):
            want += torch.outer(g[LAYERS - 1][t], g[LAYERS - 1][t]).double() / sum(int(m.sum()) for m, _ in gradients)
    torch.testing.assert_close(got[LAYERS - 1].matrix, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
@pytest.mark.parametrize("longest", [2.0, 0.8])
def test_matrix_counts_all_tokens_and_is_a_response_token(family, longest, monkeypatch):
    """At an early layer, where prompt tokens have gradients as well: all tokens' g g', a response token."""
    monkeypatch.setattr(fisher, "LONGEST", longest)
    model, prompts = tiny(family), prompt_set(LENGTHS)
    got = collected(model, prompts, CHOSEN, [0])[0]
    gradients = by_hand(model, prompts, CHOSEN, [0], 0, longest)
    want = torch.zeros(D, D, dtype=torch.float64)
    for m, g in gradients:
        for t in range(len(m)):
            want += torch.outer(g[0][t], g[0][t]).double()
    count = sum(int(m.sum()) for m, _ in gradients)
    torch.testing.assert_close(got.matrix, want / count, rtol=1e-3, atol=1e-3 * float(want.abs().max()) / count)
    prompt = sum(int((~m).sum()) for m, _ in gradients)
    assert float(got.matrix.trace()) == pytest.approx(got.response + got.prompt * prompt / count, rel=1e-4)
    assert got.prompt > 0.01 * got.response


def last_layer_logits(model, state):
    """Logits of one token from its state [d] after the last layer: the decoder's last norm, then the head."""
    decoder = model.get_decoder()
    norm = next(getattr(decoder, n) for n in ("norm", "ln_f", "final_layernorm") if hasattr(decoder, n))
    return slow_logits(model, norm(state[None, None]))[0, 0]


def exact(logits_of, state):
    """Fisher [d, d] of one state, sum over the vocabulary, and the variance of g_i g_j under one draw of signs."""
    jacobian = torch.autograd.functional.jacobian(logits_of, state).double()
    p = logits_of(state).detach().double().softmax(-1)
    g = torch.stack([jacobian[y] - p @ jacobian for y in range(len(p))])
    mean = g.T @ (p[:, None] * g)
    w = jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    torch.testing.assert_close(mean, w)  # the two ways to write it
    # For signs e and a' e = g_i: Var(a'e b'e) = (a'a)(b'b) + (a'b)^2 - 2 sum a^2 b^2.
    a = p.sqrt()[:, None] * g
    power = a.square().sum(0)
    fourth = a.square().T @ a.square()
    return w, torch.outer(power, power) + w**2 - 2 * fourth


def within_sampling_error(got, mean, variance, draws):
    z = (got - mean) / (variance / draws).sqrt().clamp(min=1e-12 * float(mean.abs().max()))
    z = z[torch.triu(torch.ones_like(z)).bool()]
    assert float(z.abs().max()) < 5.5
    assert float(z.square().mean()) < 1.6


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_many_draws_converge_to_the_exact_fisher(family, monkeypatch):
    """One sequence 400 times over: the mean over drawn signs is within sampling error of J' (diag p - p p') J."""
    monkeypatch.setattr(fisher, "LONGEST", 1e9)
    monkeypatch.setattr(fisher, "BATCH_TOKENS", 1 << 14)
    model = tiny(family)
    if family == "llama":
        model.get_decoder().norm.weight.fill_(0.3)  # tied and certain of its tokens; softer, so that draws vary
    one = prompt_set((6,), response=3).sequences[0]
    prompts = PromptSet((one,) * 400)
    got = collected(model, prompts, list(range(400)), [LAYERS - 1])[LAYERS - 1]
    caught = []
    handle = decoder_layers(model)[-1][1].register_forward_hook(lambda m, a, o: caught.append(o))
    head_input(model, one.ids)
    handle.remove()
    states = (caught[0][0] if isinstance(caught[0], tuple) else caught[0])[0]
    parts = [exact(lambda h: last_layer_logits(model, h), states[t]) for t in range(6) if one.predicts[t]]
    mean = sum(m for m, _ in parts) / 3
    variance = sum(v for _, v in parts) / 3
    within_sampling_error(got.matrix, mean, variance, 1200)
    assert got.response == pytest.approx(float(mean.trace()), rel=0.15)
    assert got.prompt < 1e-9  # after the last layer nothing reads a prompt's state but its own prediction


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_head_metric_converges_to_the_exact_fisher(family):
    """W' (diag p - p p') W, through the soft-cap of gemma2 and the multiplier of falcon_h1."""
    model = tiny(family)
    states = torch.cat([head_input(model, s.ids)[0] for s in prompt_set((3, 4)).sequences])
    got = head_metric(Readout(model), states, samples=400, seed=1)
    parts = [exact(lambda h: slow_logits(model, h), h) for h in states]
    within_sampling_error(got, sum(m for m, _ in parts) / 7, sum(v for _, v in parts) / 7, 2800)


def test_the_seed_decides_the_draw():
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    one, again, other = (collected(model, prompts, CHOSEN, [1], seed=s)[1].matrix for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, rtol=1e-3)


def test_only_the_chosen_sequences_count():
    model = tiny("llama")
    base = prompt_set(LENGTHS)
    other = TokenSequence(tuple((i + 7) % (VOCAB - 3) + 3 for i in base.sequences[3].ids), base.sequences[3].predicts)
    changed = PromptSet((*base.sequences[:3], other, *base.sequences[4:]))
    a, b = (collected(model, p, CHOSEN, [1])[1].matrix for p in (base, changed))
    assert torch.equal(a, b)


def test_the_model_is_left_as_it_was():
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    before = head_input(model, prompts.sequences[0].ids)[1]
    collected(model, prompts, CHOSEN, [0, 1])
    assert torch.equal(before, head_input(model, prompts.sequences[0].ids)[1])
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    for _, layer in decoder_layers(model):
        assert not layer._forward_hooks
    assert not model.get_input_embeddings()._forward_hooks


def test_the_metric_is_of_a_quarter_of_the_sequences_whatever_their_order():
    prompts = prompt_set([110 + i % 9 for i in range(60)], response=40)
    silent = [replace(s, predicts=(False,) * len(s)) if i < 30 else s for i, s in enumerate(prompts.sequences)]
    each = [sum(s.predicts) for s in silent]
    fitted = list(range(0, 60, 2))
    chosen = metric_sequences(PromptSet(tuple(silent)), fitted, 4096)
    assert chosen == sorted(set(chosen) & set(fitted))
    assert min(chosen) >= 30
    assert sum(each[i] for i in chosen) - max(each) < LEAST_TOKENS <= sum(each[i] for i in chosen)
    turned = PromptSet(tuple(silent[::-1]))
    assert {59 - i for i in metric_sequences(turned, [59 - i for i in fitted], 4096)} == set(chosen)
    assert len(metric_sequences(prompts, list(range(60)), 4096)) == 15
    assert metric_sequences(prompts, [3, 1], 4096) == [1, 3]


def test_the_metric_of_narrow_states_is_of_less():
    """0.7 tokens a dimension, 400 at least; where no sequence predicts a response, all its tokens count."""
    prompts = prompt_set([50 + i % 9 for i in range(400)], response=40)
    everything = list(range(400))
    for width, tokens in ((64, 400), (576, 404), (1000, 700)):
        chosen = metric_sequences(prompts, everything, width)
        assert 40 * len(chosen) - 40 < tokens <= 40 * len(chosen)
        more = metric_sequences(prompts, everything, width + 200)
        assert set(chosen) <= set(more)
    silent = PromptSet(tuple(replace(s, predicts=(False,) * len(s)) for s in prompts.sequences))
    chosen = metric_sequences(silent, everything, 576)
    lengths = [len(silent.sequences[i]) - 1 for i in chosen]
    assert sum(lengths) - max(lengths) < 404 <= sum(lengths)


@pytest.mark.parametrize(("asked", "count"), [("auto", 15), ("fisher", 60)])
def test_the_metric_by_name_is_of_all_sequences(asked, count, monkeypatch):
    monkeypatch.setattr(plan, "load_config", lambda ref: SimpleNamespace(hidden_size=4096))
    domain = SimpleNamespace(prompts=prompt_set([110 + i % 9 for i in range(60)], response=100), whole_places=None)
    job = SimpleNamespace(merged=None, run=SimpleNamespace(fit=SimpleNamespace(metric=asked)))
    chosen = measured_on(job, domain, list(range(59, -1, -1)))
    assert len(chosen) == count
    assert chosen == sorted(chosen)


def test_what_a_family_does_between_decoder_and_head_counts():
    """States are those that the output embedding is given; what comes before it is gone back through."""
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (0.3 * args[0],))
    got = collected(model, prompts, CHOSEN, [0])[0]
    gradients = by_hand(model, prompts, CHOSEN, [0], 0)
    response = [float(g[0][t].square().sum()) for m, g in gradients for t in range(len(m)) if m[t]]
    assert got.response == pytest.approx(sum(response) / len(response), rel=1e-3)


def test_metrics_of_other_seeds_and_sequences_have_other_names():
    names = [fisher_name(seed, chosen, layer) for seed in (0, 1) for chosen in ([1, 2], [1, 3]) for layer in (0, 1)]
    assert len(set(names)) == 8
