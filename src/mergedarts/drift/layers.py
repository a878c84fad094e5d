"""Drift after every decoder layer, from one pass of the merged model beside the expert's stored states.

Knows hooks and sums by sequence: each batch's states of a layer are reduced as they come, so that memory is one model
and one layer's states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..features import final_states, hooked, state_of
from ..models import decoder_layers
from ..prompts import PromptSet
from .bins import Array
from .bootstrap import Resampler
from .tokens import STATE_MEASURES, distances
from .types import Point

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerSums:
    """Sums [sequences, layers] of each state measure and of the tokens behind it, sequences in their order."""

    totals: dict[str, Array]
    tokens: dict[str, Array]

    def points(self, resampler: Resampler, rows: Array) -> list[Point]:
        """One point a layer; `rows` are the sequences the resampler knows, in its order."""
        found = {name: resampler.ratios(self.totals[name][rows], self.tokens[name][rows]) for name in STATE_MEASURES}
        behind = self.tokens["drift"][rows]
        return [
            Point(
                str(layer), layer, None, int(behind[:, layer].sum()), int((behind[:, layer] > 0).sum()),
                {name: values[layer] for name, values in found.items() if values[layer].value is not None},
            )
            for layer in range(behind.shape[1])
        ]  # fmt: skip


def run_layers(
    model: PreTrainedModel,
    prompts: PromptSet,
    counted: torch.Tensor,
    expert: Callable[[int, int], torch.Tensor],
    title: str,
) -> tuple[LayerSums, torch.Tensor]:
    """Run a model (with what is attached to it) once over some sequences.

    Args:
        counted: [tokens] which tokens are measured.
        expert: called with a layer and a sequence; returns the expert's states [T, d] after the layer.

    Returns:
        The sums, and the final states [tokens, d].
    """
    layers = [layer for _, layer in decoder_layers(model)]
    shape = (len(prompts.sequences), len(layers))
    totals = {name: np.zeros(shape) for name in STATE_MEASURES}
    tokens = {name: np.zeros(shape) for name in STATE_MEASURES}
    offsets = prompts.offsets
    kept = [counted[offsets[i] : offsets[i + 1]] for i in range(len(prompts.sequences))]
    final: list[torch.Tensor | None] = [None] * len(prompts.sequences)
    batch: list[int] = []

    def begin(current: list[int]) -> None:
        batch[:] = current

    def reduce(depth: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state = state_of(output)
            for row, i in enumerate(batch):
                values = distances(state[row, : len(kept[i])].cpu()[kept[i]], expert(depth, i)[kept[i]])
                for name, value in values.items():
                    valid = np.isfinite(value)
                    totals[name][i, depth] = value[valid].sum()
                    tokens[name][i, depth] = valid.sum()

        return hook

    def take(current: list[int], state: torch.Tensor) -> None:
        for row, i in enumerate(current):
            final[i] = state[row, : len(kept[i])].cpu()

    with hooked(*(layer.register_forward_hook(reduce(i)) for i, layer in enumerate(layers))):
        final_states(model, prompts, take, title, begin)
    return LayerSums(totals, tokens), torch.cat([state for state in final if state is not None])
