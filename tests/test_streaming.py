"""Models whose layers stay on disk against the same models in memory."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mergedarts import streaming
from mergedarts.errors import UserError
from mergedarts.features import Readout, collect, final_states, keep_entropies
from mergedarts.fit.fisher import FisherPass, load_metric
from mergedarts.fit.linear import differences, keep_weights, linear_layers
from mergedarts.fit.router import Template, prompt_means
from mergedarts.models import ModelRef, decoder_layers, load_model
from mergedarts.runtime import attach
from mergedarts.store import FeatureStore
from mergedarts.streaming import fits, in_memory, is_streamed, mapped
from tests.tiny import FAMILIES, LAYERS, D, final_correction, head_input, prompt_set, tiny

LENGTHS = (7, 12, 1, 12, 4, 10)
CPU = torch.device("cpu")
CLOSE = {"atol": 3e-5, "rtol": 3e-5}


@pytest.fixture
def saved(tmp_path):
    """Saves a tiny model and returns it with what loads it from disk, streamed."""

    def save(family, dtype=torch.float32):
        model = tiny(family, dtype)
        model.save_pretrained(tmp_path / family)
        return model, load_model(ModelRef(str(tmp_path / family)), dtype, CPU, stream=True)

    return save


def on_disk(model):
    """Which parameters of the decoder layers are nowhere in memory."""
    return [p.device.type == "meta" for _, layer in decoder_layers(model) for p in layer.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_those_of_the_model_in_memory(family, saved):
    model, streamed = saved(family)
    assert is_streamed(streamed)
    assert not is_streamed(model)
    assert all(on_disk(streamed))
    prompts = prompt_set(LENGTHS)
    stores = [FeatureStore(name, prompts.digest, torch.float32) for name in ("whole", "streamed")]
    for store, each in zip(stores, (model, streamed), strict=True):
        collect(each, prompts, store, "test", list(range(LAYERS)))
        keep_entropies(each, store, "test")
        FisherPass(prompts, [0, 1, 3, 5], [0, LAYERS - 1], store, "fisher-{}".format, 0, "test").run(each)
    for name in ("final", *(f"layer-{i}" for i in range(LAYERS))):
        torch.testing.assert_close(*(store.load(name)["hidden"] for store in stores), **CLOSE)
    torch.testing.assert_close(*(store.load("entropy")["entropy"] for store in stores), **CLOSE)
    assert float(stores[0].load("final")["hidden"].std()) > 0.1
    for layer in (0, LAYERS - 1):
        whole, parts = (load_metric(store, f"fisher-{layer}") for store in stores)
        assert float(whole.matrix.diagonal().mean()) > 0
        torch.testing.assert_close(parts.matrix, whole.matrix, atol=1e-4 * float(whole.matrix.abs().max()), rtol=1e-3)
        assert (parts.response, parts.prompt) == pytest.approx((whole.response, whole.prompt), rel=1e-4)
    assert all(on_disk(streamed))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba", "mixtral"])
def test_readout_router_means_and_corrected_states(family, saved):
    model, streamed = saved(family)
    prompts = prompt_set((7, 12, 5, 10))
    states, logits = head_input(model, prompts.sequences[0].ids)
    torch.testing.assert_close(Readout(streamed)(states), logits, **CLOSE)
    template = Template((), ())
    for depths in ((0,), (0, 1), (1, LAYERS)):
        means = [
            prompt_means(each, prompts, template, FeatureStore(name, "p", torch.float32), depths, "test")
            for name, each in (("whole", model), ("streamed", streamed))
        ]
        torch.testing.assert_close(means[1], means[0], **CLOSE)
    found = []
    for each in (model, streamed):
        rows = torch.full((prompts.tokens, D), float("nan"))

        def take(batch, state, rows=rows):
            for row, i in enumerate(batch):
                rows[prompts.offsets[i] : prompts.offsets[i + 1]] = state[row, : len(prompts.sequences[i])]

        with attach(each, {"a": final_correction()}, "a"):
            final_states(each, prompts, take, "test")
        found.append(rows)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_an_adapter_is_merged_as_layers_are_read(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "down_proj", "embed_tokens"])
    adapted = get_peft_model(base, settings)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                p.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    ref = ModelRef(str(tmp_path / "base"), str(tmp_path / "adapter"))
    whole, streamed = (load_model(ref, torch.bfloat16, CPU, stream=stream) for stream in (False, True))
    ids = torch.arange(3, 12)[None]
    plain = load_model(ModelRef(str(tmp_path / "base")), torch.bfloat16, CPU)
    logits = [model(input_ids=ids, use_cache=False).logits for model in (whole, streamed, plain)]
    assert torch.equal(logits[0], logits[1])
    assert float((logits[0] - logits[2]).abs().max()) > 0.1
    assert all(on_disk(streamed))


def test_a_weight_at_the_address_of_a_tied_one_is_read_from_disk(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path)
    streamed = load_model(ModelRef(str(tmp_path)), torch.bfloat16, CPU, stream=True)
    module = streamed.get_submodule("model.layers.1.mlp.up_proj")
    hook = next(h for h in getattr(module._hf_hook, "hooks", [module._hf_hook]) if h.offload)
    weight = hook.weights_map["weight"]
    other = torch.zeros(3, 3)
    for part in streamed.modules():
        for known in getattr(getattr(part, "_hf_hook", None), "hooks", [getattr(part, "_hf_hook", None)]):
            if getattr(known, "tied_params_map", None) is not None:
                known.tied_params_map[weight.data_ptr()] = {CPU: other, "cpu": other}
    hook.weights_map = {"weight": weight}
    with in_memory(module):
        assert torch.equal(module.weight, weight)


def test_an_adapter_that_is_more_than_a_change_of_weights_is_refused(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    ref = ModelRef(str(tmp_path / "base"), str(tmp_path / "adapter"))
    with pytest.raises(UserError, match="merge it into its base first"):
        load_model(ref, torch.float32, CPU, stream=True)


def test_a_gguf_file_is_not_streamed(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="cannot be streamed"):
        load_model(ModelRef(str(tmp_path / "model.gguf")), torch.float32, CPU, stream=True)


def test_weight_differences(saved):
    model, streamed = saved("qwen2")
    other = tiny("qwen2", seed=1)
    store = FeatureStore("other", "weights", torch.float32)
    keep_weights(other, store)
    got = dict(differences(streamed, store))
    theirs, ours = linear_layers(other), linear_layers(model)
    assert list(got) == list(theirs)
    for name, difference in got.items():
        assert torch.equal(difference, theirs[name].weight - ours[name].weight)


def test_a_pass_that_was_cut_short_goes_on_after_its_last_layer(saved):
    model, streamed = saved("llama")
    prompts = prompt_set(LENGTHS)
    whole, store = (FeatureStore(name, prompts.digest, torch.float32) for name in ("whole", "streamed"))
    collect(model, prompts, whole, "test", [0, 1, 2])
    layers = [layer for _, layer in decoder_layers(streamed)]
    Readout(streamed)  # the trial run is done

    def cut(*_):
        raise KeyboardInterrupt

    handle = layers[2].register_forward_hook(cut)
    with pytest.raises(KeyboardInterrupt):
        collect(streamed, prompts, store, "test", [0, 1, 2])
    handle.remove()
    assert sorted(p.name for p in store.path.iterdir()) == ["layer-0.safetensors", "layer-1.safetensors"]
    handles = [layer.register_forward_hook(cut) for layer in layers[:2]]
    collect(streamed, prompts, store, "test", [2])
    for handle in handles:
        handle.remove()
    for name in ("final", "layer-0", "layer-1", "layer-2"):
        torch.testing.assert_close(store.load(name)["hidden"], whole.load(name)["hidden"], **CLOSE)


def test_a_layer_is_in_memory_inside_the_block_alone(saved):
    _, streamed = saved("llama")
    layer = decoder_layers(streamed)[1][1]
    with in_memory(layer):
        assert all(p.device.type == "cpu" for p in layer.parameters())
        streamed(input_ids=torch.tensor([[3, 4]]), use_cache=False)
        assert all(p.device.type == "cpu" for p in layer.parameters())
        assert sum(on_disk(streamed)) == 2 * len(list(layer.parameters()))
    assert all(on_disk(streamed))


def test_whether_a_model_fits(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(bytes(600))
    (tmp_path / "b.safetensors").write_bytes(bytes(400))
    monkeypatch.setattr(streaming, "free_memory", lambda device: 1000)
    assert not fits(tmp_path, torch.float32, torch.float32, CPU)
    assert fits(tmp_path, torch.float32, torch.bfloat16, CPU)
    monkeypatch.setattr(streaming, "free_memory", lambda device: 2000)
    assert fits(tmp_path, torch.float32, torch.float32, CPU)
    assert not fits(tmp_path, torch.bfloat16, torch.float32, CPU)


def test_mapped_tensors_leave_no_file(own_cache):
    tensor = mapped((3, 4), torch.bfloat16)
    tensor[:] = torch.arange(12.0).reshape(3, 4)
    assert tensor.sum() == 66
    assert list((own_cache / "scratch").iterdir()) == []
    assert mapped((0, 4), torch.float32).shape == (0, 4)
