"""One layer at a time against plain passes of the whole model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mergedarts import features
from mergedarts.errors import UserError
from mergedarts.layerwise import LayerRunner
from mergedarts.models import decoder_layers
from tests.tiny import FAMILIES, LAYERS, prompt_set, states_after, tiny

LENGTHS = (7, 12, 1, 12, 4, 10)


@pytest.fixture(params=[1, 24, 4096], ids=lambda n: f"{n} tokens a batch")
def budget(request, monkeypatch):
    """Padded tokens in a batch: a sequence alone, two or so, all at once."""
    monkeypatch.setattr(features.batches, "__defaults__", (request.param,))
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_model(family, budget):
    model, prompts = tiny(family), prompt_set(LENGTHS)
    want = [states_after(model, s.ids, list(range(LAYERS))) for s in prompts.sequences]
    runner = LayerRunner(model, prompts)
    for layer in range(LAYERS):
        assert runner.depth == layer
        assert sum(runner.step()) == prompts.tokens
        flat = torch.cat([states[layer] for states in want])
        torch.testing.assert_close(runner.states, flat, atol=2e-5, rtol=2e-5)


def test_peek_runs_a_layer_and_stays(budget):
    """Hooks on a layer's parts see its tokens at the flat places that `current` tells; the states do not move."""
    model, prompts = tiny("llama"), prompt_set(LENGTHS)
    runner = LayerRunner(model, prompts)
    list(runner.step())
    before = runner.states.clone()
    seen = torch.full((prompts.tokens, 48), float("nan"))

    def keep(_module, inputs):
        real, flat = runner.current
        seen[flat] = inputs[0][real]

    handle = decoder_layers(model)[1][1].mlp.down_proj.register_forward_pre_hook(keep)
    assert sum(runner.peek()) == prompts.tokens
    assert sum(runner.peek()) == prompts.tokens
    handle.remove()
    assert runner.depth == 1
    assert torch.equal(runner.states, before)
    offset = 0
    for s in prompts.sequences:
        caught = []
        handle = decoder_layers(model)[1][1].mlp.down_proj.register_forward_pre_hook(
            lambda m, i, c=caught: c.append(i[0])
        )
        states_after(model, s.ids, [1])
        handle.remove()
        torch.testing.assert_close(seen[offset : offset + len(s)], caught[0][0], atol=2e-5, rtol=2e-5)
        offset += len(s)
    list(runner.step())
    want = torch.cat([states_after(model, s.ids, [1])[1] for s in prompts.sequences])
    torch.testing.assert_close(runner.states, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba", "falcon_h1"])
def test_corrected_states_are_carried_on(family):
    """States replaced between layers reach the later ones as a hook on the layer would."""
    model, prompts = tiny(family), prompt_set((6, 9))
    shift = torch.linspace(-1, 1, 32)
    runner = LayerRunner(model, prompts)
    list(runner.step())
    runner.states = runner.states + shift
    for _ in range(LAYERS - 1):
        list(runner.step())

    def bend(_module, _args, out):
        return (out[0] + shift, *out[1:]) if isinstance(out, tuple) else out + shift

    plain = torch.cat([states_after(model, s.ids, [LAYERS - 1])[LAYERS - 1] for s in prompts.sequences])
    handle = decoder_layers(model)[0][1].register_forward_hook(bend)
    want = torch.cat([states_after(model, s.ids, [LAYERS - 1])[LAYERS - 1] for s in prompts.sequences])
    handle.remove()
    torch.testing.assert_close(runner.states, want, atol=3e-5, rtol=3e-5)
    assert (want - plain).abs().max() > 0.1


def test_bf16_states_stay_bf16():
    model, prompts = tiny("llama", torch.bfloat16), prompt_set((5, 5))
    runner = LayerRunner(model, prompts)
    list(runner.step())
    assert runner.states.dtype == torch.bfloat16
    want = torch.cat([states_after(model, s.ids, [0])[0] for s in prompts.sequences])
    torch.testing.assert_close(runner.states.float(), want.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_the_model_is_left_as_it_was(family):
    model, prompts = tiny(family), prompt_set((5, 8))
    before = states_after(model, prompts.sequences[1].ids, [LAYERS - 1])[LAYERS - 1]
    runner = LayerRunner(model, prompts)
    for _ in range(LAYERS):
        list(runner.step())
    after = states_after(model, prompts.sequences[1].ids, [LAYERS - 1])[LAYERS - 1]
    assert torch.equal(before, after)
    for _, layer in decoder_layers(model):
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks


def test_a_forward_set_on_a_layer_survives():
    """Libraries that place a model on devices (accelerate) set `forward` on the instance; it must stay."""
    model, prompts = tiny("llama"), prompt_set((5, 8))
    for _, layer in decoder_layers(model):
        own = layer.forward
        layer.forward = lambda hidden, *a, own=own, **k: own(hidden, *a, **k) * 1.5
    want = states_after(model, prompts.sequences[0].ids, [LAYERS - 1])[LAYERS - 1]
    runner = LayerRunner(model, prompts)
    for _ in range(LAYERS):
        list(runner.step())
    torch.testing.assert_close(runner.states[:5], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states_after(model, prompts.sequences[0].ids, [LAYERS - 1])[LAYERS - 1], want)


def share_by_argument(model):
    """A dictionary made anew in each pass of the decoder, as families with shared keys and values do."""
    layers = [layer for _, layer in decoder_layers(model)]
    shared = {}
    model.get_decoder().register_forward_pre_hook(lambda m, a, k: shared.clear(), with_kwargs=True)

    def first(_module, _args, out):
        shared["first"] = out

    layers[0].register_forward_hook(first)
    own = type(layers[2]).forward
    kind = type("Shares", (type(layers[2]),), {"forward": lambda s, h, *a, **k: own(s, h, *a, **k) + shared["first"]})
    layers[2].__class__ = kind


def share_by_attribute(model):
    """A layer leaves what it computed on a module, where a later one reads it; it outlives the pass."""
    layers = [layer for _, layer in decoder_layers(model)]
    own_first, own_last = type(layers[0]).forward, type(layers[2]).forward

    def first(self, hidden, *a, **k):
        out = own_first(self, hidden, *a, **k)
        model.left_behind = out
        return out

    def last(self, hidden, *a, **k):
        return own_last(self, hidden, *a, **k) + model.left_behind

    layers[0].__class__ = type("Leaves", (type(layers[0]),), {"forward": first})
    layers[2].__class__ = type("Reads", (type(layers[2]),), {"forward": last})


def share_by_pass(model):
    """The same with what is made anew in each pass written by the layer itself, so that alone the reader fails."""
    layers = [layer for _, layer in decoder_layers(model)]
    own_first, own_last = type(layers[0]).forward, type(layers[2]).forward
    shared = {}
    model.get_decoder().register_forward_pre_hook(lambda m, a, k: shared.clear(), with_kwargs=True)

    def first(self, hidden, *a, **k):
        shared["first"] = own_first(self, hidden, *a, **k)
        return shared["first"]

    layers[0].__class__ = type("Writes", (type(layers[0]),), {"forward": first})
    last = {"forward": lambda self, hidden, *a, **k: own_last(self, hidden, *a, **k) + shared["first"]}
    layers[2].__class__ = type("Reads", (type(layers[2]),), last)


@pytest.mark.parametrize("patch", [share_by_argument, share_by_attribute, share_by_pass], ids=lambda f: f.__name__)
def test_layers_that_share_state_are_refused(patch):
    model = tiny("llama")
    patch(model)
    with pytest.raises(UserError, match="sites: final"):
        LayerRunner(model, prompt_set((5, 8)))
    for _, layer in decoder_layers(model):
        assert "forward" not in vars(layer)


def test_a_layer_run_twice_is_refused():
    model = tiny("llama")
    layers = decoder_layers(model)[0][1], decoder_layers(model)[1][1]
    own = type(layers[1]).forward

    def twice(self, hidden, *a, **k):
        return own(self, layers[0](hidden, *a, **k), *a, **k)

    layers[1].__class__ = type("Twice", (type(layers[1]),), {"forward": twice})
    with pytest.raises(UserError, match="does not run its layers in a row"):
        LayerRunner(model, prompt_set((5, 8)))


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_families_that_share_keys_and_values_are_refused(family):
    """Their last layers read keys and values of earlier ones, from a dictionary made in each pass."""
    settings = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size": 32,
        "vocab_size": 96,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [48] * 4 if family == "gemma3n_text" else 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    if family == "gemma3n_text":
        settings |= {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    else:
        settings["global_head_dim"] = 8
    try:
        config = AutoConfig.for_model(family, **settings)
    except ValueError:
        pytest.skip("not in this transformers")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(UserError, match="sites: final"):
        LayerRunner(model, prompt_set((5, 8)))
