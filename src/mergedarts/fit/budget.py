"""Spends a parameter budget on sites and ranks.

Knows what a site of a rank costs; knows nothing of models or data.
"""

from __future__ import annotations


def site_cost(width: int, rank: int, functions: int, inside: bool, inputs: int | None = None) -> int:
    """Parameters of a site: down and up, and k position functions inside the rank or outside.

    `inputs` is the width of what it reads, that of the residual stream if not given.
    """
    return (width + (inputs or width)) * rank + functions * (rank if inside else width)


def even_ranks(
    layers: int, width: int, functions: int, inside: bool, budget: int, inputs: int | None = None
) -> dict[int, int]:
    """Ranks by layer that spend a budget as evenly in depth as it allows.

    Where it pays for less than rank 1 at every layer, sites are spaced evenly and end at the last layer; what is left
    above a whole rank at every site goes to the last ones, where errors meet the head with nothing after to mend them.
    """
    one = site_cost(width, 1, functions, inside, inputs)
    sites = min(layers, budget // one)
    if sites <= 0:
        return {}
    further = (budget - sites * one) // (width + (inputs or width) + (functions if inside else 0))
    base, extra = divmod(further, sites)
    places = [round((i + 1) * layers / sites) - 1 for i in range(sites)]
    return {layer: min(width, 1 + base + (i >= sites - extra)) for i, layer in enumerate(places)}
