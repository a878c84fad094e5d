"""Spends a parameter budget on sites and ranks.

Knows what a site of a rank costs; knows nothing of models or data.
"""

from __future__ import annotations


def site_cost(width: int, rank: int, functions: int, inside: bool) -> int:
    """Parameters of a residual site: down and up, and k position functions inside the rank or outside."""
    return 2 * width * rank + functions * (rank if inside else width)


def even_ranks(layers: int, width: int, functions: int, inside: bool, budget: int) -> dict[int, int]:
    """Ranks by layer that spend a budget as evenly in depth as it allows.

    Where it pays for less than rank 1 at every layer, sites are spaced evenly and end at the last layer; what is left
    above a whole rank everywhere goes to the last layers, where errors meet the head with nothing after to mend them.
    """
    one = site_cost(width, 1, functions, inside)
    if inside:
        units = budget // one
    else:
        # Outside the rank, every site first pays for its bias.
        sites = min(layers, budget // one)
        units = sites + max(0, (budget - sites * one) // (2 * width)) if sites else 0
    if units <= 0:
        return {}
    if units < layers:
        return {round((i + 1) * layers / units) - 1: 1 for i in range(units)}
    base, extra = divmod(units, layers)
    return {i: min(width, base + (1 if i >= layers - extra else 0)) for i in range(layers)}
