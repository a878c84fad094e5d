"""How far a (corrected) merged model is from its expert: per-token measures, their means and intervals.

Knows states, heads and entropies of held-out tokens; runs no decoder and makes no pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .features import Readout

#: Entropy in nats above which a token counts as one where the expert is undecided.
HIGH_ENTROPY = 1.0

MEASURES = ("ewl1", "kl", "kl_high", "agreement", "nll")


@dataclass(frozen=True)
class TokenMeasures:
    """Measures of response tokens, each [n], and the number of the sequence each is from.

    Attributes:
        l1: |h' - h*|_1 / d.
        entropy: of the expert, nats.
        kl: KL(expert || model) over the vocabulary rows that both have, nats.
        agree: whether both have the same likeliest token.
        nll: negative log-likelihood of the reference's next token, nats.
        sequence: index of the sequence.
    """

    l1: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    nll: torch.Tensor
    sequence: torch.Tensor

    def sums(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Numerator and denominator of each mean, token by token."""
        one = torch.ones_like(self.kl)
        high = (self.entropy > HIGH_ENTROPY).double()
        return {
            "ewl1": (self.entropy * self.l1, self.entropy),
            "kl": (self.kl, one),
            "kl_high": (self.kl * high, high),
            "agreement": (self.agree, one),
            "nll": (self.nll, one),
        }

    def means(self) -> dict[str, float | int | None]:
        """Means over tokens; `kl_high` over those where the entropy exceeds 1 nat, None where there are none."""
        out: dict[str, float | int | None] = {}
        for name, (numerator, denominator) in self.sums().items():
            total = float(denominator.sum())
            out[name] = float(numerator.sum()) / total if total > 0 else (0.0 if name == "ewl1" else None)
        return out | {"tokens": len(self.kl), "sequences": int(self.sequence.unique().numel())}


def joined(parts: list[TokenMeasures]) -> TokenMeasures:
    """Measures of several sets of tokens as of one."""
    return TokenMeasures(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenMeasures)))


def measure(
    readout: Readout,
    states: torch.Tensor,
    expert_states: torch.Tensor,
    expert_head: tuple[torch.Tensor, torch.Tensor | None] | None,
    entropy: torch.Tensor,
    next_ids: torch.Tensor,
    sequence: torch.Tensor,
    states_head: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> TokenMeasures:
    """Measure tokens chunk by chunk, so that no [tokens, vocabulary] tensor of the whole set exists.

    Args:
        readout: of the merged model.
        states: [n, d] its (corrected) final states at the tokens to measure.
        expert_states: [n, d].
        expert_head: the expert's output embedding, None where it is the merged model's.
        entropy: [n] of the expert.
        next_ids: [n] the reference's next tokens.
        sequence: [n] index of the sequence of each token.
        states_head: the output embedding to read `states` with, None for the merged model's.
    """
    kl, agree, nll = [], [], []
    for h, target, follow in zip(
        states.split(readout.chunk), expert_states.split(readout.chunk), next_ids.split(readout.chunk), strict=True
    ):
        ours, theirs = readout(h, states_head), readout(target, expert_head)
        follow = follow.to(ours.device)
        nll.append(-ours.log_softmax(-1).gather(-1, follow[:, None]).squeeze(-1))
        rows = min(ours.shape[-1], theirs.shape[-1])
        log_q, log_p = ours[:, :rows].log_softmax(-1), theirs[:, :rows].log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).nan_to_num(0.0).sum(-1).clamp(min=0))
        agree.append(ours[:, :rows].argmax(-1) == theirs[:, :rows].argmax(-1))
    l1 = (states.float() - expert_states.float()).abs().mean(-1)
    return TokenMeasures(
        l1.cpu().double(),
        entropy.cpu().double(),
        torch.cat(kl).cpu().double(),
        torch.cat(agree).cpu().double(),
        torch.cat(nll).cpu().double(),
        sequence.cpu(),
    )


def bootstrap(
    samples: dict[str, TokenMeasures], statistic: Any, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95% percentile interval of a statistic over whole sequences, the same draw for all samples (paired).

    Args:
        samples: measures of the same tokens under several models.
        statistic: called with {name: {measure: mean}}; returns a number.
    """
    first = next(iter(samples.values()))
    ids, index = first.sequence.unique(return_inverse=True)
    count = len(ids)
    totals: dict[str, dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = {}
    for name, sample in samples.items():
        totals[name] = {}
        for key, pair in sample.sums().items():
            a, b = (torch.zeros(count, dtype=torch.float64).index_add_(0, index, x).numpy() for x in pair)
            totals[name][key] = (a, b)
    rng = np.random.default_rng(seed)
    values = np.empty(draws)
    for i in range(draws):
        counts = np.bincount(rng.integers(0, count, count), minlength=count)
        means = {
            name: {key: ratio(float(counts @ a), float(counts @ b)) for key, (a, b) in parts.items()}
            for name, parts in totals.items()
        }
        values[i] = statistic(means)
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def ratio(a: float, b: float) -> float:
    """a / b, not a number where b is zero."""
    return a / b if b > 0 else float("nan")
