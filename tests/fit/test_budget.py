"""Budgets against counted parameters of real sites, and against greedy spending."""

from __future__ import annotations

import itertools

import pytest
import torch

from mergedarts.correction import Position, SiteCorrection
from mergedarts.fit.budget import even_ranks, site_cost

CASES = [
    (layers, width, functions, inside, budget)
    for layers, width, functions, inside in itertools.product((1, 2, 5, 30), (8, 64), (0, 1, 8), (True, False))
    for budget in (0, 1, 15, 17, 18, 40, 79, 159, 161, 400, 1000, 4097, 20_000)
]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("functions", [0, 1, 8])
@pytest.mark.parametrize("rank", [1, 3])
def test_site_cost_is_the_count_of_parameters(rank, functions, inside):
    width = 16
    bias = inner = position = None
    if functions:
        position = Position("smooth", functions, 9)
        shape = (functions, rank) if inside else (functions, width)
        inner, bias = (torch.zeros(shape), None) if inside else (None, torch.zeros(shape))
    site = SiteCorrection("residual", torch.zeros(rank, width), torch.zeros(width, rank), bias, position, inner=inner)
    assert site_cost(width, rank, functions, inside) == sum(p.numel() for p in site.parameters())


def cost(ranks, width, functions, inside):
    return sum(2 * width * r + functions * (r if inside else width) for r in ranks.values())


def next_unit(ranks, layers, width, functions, inside):
    """The cheapest further rank, at a site there is or at a new one; None where every layer has full rank."""
    options = [2 * width + (functions if inside else 0)] if any(r < width for r in ranks.values()) else []
    if len(ranks) < layers:
        options.append(2 * width + functions * (1 if inside else width))
    return min(options) if options else None


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_even_ranks_never_spend_more_than_the_budget(inside):
    over = []
    for layers, width, functions, within, budget in CASES:
        if within != inside:
            continue
        spent = cost(even_ranks(layers, width, functions, inside, budget), width, functions, inside)
        if spent > budget:
            over.append((layers, width, functions, budget, spent))
    assert over == []


def test_even_ranks_spend_all_they_can():
    """With the bias inside the rank, less than one further rank is left over."""
    for layers, width, functions, inside, budget in CASES:
        if not inside:
            continue
        ranks = even_ranks(layers, width, functions, True, budget)
        more = next_unit(ranks, layers, width, functions, True)
        assert more is None or budget - cost(ranks, width, functions, True) < more


def test_even_ranks_are_even_and_the_last_layers_get_the_rest():
    for layers, width, functions, inside, budget in CASES:
        ranks = even_ranks(layers, width, functions, inside, budget)
        assert all(0 <= i < layers and 1 <= r <= width for i, r in ranks.items())
        assert list(ranks) == sorted(ranks)
        if not ranks:
            continue
        assert max(ranks) == layers - 1
        values = list(ranks.values())
        assert values[-1] - values[0] <= 1
        assert values == sorted(values)
        if len(ranks) < layers:
            assert not inside or set(values) == {1}
            gaps = {b - a for a, b in itertools.pairwise([-1, *ranks])}
            assert max(gaps) - min(gaps) <= 1


def test_even_ranks_written_out():
    """17 parameters a rank at width 8 with one function inside: 3 ranks over 6 layers, then 8 ranks over 3."""
    assert even_ranks(6, 8, 1, True, 3 * 17) == {1: 1, 3: 1, 5: 1}
    assert even_ranks(3, 8, 1, True, 8 * 17 + 16) == {0: 2, 1: 3, 2: 3}
    assert even_ranks(3, 8, 1, True, 16) == {}
