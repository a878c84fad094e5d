"""The plugin in vLLM itself, where both are installed: log-probabilities against those of the package's runtime."""

from __future__ import annotations

import gc

import pytest
import torch

from mergedarts.export.hub import save_hub
from mergedarts.models import decoder_layers
from mergedarts.repaired import Repaired
from mergedarts.runtime import attach
from tests.export.test_hub import NoTokenizer
from tests.serving.test_layers import in_depth, sequences, updates
from tests.tiny import tiny

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

#: A width of heads that vLLM's attention has on every device.
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
NEW = 5


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def exported(folder, family):
    more = ONE_HEAD | ({"query_pre_attn_scalar": 32} if family.startswith("gemma") else {})
    model = tiny(family, **more)
    model.generation_config.eos_token_id = None
    names = [name for name, _ in decoder_layers(model)]
    corrections = {"a": in_depth(1, names), "b": updates(model)}
    save_hub(folder, Repaired(model, NoTokenizer(), attach(model, corrections)), "a")
    return tiny(family, **more), corrections


def started(folder, domain, eager):
    return vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=32,
        max_num_batched_tokens=32,
        max_num_seqs=2,
        long_prefill_token_threshold=4,
        enable_prefix_caching=True,
        enforce_eager=eager,
        hf_overrides={"domain": domain},
    )


def off(llm, model, corrections, domain):
    """The largest difference of log-probabilities, and of those of the uncorrected model."""
    settings = vllm.SamplingParams(
        temperature=0, max_tokens=NEW, prompt_logprobs=1, logprobs=1, ignore_eos=True, detokenize=False
    )
    rows = sequences()
    answers = llm.generate([{"prompt_token_ids": row} for row in rows], settings, use_tqdm=False)
    again = llm.generate([{"prompt_token_ids": row} for row in rows], settings, use_tqdm=False)
    assert [a.outputs[0].token_ids for a in again] == [a.outputs[0].token_ids for a in answers]
    worst = {}
    for name in (domain, None):
        worst[name] = 0.0
        with attach(model, corrections, name), torch.no_grad():
            for row, answer in zip(rows, answers, strict=True):
                new = list(answer.outputs[0].token_ids)
                assert len(new) == NEW
                want = model(input_ids=torch.tensor([row + new])).logits[0].log_softmax(-1)
                said = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
                for t, token in enumerate((row + new)[1:]):
                    worst[name] = max(worst[name], abs(said[t][token].logprob - float(want[t, token])))
    return worst[domain], worst[None]


CASES = [
    ("llama", "a", True),
    ("llama", "b", True),
    ("llama", "a", False),
    ("llama", "b", False),
    ("qwen2", "a", True),
    ("qwen3", "b", True),
    ("gemma2", "a", True),
    ("gemma3_text", "a", True),
    ("mistral", "a", True),
    ("phi3", "b", True),
    ("olmo2", "a", True),
    ("gpt_neox", "a", True),
]


@pytest.mark.parametrize(("family", "domain", "eager"), CASES, ids=str)
def test_log_probabilities_are_the_runtimes(tmp_path, family, domain, eager):
    from vllm.distributed import cleanup_dist_env_and_memory

    model, corrections = exported(tmp_path, family)
    llm = started(tmp_path, domain, eager)
    try:
        corrected, bare = off(llm, model, corrections, domain)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    print(f"\n{family} {domain} {'eager' if eager else 'compiled'}: {corrected:.2e}, uncorrected {bare:.2e}")
    assert corrected < 1e-3
    assert bare > 0.05


def test_auto_is_refused(tmp_path):
    exported(tmp_path, "llama")
    with pytest.raises(Exception, match="router"):
        started(tmp_path, "auto", True)
