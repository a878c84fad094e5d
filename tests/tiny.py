"""Tiny random models of many families, and a slow reference for corrected logits. Knows nothing of hooks."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mergedarts.correction import Correction, Position, SiteCorrection
from mergedarts.models import cast_weights, decoder_layers
from mergedarts.prompts import PromptSet, TokenSequence

D, VOCAB, LAYERS = 32, 96, 3

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "n_inner": 48},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mamba": {"state_size": 8, "expand": 2, "conv_kernel": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
}


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """A random model of a family with weights large enough that its states differ from token to token."""
    settings = _COMMON | FAMILIES[family] | more
    if family == "gpt2":
        keep = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        settings = {k: v for k, v in _COMMON.items() if k in keep} | FAMILIES["gpt2"]
    settings = {k: v for k, v in settings.items() if v is not None}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "conv" not in name:
                p.normal_(0, 0.6 / math.sqrt(p.shape[-1]) if "embed" not in name and "wte" not in name else 0.5)
    return cast_weights(model, dtype)


def random_site(kind: str, d_in: int, d_out: int, seed: int, position: Position | None, relu: bool) -> SiteCorrection:
    g = torch.Generator().manual_seed(seed)
    bias = None if position is None else 0.3 * torch.randn(position.size, d_out, generator=g)
    down = torch.randn(3, d_in, generator=g) / math.sqrt(d_in)
    up = 0.3 * torch.randn(d_out, 3, generator=g)
    return SiteCorrection(kind, down, up, bias, position, relu)  # type: ignore[arg-type]


def final_correction(seed: int = 0) -> Correction:
    """The paper's form with a table shorter than the test's sequences."""
    return Correction({"final": random_site("final", D, D, seed, Position("table", 4), relu=True)})


def slow_final(site: SiteCorrection, h: torch.Tensor, p: int) -> torch.Tensor:
    """h - up relu(down h) - b[min(p, P - 1)] of one token by plain loops, in the dtype of h."""
    down, up, bias = site.down.to(h.dtype), site.up.to(h.dtype), site.position_bias
    inner = torch.stack([(down[i] * h).sum() for i in range(down.shape[0])])
    if site.relu:
        inner = torch.where(inner > 0, inner, torch.zeros_like(inner))
    out = h - torch.stack([(up[j] * inner).sum() for j in range(up.shape[0])])
    if bias is not None:
        if site.position.form == "table":
            out = out - bias[min(p, site.position.size - 1)].to(h.dtype)
        else:
            last = site.position.last
            u = math.log(1 + min(p, last)) / math.log(1 + last)
            for j in range(site.position.size):
                out = out - math.cos(math.pi * j * u) * bias[j].to(h.dtype)
    return out


def slow_logits(model: Any, h: torch.Tensor) -> torch.Tensor:
    """Logits of states by the head and what the family does after it, written out."""
    head = model.get_output_embeddings()
    logits = torch.nn.functional.linear(h.to(head.weight.dtype), head.weight, getattr(head, "bias", None))
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits = torch.tanh(logits / cap) * cap
    multiplier = getattr(model.config, "lm_head_multiplier", None)
    return logits if multiplier is None else logits * multiplier


def mixed_batch(side: str, lengths: tuple[int, ...] = (9, 5, 7), seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, T] of rows of mixed length, padded left or right."""
    g = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in enumerate(lengths):
        where = slice(width - n, None) if side == "left" else slice(0, n)
        ids[row, where] = torch.randint(3, VOCAB, (n,), generator=g)
        mask[row, where] = 1
    return ids, mask


def prompt_set(lengths: tuple[int, ...], response: int | None = 3, seed: int = 5, words: int = VOCAB) -> PromptSet:
    """Random sequences of some lengths; the last `response` tokens of each are a response, none where it is None."""
    g = torch.Generator().manual_seed(seed)
    sequences = []
    for n in lengths:
        ids = tuple(torch.randint(3, words, (n,), generator=g).tolist())
        marks = [response is not None and n - response <= t + 1 < n for t in range(n)]
        sequences.append(TokenSequence(ids, tuple(marks)))
    return PromptSet(tuple(sequences))


def states_after(model: Any, ids: tuple[int, ...], layers: list[int]) -> dict[int, torch.Tensor]:
    """The residual stream [T, d] after some decoder layers, from one plain pass over one sequence alone."""
    caught: dict[int, torch.Tensor] = {}
    modules = [m for _, m in decoder_layers(model)]

    def keep(i: int) -> Any:
        return lambda m, a, out: caught.__setitem__(i, (out[0] if isinstance(out, tuple) else out)[0].detach().clone())

    handles = [modules[i].register_forward_hook(keep(i)) for i in layers]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return caught


def head_input(model: Any, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the output embedding [T, d], and the logits [T, V], of one sequence alone."""
    caught: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda m, i: caught.append(i[0][0].clone()))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        handle.remove()
    return caught[0], logits
