"""Corrections of the residual stream in depth, fitted in one sweep from the first layer to the last.

Knows the order of the sweep, token weights and metrics at each site; the algebra is in `closed_form`, the running of
single layers in `layerwise`. The language model runs once over the sequences, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..correction import Correction, Position, SiteCorrection
from ..layerwise import LayerRunner
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet
from .closed_form import Ridge, Statistics, regularised, solve
from .fisher import Metric

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep is to fit.

    Attributes:
        ranks: rank by layer; a layer that is not named has no site.
        position: of the bias at each site, None for none.
        inside: whether the bias shares the rank of the low-rank part.
        ridge: relative strength.
    """

    ranks: dict[int, int]
    position: Position | None
    inside: bool
    ridge: float


@dataclass(frozen=True)
class SweepResult:
    """The correction, the gains by rank at each site (what a further rank buys), and how well the solves stood."""

    correction: Correction
    gains: dict[int, list[float]] = field(default_factory=dict)
    conditions: dict[int, float] = field(default_factory=dict)
    helped: list[int] = field(default_factory=list)


def sweep(
    model: PreTrainedModel,
    prompts: PromptSet,
    target: Callable[[int], torch.Tensor],
    weights: Callable[[int], torch.Tensor],
    metric: Callable[[int], Metric | None],
    settings: SweepSettings,
    title: str,
) -> SweepResult:
    """Fit residual sites in order, each on the states that its predecessors have repaired.

    Args:
        model: the merged model.
        prompts: the sequences to fit on.
        target: by layer, the expert's states [tokens, d] after it.
        weights: by layer, the weight [tokens] of each token.
        metric: by layer, its Fisher metric, or None for the Euclidean one.
        settings: sites, ranks, positions and ridge.
    """
    names = [name for name, _ in decoder_layers(model)]
    runner = LayerRunner(model, prompts)
    positions = torch.from_numpy(prompts.positions())
    last = max(settings.ranks, default=-1)
    sites: dict[str, SiteCorrection] = {}
    gains: dict[int, list[float]] = {}
    conditions: dict[int, float] = {}
    helped: list[int] = []
    with bar(title, prompts.tokens * (last + 1)) as advance:
        for layer in range(last + 1):
            for done in runner.step():
                advance(done)
            if layer not in settings.ranks:
                continue
            found = metric(layer)
            ridge = fit_site(
                runner.states, target(layer), weights(layer), positions, settings,
                None if found is None else regularised(found.matrix),
            )  # fmt: skip
            site = ridge.at_rank(settings.ranks[layer]).site("residual", settings.position)
            sites[names[layer]] = site
            gains[layer] = ridge.gains[:64].tolist()
            conditions[layer] = ridge.condition
            if ridge.helped:
                helped.append(layer)
            runner.states = apply_site(site, runner.states, positions)
    return SweepResult(Correction(sites), gains, conditions, helped)


def fit_site(
    states: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    settings: SweepSettings,
    metric: torch.Tensor | None,
) -> Ridge:
    """The ridge solution at one site from its tokens: states and target [n, d], weights and positions [n]."""
    counted = weights > 0
    h, goal = states[counted].float(), target[counted].float()
    f = functions_at(settings.position, positions[counted])
    statistics = Statistics.of(h, f, goal - h, weights[counted])
    return solve(statistics, settings.ridge, metric, settings.inside)


def functions_at(position: Position | None, positions: torch.Tensor) -> torch.Tensor:
    """[n, k] position functions: a column for each row of a table, or the smooth ones; [n, 0] without."""
    if position is None:
        return torch.zeros(len(positions), 0)
    if position.form == "table":
        return torch.nn.functional.one_hot(positions.clamp(max=position.size - 1), position.size).float()
    return position.basis(positions)


def apply_site(site: SiteCorrection, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Corrected states [n, d] in the arithmetic of the runtime: the site rounded to the dtype of the states."""
    with torch.inference_mode():
        rounded = deepcopy(site).requires_grad_(False).to(states.dtype)
        out: torch.Tensor = rounded(states, states, positions)
        return out
