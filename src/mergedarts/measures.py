"""How far a (corrected) merged model is from its expert: per-token measures, their means and intervals.

Knows states, heads and entropies of held-out tokens; runs no decoder and makes no pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .features import Readout
from .heads import Head

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
    read: Sequence[tuple[torch.Tensor, Head | None]],
    expert_states: torch.Tensor,
    expert_head: Head | None,
    next_ids: torch.Tensor,
    sequence: torch.Tensor,
) -> list[TokenMeasures]:
    """Measure states against the expert's, chunk by chunk, so that no [tokens, vocabulary] tensor of all exists.

    The expert's predictions are made once for all that is measured against them.

    Args:
        readout: of the merged model.
        read: final states [n, d] at the tokens to measure, and the output embedding to read them with, None for the
            merged model's; for each set of states there is a result.
        expert_states: [n, d].
        expert_head: the expert's output embedding, None where it is the merged model's.
        next_ids: [n] the reference's next tokens.
        sequence: [n] index of the sequence of each token.
    """
    # Made before the chunks, so that nothing that stays lies between their large tensors in memory.
    entropies = torch.empty(len(expert_states), dtype=torch.float64)
    found = torch.empty(len(read), 3, len(expert_states), dtype=torch.float64)
    for start in range(0, len(expert_states), readout.chunk):
        part = slice(start, start + readout.chunk)
        expert = _Prediction(readout(expert_states[part], expert_head), next_ids[part])
        entropies[part] = expert.entropy().cpu().double()
        for values, (states, head) in zip(found, read, strict=True):
            same = states is expert_states and head is expert_head
            other = expert if same else _Prediction(readout(states[part], head), next_ids[part])
            for row, value in zip(values, expert.of(other), strict=True):
                row[part] = value.cpu().double()
    out = []
    for (kl, agree, nll), (states, _) in zip(found, read, strict=True):
        l1 = (states.float() - expert_states.float()).abs().mean(-1).cpu().double()
        out.append(TokenMeasures(l1, entropies, kl, agree, nll, sequence.cpu()))
    return out


class _Prediction:
    """What logits [n, vocabulary] say of tokens whose next ids [n] are known."""

    def __init__(self, logits: torch.Tensor, following: torch.Tensor) -> None:
        self._logits, self._following = logits, following.to(logits.device)
        self._logs: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}
        self._likeliest: dict[int, torch.Tensor] = {}

    def log(self, rows: int) -> torch.Tensor:
        """[n, rows] log-probabilities over the first rows of the vocabulary."""
        if rows not in self._logs:
            self._logs[rows] = self._logits[:, :rows].log_softmax(-1)
        return self._logs[rows]

    def weights(self, rows: int) -> torch.Tensor:
        """[n, rows] the probabilities of these."""
        if rows not in self._weights:
            self._weights[rows] = self.log(rows).exp()
        return self._weights[rows]

    def entropy(self) -> torch.Tensor:
        """[n] in nats."""
        rows = self._logits.shape[-1]
        return -(self.weights(rows) * self.log(rows)).nan_to_num_(0.0).sum(-1)

    def likeliest(self, rows: int) -> torch.Tensor:
        """[n] the token of these."""
        if rows not in self._likeliest:
            self._likeliest[rows] = self._logits[:, :rows].argmax(-1)
        return self._likeliest[rows]

    def of(self, other: _Prediction) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """KL from this to another's, whether both have the same likeliest token, and the other's NLL; each [n]."""
        size = other._logits.shape[-1]
        rows = min(size, self._logits.shape[-1])
        kl = (self.log(rows) - other.log(rows)).mul_(self.weights(rows)).nan_to_num_(0.0).sum(-1).clamp(min=0)
        return (
            kl,
            self.likeliest(rows) == other.likeliest(rows),
            -other.log(size).gather(-1, other._following[:, None]).squeeze(-1),
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
