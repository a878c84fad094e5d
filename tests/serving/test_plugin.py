"""What the plugin registers, with a registry that stands for vLLM's."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from mergedarts.errors import UserError
from mergedarts.serving import vllm as classes
from mergedarts.serving.plugin import register
from tests.serving.test_layers import checkpoint, in_depth, settings
from tests.tiny import D, tiny


class Entry:
    def __init__(self, made):
        self.made = made

    def load_model_cls(self):
        return self.made


class Registry:
    def __init__(self, models):
        self.models = {name: Entry(made) for name, made in models.items()}
        self.registered = {}

    def get_supported_archs(self):
        return self.models.keys() | self.registered.keys()

    def register_model(self, name, where):
        self.registered[name] = where


class Stock(torch.nn.Module):
    """The outer interface of vLLM's models; its layers keep what they are given."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.layers = torch.nn.ModuleList(Keep() for _ in range(3))
        self.prefix, self.got = prefix, []

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        h, residual = inputs_embeds, torch.zeros_like(inputs_embeds)
        for layer in self.layers:
            h, residual = layer(positions, h, residual)
        return h + residual

    def load_weights(self, weights):
        self.got = [name for name, _ in weights]
        return {"lm_head"}


class Keep(torch.nn.Module):
    def forward(self, positions, hidden_states, residual):
        return hidden_states, residual


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry and what a class asks of its modules, in place of vLLM."""
    made = Registry(
        {"LlamaForCausalLM": Stock, "JambaForCausalLM": Stock, "GPT2LMHeadModel": Stock, "BertModel": Stock}
    )
    ours = {
        "vllm": {"ModelRegistry": made},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": {"JambaForCausalLM": None}},
        "vllm.model_executor.models.interfaces": {
            name: lambda cls: False for name in ("has_inner_state", "is_attention_free", "is_hybrid")
        },
    }
    for name, content in ours.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    classes.model_class.cache_clear()
    yield made
    classes.model_class.cache_clear()


def test_causal_models_are_registered_by_name_and_may_be_again(registry):
    register()
    register()
    assert registry.registered == {
        f"Mergedarts{name}": f"mergedarts.serving.vllm:Mergedarts{name}"
        for name in ("LlamaForCausalLM", "JambaForCausalLM", "GPT2LMHeadModel")
    }


def test_the_class_corrects_and_loads(registry):
    made = classes.MergedartsLlamaForCausalLM
    assert made is classes.MergedartsLlamaForCausalLM
    assert (made.__module__, made.__qualname__) == (classes.__name__, "MergedartsLlamaForCausalLM")
    assert issubclass(made, Stock)
    model, corrections = tiny("llama"), {"a": in_depth()}
    said = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=settings(model, corrections, "a")))
    engine = made(vllm_config=said, prefix="p")
    loaded = engine.load_weights(checkpoint(model, corrections))
    assert engine.got == list(model.state_dict())
    assert loaded == {"lm_head", *dict(engine.named_parameters())}
    h, where = torch.randn(5, D, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 4, 0, 1, 9])
    want = h
    for _, site in corrections["a"].items():
        want = site(want, want, where)
    with torch.no_grad():
        torch.testing.assert_close(engine(None, where, None, h), want)


def test_models_that_vllm_prepares_by_name_are_refused(registry):
    with pytest.raises(UserError, match="JambaForCausalLM cannot be served by vLLM"):
        classes.MergedartsJambaForCausalLM  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        classes.Other  # noqa: B018


def test_the_entry_point_names_it():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"mergedarts": "mergedarts.serving.plugin:register"}
    assert (register.__module__, register.__name__) == ("mergedarts.serving.plugin", "register")


def test_the_entry_point_imports_no_torch_and_no_vllm():
    import subprocess

    code = "import sys, mergedarts.serving.plugin; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
