"""Corrections in depth, of the residual stream or of what writes to it, fitted in one sweep over the layers.

Knows the order of the sweep, token weights and metrics at each site; the algebra is in `closed_form`, the running of
single layers in `layerwise`. The language model runs once over the sequences, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import PositionForm
from ..correction import Correction, Kind, SiteCorrection
from ..distributed import first, gather, total
from ..features import hooked
from ..layerwise import LayerRunner
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet
from .closed_form import Statistics, choose_ridge, regularised, solve
from .fisher import Metric
from .linear import weight_of
from .positions import functions_of, position_of, table_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDS = 3


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep is to fit.

    Attributes:
        ranks: rank by layer; a layer that is not named has no site.
        forms: position forms to choose from, by the error of held-out folds.
        inside: whether the position functions share the rank of the low-rank part.
        ridges: relative strengths to choose from in the same way.
        probes: layers at which the choice is made anew; the others take that of the last probe before them.
        writers: by layer, name and module of the linear layer whose input is read and whose weight is updated; without
            them the state after the layer itself is read and corrected.
    """

    ranks: dict[int, int]
    forms: tuple[PositionForm, ...]
    inside: bool
    ridges: tuple[float, ...]
    probes: tuple[int, ...] = ()
    writers: dict[int, tuple[str, nn.Module]] | None = None


@dataclass(frozen=True)
class SweepResult:
    """The correction, what was chosen at the probes, and where a solve had to help itself."""

    correction: Correction
    chosen: list[dict[str, Any]] = field(default_factory=list)
    helped: list[str] = field(default_factory=list)


def sweep(
    model: PreTrainedModel,
    prompts: PromptSet,
    target: Callable[[int], torch.Tensor],
    weights: Callable[[int], torch.Tensor],
    metric: Callable[[int], Metric | None],
    settings: SweepSettings,
    title: str,
    numbers: list[int] | None = None,
) -> SweepResult:
    """Fit sites in order, each on the states that its predecessors have repaired.

    Args:
        model: the merged model.
        prompts: the sequences to fit on.
        target: by layer, the expert's states [tokens, d] after it.
        weights: by layer, the weight [tokens] of each token.
        metric: by layer, its Fisher metric, or None for the Euclidean one.
        settings: sites, ranks, positions and ridge.
        numbers: of each sequence, its number among those that all processes fit on; its place by default.
    """
    numbers = list(range(len(prompts.sequences))) if numbers is None else numbers
    names = [name for name, _ in decoder_layers(model)]
    runner = LayerRunner(model, prompts)
    positions = torch.from_numpy(prompts.positions())
    sequence = torch.tensor(numbers)[torch.from_numpy(prompts.sequence_index())]
    last = max(settings.ranks, default=-1)
    result = SweepResult(Correction())
    sites: dict[str, SiteCorrection] = {}
    form, ridge = settings.forms[0], settings.ridges[0]
    with bar(title, prompts.tokens * (last + 1)) as advance:
        for layer in range(last + 1):
            name, inputs = names[layer], None
            if settings.writers is None or layer not in settings.ranks:
                for done in runner.step():
                    advance(done)
            else:
                name, module = settings.writers[layer]
                inputs = torch.empty(prompts.tokens, weight_of(module).shape[1], dtype=runner.states.dtype)
                with hooked(module.register_forward_pre_hook(_keep(runner, inputs))):
                    for done in runner.step():
                        advance(done)
            if layer not in settings.ranks:
                continue
            rank = settings.ranks[layer]
            found = metric(layer)
            matrix = None if found is None else regularised(found.matrix)
            site = Site(runner.states, target(layer), weights(layer), positions, sequence, matrix, inputs)
            if layer in settings.probes:
                form, ridge, errors = first(site.choose(settings, rank))
                result.chosen.append({"layer": layer, "position": form.label, "ridge": ridge, "held_out_error": errors})
            fitted, helped = first(site.fit(form, ridge, rank, settings.inside))
            if helped:
                result.helped.append(name)
            sites[name] = fitted
            runner.states = apply_site(fitted, runner.states, positions, inputs)
    return SweepResult(Correction(sites), result.chosen, result.helped)


