"""Which tokens changed: the positions where merged model and expert disagree most, as text.

Knows states, heads and a tokenizer; makes text readable for people elsewhere (`report.text`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..features import Readout
from ..heldout import HeldOut
from ..measures import TokenMeasures
from .types import Candidate, Disagreement

COUNT = 20
TOP = 5
#: Tokens of text shown before and after the one that is predicted.
BEFORE, AFTER = 24, 8


def disagreements(
    held: HeldOut,
    readout: Readout,
    tokenizer: Any,
    states: dict[str, torch.Tensor],
    measures: dict[str, TokenMeasures],
    count: int = COUNT,
) -> list[Disagreement]:
    """The counted positions of largest KL to the expert, largest first.

    Args:
        states: by model (`merged`, perhaps `repaired`) its final states [m, d] of all held-out tokens.
        measures: by model, of the counted ones.
    """
    kl = measures["merged"].kl
    order = kl.argsort(descending=True, stable=True)[:count]
    order = order[kl[order] > 0]
    if not len(order):
        return []
    at = held.counted.nonzero().squeeze(-1)[order]
    ids = torch.tensor([token for s in held.prompts.sequences for token in s.ids])
    offsets = torch.from_numpy(held.prompts.offsets)
    inside = torch.from_numpy(held.prompts.sequence_index())[at]
    top = {"expert": _top(readout(held.target[at], held.head), tokenizer)}
    top |= {name: _top(readout(state[at]), tokenizer) for name, state in states.items()}

    def text(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False))

    found = []
    for i, (place, rank) in enumerate(zip(at.tolist(), order.tolist(), strict=True)):
        begin, end = (int(offsets[int(inside[i]) + k]) for k in (0, 1))
        found.append(
            Disagreement(
                sequence=int(held.sequence[place]),
                position=place - begin,
                before=text(max(begin, place + 1 - BEFORE), place + 1),
                token=text(place + 1, place + 2),
                after=text(place + 2, min(end, place + 2 + AFTER)),
                entropy=float(held.entropy[place]),
                kl={name: float(measure.kl[rank]) for name, measure in measures.items()},
                top={name: candidates[i] for name, candidates in top.items()},
            )
        )
    return found


def _top(logits: torch.Tensor, tokenizer: Any) -> list[list[Candidate]]:
    """The likeliest tokens of each row, with their probabilities."""
    found = logits.softmax(-1).topk(min(TOP, logits.shape[-1]))
    return [
        [
            Candidate(str(tokenizer.decode([token], clean_up_tokenization_spaces=False)), share)
            for token, share in zip(ids, shares, strict=True)
        ]
        for ids, shares in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
