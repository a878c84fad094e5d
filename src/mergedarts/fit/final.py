"""The closed-form fit of the final site: position forms, rank, ridge and metric chosen on held-out folds.

Knows the settings of the final site; the algebra is in `closed_form`. Runs on cached features and the head alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import PositionForm
from ..correction import SiteCorrection
from ..features import Readout
from .closed_form import Statistics, choose_ridge, regularised, reweighted, solve
from .fisher import head_metric
from .kl import fit_kl
from .positions import functions_of, position_of, table_rows

RIDGES = (0.01, 0.1, 1.0, 10.0)
FOLDS = 4
L1_PASSES = 8
#: Position forms tried where the settings leave it open.
OPEN_FORMS = (PositionForm(form="constant"), PositionForm(form="smooth", size=4))
#: Inputs up to which the reweighted passes are run: each output has a system of its own to solve.
MAX_L1_INPUTS = 64


@dataclass(frozen=True)
class FinalData:
    """The tokens of a final-site fit.

    Attributes:
        states, target: [n, d] of the merged model and the expert.
        weights: [n], positions: [n], sequence: [n] number of the sequence.
    """

    states: torch.Tensor
    target: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor

    def counted(self) -> FinalData:
        """Without the tokens of weight zero."""
        kept = self.weights > 0
        return FinalData(*(t[kept] for t in (self.states, self.target, self.weights, self.positions, self.sequence)))


def fit_final(
    data: FinalData,
    readout: Readout,
    *,
    forms: tuple[PositionForm, ...],
    rank: int,
    ridge: float | None,
    metric: str,
    l1: bool,
    objective: str,
    top_k: int,
    expert_head: Any,
    title: str,
) -> tuple[SiteCorrection, dict[str, Any], list[str]]:
    """Fit the final site; position form and ridge by the error of held-out folds of whole sequences.

    Args:
        data: tokens; those of weight zero are left out.
        forms: position forms to choose from.
        rank: of the low-rank part, at most d.
        ridge: strength, or None to choose.
        metric: `states` (Euclidean) or `fisher` (of the output embedding).
        l1: whether reweighted passes bring up and bias to the weighted L1 loss (`states` only).
        objective: `states`, or `kl` to lower the KL on the expert's `top_k` tokens from the solution on.

    Returns:
        The correction, what was chosen, and notes.
    """
    data = data.counted()
    h, difference = data.states.float(), data.target.float() - data.states.float()
    matrix = regularised(head_metric(readout, data.states)) if metric == "fisher" else None
    folds = data.sequence.unique(return_inverse=True)[1] % FOLDS
    tried: dict[str, float] = {}
    best: tuple[float, PositionForm, float, list[Statistics]] | None = None
    for form in forms:
        f, penalty = functions_of(position_of(form, data.positions), data.positions)
        parts = [
            Statistics.of(h[folds == i], f[folds == i], difference[folds == i], data.weights[folds == i])
            for i in range(FOLDS)
            if (folds == i).any()
        ]
        parts = [part.penalised(penalty / len(parts)) for part in parts]
        if len(parts) < 2:
            chosen, score = RIDGES[-1] if ridge is None else ridge, 1.0
        elif ridge is None or len(forms) > 1:
            chosen, scores = choose_ridge(parts, RIDGES if ridge is None else (ridge,), rank, matrix)
            score = scores[chosen]
        else:
            chosen, score = ridge, 0.0
        tried[form.label] = score
        if best is None or score < best[0]:
            best = (score, form, chosen, parts)
    assert best is not None
    _, form, chosen, parts = best
    position = position_of(form, data.positions)
    found = solve(sum(parts[1:], start=parts[0]), chosen, matrix)
    solution = found.at_rank(rank)
    f, _ = functions_of(position, data.positions)
    up, functions = solution.up, solution.functions
    if l1 and matrix is None and rank + f.shape[1] <= MAX_L1_INPUTS:
        up, functions = reweighted(h, f, difference, data.weights, solution.down, L1_PASSES)
        functions = functions if position is not None else None
    rows = table_rows(position, functions)
    site = SiteCorrection(
        "final", solution.down.float(), -up.float(), None if rows is None else -rows.float(), position
    )
    choices: dict[str, Any] = {"ridge": chosen, "position": form.label, "rank": rank, "held_out_error": tried}
    if objective == "kl":
        site, choices["kl_objective"] = fit_kl(
            site, data.states, data.target, data.weights, data.positions, readout, expert_head, top_k, title
        )
    notes = []
    if found.helped:
        notes.append(f"the inputs were too alike to solve (condition {found.condition:.0e}); the ridge was raised.")
    return site, choices, notes