def _keep(runner: LayerRunner, inputs: torch.Tensor) -> Any:
    """A hook that keeps what a linear layer reads at the real tokens of a batch, in flat token order."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        where, flat = runner.current
        inputs[flat] = args[0].reshape(*where.shape, -1)[where.to(args[0].device)].to(inputs)

    return hook


class Site:
    """The tokens of one site, those of weight zero left out.

    Args:
        states, target: [n, d] of the merged model and the expert after the layer.
        weights: [n]; positions: [n]; sequence: [n] number of the sequence.
        metric: [d, d] positive definite, or None for the Euclidean one.
        inputs: [n, d_in] what a linear layer reads, whose weight is to be updated; None to read the states themselves.
    """

    def __init__(
        self,
        states: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        metric: torch.Tensor | None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        kept = weights > 0
        self._kind: Kind = "residual" if inputs is None else "linear"
        self._x = (states if inputs is None else inputs)[kept]
        self._difference = target[kept].float() - states[kept].float()
        self._weights, self._positions = weights[kept], positions[kept]
        self._fold = sequence[kept] % FOLDS
        self._plain: dict[int, Statistics] = {}
        self._last = torch.tensor([max(gather(int(self._positions.max())))])
        self._metric = metric

    def statistics(self, form: PositionForm, fold: int | None = None) -> Statistics:
        """Of all tokens, or of a fold, from which errors can be told too."""
        f, penalty = functions_of(position_of(form, self._last), self._positions)
        x, difference, weights = self._x, self._difference, self._weights
        if fold is not None:
            chosen = self._fold == fold
            f, x, difference, weights = f[chosen], x[chosen], difference[chosen], weights[chosen]
            if fold not in self._plain:
                self._plain[fold] = Statistics.plain(x, difference, weights)
            plain = self._plain[fold]
            penalty = penalty * total(int(chosen.sum())) / total(len(chosen))
        elif self._plain:  # every fold's, since a choice was made
            plain = reduce(add, self._plain.values())
        else:
            plain = Statistics.plain(x, difference, weights, scored=False)
        return plain.with_functions(f, x, difference, weights).summed().penalised(penalty)

    def choose(self, settings: SweepSettings, rank: int) -> tuple[PositionForm, float, dict[str, float]]:
        """Position form and ridge of least error on held-out folds, and the error of each relative to none.

        The ridge is chosen under the first form, and the form by that ridge: each solve counts.
        """
        errors: dict[str, float] = {}
        ridges = settings.ridges
        best = (float("inf"), settings.forms[0], ridges[0])
        for form in settings.forms:
            folds = [part for i in range(FOLDS) if (part := self.statistics(form, i)).weight > 0]
            if len(folds) < 2:
                return settings.forms[0], settings.ridges[-1], {}
            ridge, scores = choose_ridge(folds, ridges, rank, self._metric, settings.inside)
            ridges = (ridge,)
            errors |= {f"{form.label}, ridge {r:g}": round(e, 5) for r, e in scores.items()}
            if scores[ridge] < best[0]:
                best = (scores[ridge], form, ridge)
        return best[1], best[2], errors

    def fit(self, form: PositionForm, ridge: float, rank: int, inside: bool) -> tuple[SiteCorrection, bool]:
        """The correction of some rank, and whether the ridge had to be raised."""
        position = position_of(form, self._last)
        ridged = solve(self.statistics(form), ridge, self._metric, inside)
        solution = ridged.at_rank(rank)
        rows = table_rows(position, solution.functions)
        return replace(solution, functions=rows).site(self._kind, position), ridged.helped


def apply_site(
    site: SiteCorrection, states: torch.Tensor, positions: torch.Tensor, inputs: torch.Tensor | None = None
) -> torch.Tensor:
    """Corrected states [n, d] in the arithmetic of the runtime: the site rounded to the dtype of the states.

    `inputs` [n, d_in] are what the site reads, the states themselves if not given.
    """
    with torch.inference_mode():
        rounded = deepcopy(site).requires_grad_(False).to(states.dtype)
        out: torch.Tensor = rounded(states, states if inputs is None else inputs, positions)
        return out
