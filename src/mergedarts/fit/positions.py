"""Position forms as regression functions: smooth, constant, or a table whose rows share what they have.

Knows the forms and their penalties; the regression is in `closed_form`.
"""

from __future__ import annotations

import torch

from ..config import PositionForm
from ..correction import Position

#: Tokens of mean weight by which a table's row is drawn to the mean over all positions.
ROW_PRIOR = 16.0


def position_of(form: PositionForm, positions: torch.Tensor) -> Position | None:
    """A position form for the positions seen."""
    if form.form == "none":
        return None
    if form.form == "smooth":
        return Position("smooth", form.size, max(1, int(positions.max())))
    return Position("table", 1 if form.form == "constant" else form.size)


def functions_of(position: Position | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] functions and [k] penalties; a table is a constant and a deviation for each row, the latter penalised.

    So a row with few samples lies near the mean of all, and one never seen is that mean.
    """
    if position is None:
        return torch.zeros(len(positions), 0), torch.zeros(0, dtype=torch.float64)
    if position.form == "smooth":
        return position.basis(positions), torch.zeros(position.size, dtype=torch.float64)
    one = torch.ones(len(positions), 1)
    if position.size == 1:
        return one, torch.zeros(1, dtype=torch.float64)
    rows = torch.nn.functional.one_hot(positions.clamp(max=position.size - 1), position.size).float()
    penalty = torch.full((1 + position.size,), ROW_PRIOR, dtype=torch.float64)
    penalty[0] = 0
    return torch.cat([one, rows], 1), penalty


def table_rows(position: Position | None, functions: torch.Tensor | None) -> torch.Tensor | None:
    """Coefficients of `functions_of` as the rows that are stored."""
    if position is None or functions is None or position.form == "smooth" or position.size == 1:
        return functions
    return functions[:1] + functions[1:]
