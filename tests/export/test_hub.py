"""The exported model against the one it came from: bit-equal logits, equal text, saved again, copied, trained on."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from mergedarts.correction import Correction, Position
from mergedarts.export.hub import MODULE, load_hub, save_hub
from mergedarts.export.remote import remote_code
from mergedarts.models import ModelRef, decoder_layers, load_model
from mergedarts.repaired import Repaired
from mergedarts.runtime import attach
from tests.test_router import plain_router
from tests.tiny import FAMILIES, D, mixed_batch, random_site, tiny

CPU = torch.device("cpu")


class NoTokenizer:
    """Stands where a tokenizer is saved."""

    def save_pretrained(self, folder):
        pass


def corrections_of(model, seed):
    """After two layers, smooth and inner positions among them, and at the head."""
    names = [name for name, _ in decoder_layers(model)]
    inner = random_site("residual", D, D, seed, None, relu=False)
    inner = type(inner)(
        "residual", inner.down.detach(), inner.up.detach(), None, Position("smooth", 2, 6), False,
        torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)),
    )  # fmt: skip
    sites = {
        names[0]: inner,
        names[1]: random_site("residual", D, D, seed + 1, Position("smooth", 3, 6), relu=False),
        "final": random_site("final", D, D, seed + 2, Position("table", 4), relu=True),
    }
    return Correction(sites)


def exported(tmp_path, family="llama", dtype=torch.float32, depth=2):
    tiny(family).save_pretrained(tmp_path / "stock")
    model = load_model(ModelRef(str(tmp_path / "stock")), dtype, CPU)
    model.generation_config.eos_token_id = None
    handle = attach(model, {"a-1": corrections_of(model, 1), "items": corrections_of(model, 9), "no": Correction()},
                    router=plain_router(depth, names=("a-1", "items", "no")))  # fmt: skip
    save_hub(tmp_path, Repaired(model, NoTokenizer(), handle), "items")
    return model, handle


CASES = [(family, torch.float32) for family in FAMILIES]
CASES += [(family, torch.bfloat16) for family in ("llama", "gemma2", "mamba", "falcon_h1")]


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_logits_and_text_are_the_originals(tmp_path, family, dtype):
    model, handle = exported(tmp_path, family, dtype)
    loaded = load_hub(tmp_path, dtype, CPU)
    assert isinstance(loaded, type(model))
    ids, mask = mixed_batch("left")
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for domain in ("a-1", "items", "no", None, "auto", ["items", None, "a-1"], ["auto", "a-1", "auto"]):
            handle.domain = domain
            want = model(input_ids=ids, attention_mask=mask).logits
            got = loaded(input_ids=ids, attention_mask=mask, domain=domain).logits
            same(got, want)
            assert loaded.mergedarts.chosen == handle.chosen
            if domain in ("a-1", ["auto", "a-1", "auto"]):
                text = loaded.generate(input_ids=ids, domain=domain, **options)
                assert text.tolist() == model.generate(input_ids=ids, **options).tolist()
        handle.domain = "items"
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)  # the default in config.json


def test_where_a_domain_may_be_said(tmp_path):
    model, handle = exported(tmp_path)
    ids = mixed_batch("left", (7,))[0]
    with torch.no_grad():
        handle.domain = "a-1"
        want = model(input_ids=ids).logits
        text = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, domain="a-1")
        assert torch.equal(loaded(input_ids=ids).logits, want)
        loaded.mergedarts.domain = None
        bare = loaded(input_ids=ids).logits
        assert not torch.equal(bare, want)
        assert torch.equal(loaded(input_ids=ids, domain="none").logits, bare)
        assert torch.equal(loaded.forward(input_ids=ids, domain=["a-1"]).logits, want)
        settings = GenerationConfig(domain="a-1", max_new_tokens=5, do_sample=False)
        assert loaded.generate(input_ids=ids, generation_config=settings).tolist() == text.tolist()
        with pytest.raises(Exception, match="no domain 'law'"):
            loaded(input_ids=ids, domain="law")
        assert torch.equal(loaded(input_ids=ids).logits, bare)


def test_saved_again_copied_and_placed(tmp_path):
    model, handle = exported(tmp_path / "first", dtype=torch.bfloat16, depth=3)
    ids = mixed_batch("left", (7,))[0]
    handle.domain = "auto"
    with torch.no_grad():
        want = model(input_ids=ids).logits
        loaded = load_hub(tmp_path / "first", torch.bfloat16, CPU)
        loaded.save_pretrained(tmp_path / "second")
        settings = json.loads((tmp_path / "second" / "config.json").read_text())
        assert settings["architectures"] == ["MergedartsLlamaForCausalLM"]
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path / "second", trust_remote_code=True, dtype="auto", device_map={"": "cpu"}
        )
        assert again.dtype == torch.bfloat16
        assert again.mergedarts_router.get_buffer("means").dtype == torch.float32
        assert torch.equal(again(input_ids=ids, domain="auto").logits, want)
        twin = copy.deepcopy(again)
        del again
        twin.mergedarts.domain = "auto"
        assert torch.equal(twin(input_ids=ids).logits, want)
        assert torch.equal(loaded(input_ids=ids, domain="auto").logits, want)


def test_peft_on_top_trains(tmp_path):
    from peft import LoraConfig, get_peft_model

    model, handle = exported(tmp_path)
    ids = mixed_batch("left", (7,))[0]
    handle.domain = "a-1"
    want = model(input_ids=ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, domain="a-1")
    tuned = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert torch.equal(tuned(input_ids=ids).logits, want)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(4):
        loss = tuned(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not any(p.requires_grad for p in loaded.mergedarts_corrections.parameters())
    assert tuned.generate(input_ids=ids, max_new_tokens=3, domain="none").shape[1] > 7


@pytest.mark.slow
def test_it_loads_where_mergedarts_is_not(tmp_path):
    """A process that cannot import the package; what it prints are the original's logits."""
    model, handle = exported(tmp_path)
    handle.domain = "a-1"
    code = f"""
import sys
sys.modules["mergedarts"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
print(model(input_ids=torch.tensor([[5, 6, 7]]), domain="a-1").logits.sum(-1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert json.loads(done.stdout) == model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum(-1).tolist()


def test_the_code_names_nothing_of_ours_and_is_whole():
    import ast

    text = remote_code("LlamaForCausalLM")
    tree = ast.parse(text)
    modules = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules - set(sys.stdlib_module_names) == {"torch", "transformers"}
    assert MODULE == "modeling_mergedarts"


def same(got, want):
    """Bit-equal; a row of padding alone may be no number in both."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_the_calibrated_model_is_the_one_others_load(tmp_path):
    """Rotary frequencies keep their precision: rounded ones are another model at long positions."""
    tiny("llama").save_pretrained(tmp_path)
    ours = load_model(ModelRef(str(tmp_path)), torch.bfloat16, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = torch.randint(3, 90, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
