"""Answers a prompt with a causal LM.

Knows the chat template and the model's own `generate`; knows nothing of corrections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .models import ModelRef, eos_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """The model's greedy answer to one user turn, as text without special tokens."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    ids = ids.to(next(model.parameters()).device)
    eos = sorted(eos_ids(ModelRef(str(model.config._name_or_path)), tokenizer))
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
