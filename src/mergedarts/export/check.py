"""Compares an export with the repaired model it came from, on the held-out prompts of every domain.

Knows sequences and logits; does not know the form of the export.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import parse_run
from ..models import ModelRef, eos_ids
from ..progress import bar
from ..prompts import TokenSequence, encode, read_examples, split
from ..repaired import domains_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCES = 8
#: The last tokens of a sequence that are compared; a row of logits is as wide as the vocabulary.
TOKENS = 32

Logits = list[torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Between two models' logits on some tokens: the largest absolute difference, and the mean KL in nats a token."""

    tokens: int
    largest: float
    kl: float

    @classmethod
    def of(cls, before: Logits, after: Logits) -> Difference:
        kl = [
            (a.log_softmax(-1).exp() * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
            for a, b in zip(before, after, strict=True)
        ]
        largest = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
        return cls(sum(map(len, before)), largest, float(torch.cat(kl).double().mean().clamp(min=0)))

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "largest": self.largest, "kl": self.kl}


def held_out_sequences(
    config: dict[str, Any], model: PreTrainedModel, tokenizer: Any
) -> dict[str, list[TokenSequence]]:
    """Some of the sequences of each domain that its correction was not fitted on (of all, where none was held out)."""
    settings = config["settings"] | {"merged": config["merged"]["model"], "merge": None}
    run = parse_run(settings | {"domains": domains_of(config)})
    eos = eos_ids(ModelRef(str(model.config._name_or_path)), tokenizer)
    out = {}
    for name, domain in run.domains.items():
        examples = read_examples(domain, name, Path.cwd())
        fitted, held = split(len(examples), run.fit.holdout, run.fit.seed)
        out[name] = encode([examples[i] for i in (held or fitted)[:SEQUENCES]], tokenizer, eos, run.max_tokens)
    return out


@torch.inference_mode()
def logits_by_domain(
    model: PreTrainedModel,
    sequences: dict[str, list[TokenSequence]],
    domains: list[str | None],
    use: Callable[[str | None], None],
    title: str,
) -> dict[str | None, Logits]:
    """Float32 logits of the last tokens of sequences under each domain in use: of its own, or of all where it has none.

    Args:
        sequences: by domain.
        domains: names, None and `auto`.
        use: called before each.
    """
    device = next(model.parameters()).device
    every = [s for own in sequences.values() for s in own]
    work = {domain: sequences.get(domain or "", every) for domain in domains}
    out: dict[str | None, Logits] = {}
    with bar(f"{title}: logits", sum(map(len, work.values())), "prompts") as advance:
        for domain, rows in work.items():
            use(domain)
            out[domain] = []
            for sequence in rows:
                ids = torch.tensor([sequence.ids], device=device)
                out[domain].append(model(input_ids=ids, use_cache=False).logits[0, -TOKENS:].float().cpu())
                advance(1)
    return out
