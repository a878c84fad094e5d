"""Llama models of random weights on disk, a file for each decoder layer, for measuring time and memory.

Knows shapes, files and a tokenizer of one token a byte; what comes of such models is measured elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = ("sea", "sky", "sun", "rain", "snow", "wind", "fire", "dust", "stone", "river")


@dataclass(frozen=True)
class Shape:
    """Of a Llama model; `feed` is the inner width of its MLP."""

    width: int
    layers: int
    feed: int
    heads: int
    groups: int
    vocabulary: int

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.width, num_hidden_layers=self.layers, intermediate_size=self.feed,
            num_attention_heads=self.heads, num_key_value_heads=self.groups, vocab_size=self.vocabulary,
            max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=1,
            dtype="bfloat16", architectures=["LlamaForCausalLM"],
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        head = self.width // self.heads
        attention = 2 * self.width * head * (self.heads + self.groups)
        inside = attention + 3 * self.width * self.feed + 2 * self.width
        return self.layers * inside + 2 * self.vocabulary * self.width + self.width

    def layer(self, index: int, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Random weights of one decoder layer by name."""
        head = self.width // self.heads
        q, kv = self.heads * head, self.groups * head
        shapes = {
            "self_attn.q_proj": (q, self.width), "self_attn.k_proj": (kv, self.width),
            "self_attn.v_proj": (kv, self.width), "self_attn.o_proj": (self.width, q),
            "mlp.gate_proj": (self.feed, self.width), "mlp.up_proj": (self.feed, self.width),
            "mlp.down_proj": (self.width, self.feed),
        }  # fmt: skip
        generator = torch.Generator(device).manual_seed(1000 * seed + index)
        prefix = f"model.layers.{index}."
        out = {prefix + f"{name}.weight": random(shape, generator) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = torch.ones(self.width, dtype=torch.bfloat16)
        return out


def random(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """On the generator's device, where a large model is made faster."""
    return (torch.randn(shape, generator=generator, device=generator.device) / math.sqrt(shape[1])).bfloat16()


def build(folder: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> Path:
    """Write a model, one layer in memory at a time."""
    folder.mkdir(parents=True)
    shape.config.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(seed)
    table = (shape.vocabulary, shape.width)
    files = {"outside": {
        "model.embed_tokens.weight": random(table, generator), "lm_head.weight": random(table, generator),
        "model.norm.weight": torch.ones(shape.width, dtype=torch.bfloat16),
    }}  # fmt: skip
    index: dict[str, str] = {}
    for number in range(-1, shape.layers):
        name = f"layer-{number}" if number >= 0 else "outside"
        tensors = shape.layer(number, seed, device) if number >= 0 else files.pop(name)
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
        del tensors
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def relative(
    source: Path, folder: Path, shape: Shape, changed: list[int], seed: int, share: float = 0.5, device: str = "cpu"
) -> Path:
    """A model that shares files with another but for some layers, which are mixed with random ones."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        os.link(path, folder / path.name)
    for index in changed:
        name = f"layer-{index}.safetensors"
        ours, theirs = shape.layer(index, 0, device), shape.layer(index, seed, device)
        (folder / name).unlink()
        mixed = {k: ((1 - share) * v.float() + share * theirs[k].float()).bfloat16() for k, v in ours.items()}
        save_file(mixed, folder / name, metadata={"format": "pt"})
    return folder


def write_prompts(path: Path, count: int, length: int) -> Path:
    """Prompts with responses, each together about as many bytes, and so tokens, as `length`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        text = " ".join(WORDS[(i * 7 + j * (i % 3 + 1)) % len(WORDS)] for j in range(length))
        rows.append({"prompt": text[: length // 2], "response": text[length // 2 : length]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
