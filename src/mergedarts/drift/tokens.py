"""What is known of the measured tokens: where they stand, how far a model's states are from the expert's, and means.

Knows tensors of one domain's held-out tokens; runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from ..heldout import HeldOut
from ..measures import TokenMeasures
from ..prompts import PromptSet
from .bins import Array, Bin, assign, coarse_position_bins, entropy_bins, position_bins, turn_bins
from .bootstrap import Resampler
from .types import Point

#: Tokens whose distances are computed at once, in float64.
CHUNK = 2048

#: Measures of states, which need no head.
STATE_MEASURES = ("drift", "relative", "cosine")

#: Values [n] of one model by measure; not a number where a measure does not exist for a token.
Series = dict[str, Array]


@dataclass(frozen=True)
class Places:
    """Where the tokens of some sequences stand, arrays [n] in flat order; only tokens that something follows.

    Attributes:
        index: in the flat order of all tokens.
        sequence: number of the sequence.
        position: from the first token.
        since: tokens since the prompt's end (0 predicts the first token of a response); -1 outside responses.
        turn: number of the response, from 1, that the token belongs to or comes before.
        counted: whether the token is one of those measured; the others are the prompts'.
        entropy: of the expert, nats.
    """

    index: Array
    sequence: Array
    position: Array
    since: Array
    turn: Array
    counted: Array
    entropy: Array

    @classmethod
    def of(cls, held: HeldOut) -> Places:
        prompts = held.prompts
        kept = (prompts.next_ids() >= 0).nonzero()[0]
        since, turn = _turns(prompts)
        return cls(
            kept,
            held.sequence.numpy()[kept],
            prompts.positions()[kept],
            since[kept],
            turn[kept],
            held.counted.numpy()[kept],
            held.entropy.double().numpy()[kept],
        )


def _turns(prompts: PromptSet) -> tuple[Array, Array]:
    """By token: place inside its response (-1 outside), and number of the response it is in or before."""
    since, turn = [], []
    for sequence in prompts.sequences:
        marks = np.array(sequence.predicts, dtype=bool)
        begins = marks & ~np.concatenate([[False], marks[:-1]])
        number = begins.cumsum()
        place = np.arange(len(marks))
        start = np.maximum.accumulate(np.where(begins, place, 0))
        since.append(np.where(marks, place - start, -1))
        turn.append(np.where(marks, number, number + 1))
    return np.concatenate(since), np.concatenate(turn)


def distances(states: torch.Tensor, target: torch.Tensor) -> Series:
    """Drift, relative drift and cosine of states [n, d] to the expert's [n, d], each [n] in float64.

    Relative drift is not a number where the expert's state is zero and the other is not, cosine where either is.
    """
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in STATE_MEASURES}
    for h, e in zip(states.split(CHUNK), target.split(CHUNK), strict=True):
        h, e = h.cpu().double(), e.cpu().double()  # some accelerators know no float64
        off = (h - e).abs().sum(-1)
        size = e.abs().sum(-1)
        # Norms of each state scaled to its largest value, so that outlier dimensions do not overflow.
        a, b = _unit(h), _unit(e)
        cosine = torch.where(off == 0, 1.0, (a * b).sum(-1).clamp(-1, 1))
        bare = ((a == 0).all(-1) | (b == 0).all(-1)) & (off > 0)
        parts["drift"].append(off / h.shape[-1])
        parts["relative"].append(torch.where(off == 0, 0.0, torch.where(size > 0, off / size, torch.nan)))
        parts["cosine"].append(torch.where(bare, torch.nan, cosine))
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def _unit(h: torch.Tensor) -> torch.Tensor:
    scaled = h / h.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(h.dtype).tiny)
    unit: torch.Tensor = scaled / scaled.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(h.dtype).tiny)
    return unit


def series(places: Places, held: HeldOut, states: torch.Tensor, measures: TokenMeasures) -> Series:
    """All measures of one model at the tokens of `places`.

    Args:
        states: [m, d] final states of all held-out tokens.
        measures: of the counted ones.
    """
    index = torch.from_numpy(places.index)
    out = distances(states[index], held.target[index])
    for name, values in (("kl", measures.kl), ("agreement", measures.agree)):
        whole = np.full(len(held.counted), np.nan)
        whole[held.counted.numpy()] = values.numpy()
        out[name] = whole[places.index]
    return out


def points(
    labels: Sequence[tuple[Bin, Bin | None]], index: Array, chosen: Array, values: Series, resampler: Resampler
) -> list[Point]:
    """Means with intervals in bins; bins without tokens are left out, and so are measures that have no values.

    Args:
        labels: bins, each perhaps crossed with a second.
        index: [n] the bin of each token.
        chosen: [n] which tokens are meant.
        values: by measure [n].
    """
    size = len(labels)
    behind = resampler.sums(np.ones(len(index)), index, size, chosen)
    tokens, sequences = behind.sum(0), (behind > 0).sum(0)
    estimates = {}
    for name, value in values.items():
        valid = np.isfinite(value)
        numerator = resampler.sums(np.where(valid, value, 0.0), index, size, chosen)
        estimates[name] = resampler.ratios(numerator, resampler.sums(valid, index, size, chosen))
    return [
        Point(
            one.label, one.low, one.high, int(tokens[i]), int(sequences[i]),
            {name: found[i] for name, found in estimates.items() if found[i].value is not None},
            None if other is None else other.label,
        )
        for i, (one, other) in enumerate(labels)
        if tokens[i]
    ]  # fmt: skip


def overall(places: Places, values: Series, resampler: Resampler) -> Point:
    """Means over all counted tokens."""
    everything = [(Bin(0, None, "all"), None)]
    return points(everything, np.zeros(len(places.position), dtype=int), places.counted, values, resampler)[0]


def axes(places: Places, values: Series, resampler: Resampler) -> dict[str, list[Point]]:
    """Points by position, entropy and turn, as `ModelDrift.axes` has them."""
    last = int(places.position.max())
    by_position, by_entropy = position_bins(last), entropy_bins()
    where, band = assign(by_position, places.position), assign(by_entropy, places.entropy)
    counted = places.counted
    found = {"position": points(_plain(by_position), where, counted, values, resampler)}
    if not counted.all():
        states = {name: values[name] for name in STATE_MEASURES}
        found["prompt_position"] = points(_plain(by_position), where, ~counted, states, resampler)
    if (places.since >= 0).any():
        found["since_prompt"] = points(
            _plain(by_position), assign(by_position, places.since), counted & (places.since >= 0), values, resampler
        )
    found["entropy"] = points(_plain(by_entropy), band, counted, values, resampler)
    coarse = coarse_position_bins(last)
    crossed: list[tuple[Bin, Bin | None]] = list(product(coarse, by_entropy))
    both = assign(coarse, places.position) * len(by_entropy) + band
    found["position_entropy"] = points(crossed, both, counted, values, resampler)
    if places.turn[counted].max(initial=0) > 1:
        turns = turn_bins(int(places.turn.max()))
        found["turn"] = points(_plain(turns), assign(turns, places.turn), counted, values, resampler)
    return found


def _plain(bins: tuple[Bin, ...]) -> list[tuple[Bin, Bin | None]]:
    return [(b, None) for b in bins]
