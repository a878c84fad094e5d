"""Low-rank updates of the linear layers by truncated SVD of expert minus merged: a LoRA for each domain, without data.

Knows weight differences and their truncation; runs no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..correction import Correction, SiteCorrection
from ..models import decoder_layers
from ..progress import bar
from ..store import FeatureStore
from ..streaming import in_memory
from .eigen import leading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "linear-weights"
MAX_RANK = 64


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers inside the decoder layers, by module name, in the order of the model."""
    from transformers.pytorch_utils import Conv1D

    return {
        f"{prefix}.{name}": module
        for prefix, layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def weight_of(module: nn.Module) -> torch.Tensor:
    """Weight [out, in] of a linear layer; GPT-2 keeps its own the other way round."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().T


def keep_weights(expert: PreTrainedModel, store: FeatureStore) -> None:
    """Put an expert's linear weights into the store, a file for each decoder layer and then a mark that all are there.

    So the expert need not be in memory beside the merged model.
    """
    modules = linear_layers(expert)
    for prefix, layer in decoder_layers(expert):
        with in_memory(layer):
            mine = {name: weight_of(m).contiguous() for name, m in modules.items() if name.startswith(prefix + ".")}
            store.save(f"{WEIGHTS}-{prefix}", mine)
    store.save(WEIGHTS, {"layers": torch.tensor(len(decoder_layers(expert)))})


@dataclass(frozen=True)
class Factors:
    """Leading rank-1 terms of an update: up [out, n], down [n, in], and what each buys."""

    up: torch.Tensor
    down: torch.Tensor
    gains: list[float]

    @property
    def cost(self) -> int:
        """Parameters of one rank."""
        return self.up.shape[0] + self.down.shape[1]

    def site(self, rank: int) -> SiteCorrection:
        return SiteCorrection("linear", self.down[:rank].contiguous(), -self.up[:, :rank].contiguous())


def truncated(difference: torch.Tensor, count: int = MAX_RANK) -> Factors:
    """Leading terms of a weight difference [out, in], expert minus merged, at most `count` (Eckart & Young 1936)."""
    delta = difference.double()
    tall = delta.shape[0] > delta.shape[1]
    gains, lead = leading((delta if tall else delta.T,), min(count, *delta.shape))
    up, down = (delta @ lead, lead.T) if tall else (lead, lead.T @ delta)
    gains = torch.where(gains > 1e-12 * gains.max(), gains, 0.0) if len(gains) else gains  # the rest is rounding
    return Factors(up.float(), down.float(), gains.tolist())


def spend(factors: dict[str, Factors], budget: int, narrow: bool = False) -> dict[str, int]:
    """Ranks by layer under a budget of parameters: as far as it goes the same rank everywhere, then by gain.

    Args:
        narrow: spend what is left on the narrowest layers first, which are those of attention. On the testbed that is
            better where corrections in depth follow, and by the largest singular values a parameter where none do
            (docs/fit.md); spending all by singular values, which know nothing of the activations, is worse than both.
    """
    base = budget // max(1, sum(f.cost for f in factors.values()))
    ranks = {name: min(base, sum(g > 0 for g in f.gains)) for name, f in factors.items() if base and f.gains[0] > 0}
    budget -= sum(factors[name].cost * rank for name, rank in ranks.items())

    def order(name: str, rank: int) -> tuple[float, ...]:
        gain, cost = factors[name].gains[rank], factors[name].cost
        return (rank, cost, -gain) if narrow else (-gain / cost,)

    heap = [(order(name, base), name) for name, f in factors.items() if base < len(f.gains) and f.gains[base] > 0]
    heapq.heapify(heap)
    while heap:
        name = heapq.heappop(heap)[-1]
        factor, rank = factors[name], ranks.get(name, 0) + 1
        if factor.cost > budget:
            continue
        budget -= factor.cost
        ranks[name] = rank
        if rank < len(factor.gains) and factor.gains[rank] > 0:
            heapq.heappush(heap, (order(name, rank), name))
    return ranks


def differences(model: PreTrainedModel, expert: FeatureStore) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight difference, expert minus merged, of each linear layer; one at a time in memory."""
    modules = linear_layers(model)
    for prefix, _ in decoder_layers(model):
        with expert.opened(f"{WEIGHTS}-{prefix}") as stored:
            for name in (name for name in modules if name.startswith(prefix + ".")):
                with in_memory(modules[name]):
                    yield name, stored.get_tensor(name).float() - weight_of(modules[name]).float().cpu()


def rank_one_cost(model: PreTrainedModel) -> int:
    """Parameters of a rank-1 update of every linear layer."""
    return sum(sum(weight_of(module).shape) for module in linear_layers(model).values())


def factors_of(model: PreTrainedModel, expert: FeatureStore, budget: int, title: str) -> dict[str, Factors]:
    """Leading terms of each layer's weight difference, four times as many as a budget pays for on average."""
    count = min(MAX_RANK, 4 * (1 + budget // rank_one_cost(model)))
    factors: dict[str, Factors] = {}
    with bar(title, len(linear_layers(model)), "layers") as advance:
        for name, difference in differences(model, expert):
            factors[name] = truncated(difference, count=count)
            advance(1)
    return factors


def fit_svd(model: PreTrainedModel, expert: FeatureStore, budget: int, rank: int | None, title: str) -> Correction:
    """The data-free rival: truncated SVD of each weight difference, `rank` everywhere or spent under the budget."""
    if rank:
        budget = rank * rank_one_cost(model)
    factors = factors_of(model, expert, budget, title)
    ranks = dict.fromkeys(factors, rank) if rank else spend(factors, budget)
    return Correction({name: factors[name].site(r) for name, r in ordered(factors, ranks)})


def ordered(factors: dict[str, Factors], ranks: dict[str, int]) -> list[tuple[str, int]]:
    """Names and ranks above 0 in the order of the model."""
    return [(name, ranks[name]) for name in factors if ranks.get(name)]
