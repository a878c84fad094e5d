"""Low-rank updates of the linear layers: a LoRA for each domain, by truncated SVD or fitted from activations.

Knows weight differences and the algebra of their truncation; the running of single layers is in `layerwise`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from ..correction import Correction, SiteCorrection
from ..features import hooked
from ..layerwise import LayerRunner
from ..models import decoder_layers
from ..progress import bar
from ..prompts import PromptSet
from ..runtime import attach
from ..store import FeatureStore

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
    """Put an expert's linear weights into the store, so that it need not be in memory beside the merged model."""
    store.save(WEIGHTS, {name: weight_of(module).contiguous() for name, module in linear_layers(expert).items()})


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


def truncated(difference: torch.Tensor, gram: torch.Tensor | None = None) -> Factors:
    """Leading terms of the best low-rank approximation of a weight difference [out, in].

    Args:
        difference: expert minus merged.
        gram: [in, in] positive definite metric of the inputs (their weighted Gram matrix plus the prior's strength on
            the diagonal); None for the plain truncated SVD (Eckart & Young 1936).
    """
    delta = difference.double()
    root = torch.linalg.cholesky(gram) if gram is not None else None
    seen = delta if root is None else delta @ root
    small = seen @ seen.T if seen.shape[0] <= seen.shape[1] else seen.T @ seen
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    count = min(MAX_RANK, len(values))
    gains = values.flip(0)[:count].clamp(min=0)
    lead = vectors.flip(1)[:, :count]
    if seen.shape[0] <= seen.shape[1]:
        up, down = lead, lead.T @ delta
    else:
        # The right vectors in the inputs' metric; back through the root for the map itself.
        up = seen @ lead
        down = lead.T if root is None else torch.linalg.solve_triangular(root.T, lead, upper=True).T
    return Factors(up.float(), down.float(), gains.tolist())


def spend(factors: dict[str, Factors], budget: int, even: bool = False) -> dict[str, int]:
    """Ranks by layer under a budget of parameters: the dearest gain a parameter first.

    With `even`, first the same rank everywhere, as far as the budget goes. Gains of different layers are not of one
    unit where they know nothing of the activations (on the testbed, spending by them alone is worse than evenly).
    """
    base = budget // sum(f.cost for f in factors.values()) if even else 0
    ranks = {name: min(base, len(f.gains)) for name, f in factors.items() if base}
    budget -= sum(factors[name].cost * rank for name, rank in ranks.items())
    heap = [(-f.gains[base] / f.cost, name) for name, f in factors.items() if base < len(f.gains) and f.gains[base] > 0]
    heapq.heapify(heap)
    while heap:
        _, name = heapq.heappop(heap)
        factor = factors[name]
        if factor.cost > budget:
            continue
        budget -= factor.cost
        rank = ranks[name] = ranks.get(name, 0) + 1
        if rank < len(factor.gains) and factor.gains[rank] > 0:
            heapq.heappush(heap, (-factor.gains[rank] / factor.cost, name))
    return ranks


def differences(model: PreTrainedModel, expert: FeatureStore) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight difference, expert minus merged, of each linear layer; one at a time in memory."""
    with safe_open(expert.path / f"{WEIGHTS}.safetensors", "pt") as stored:
        for name, module in linear_layers(model).items():
            yield name, stored.get_tensor(name).float() - weight_of(module).float().cpu()


def fit_svd(model: PreTrainedModel, expert: FeatureStore, budget: int, rank: int | None, title: str) -> Correction:
    """The data-free rival: truncated SVD of each weight difference, `rank` everywhere or spent under the budget."""
    factors: dict[str, Factors] = {}
    with bar(title, len(linear_layers(model)), "layers") as advance:
        for name, difference in differences(model, expert):
            factors[name] = truncated(difference)
            advance(1)
    ranks = dict.fromkeys(factors, rank) if rank else spend(factors, budget, even=True)
    return Correction({name: factors[name].site(min(r, MAX_RANK)) for name, r in _ordered(factors, ranks)})


def fit_linear(
    model: PreTrainedModel,
    prompts: PromptSet,
    expert: FeatureStore,
    weights: torch.Tensor,
    budget: int,
    rank: int | None,
    prior: float,
    title: str,
) -> Correction:
    """Updates fitted from the activations, layer by layer, each on inputs that its predecessors have repaired.

    For each linear layer, minimise over L of rank r `sum_t w_t |(W* - W - L) x_t|^2 + prior s |W* - W - L|^2` with s
    the mean power of an input. The budget is spread evenly over decoder layers and, inside one, goes where it lowers
    the error most relative to the layer's output.

    Args:
        weights: [tokens] of the tokens.
    """
    blocks = decoder_layers(model)
    modules = linear_layers(model)
    deltas = dict(differences(model, expert))
    runner = LayerRunner(model, prompts)
    sites: dict[str, SiteCorrection] = {}
    with bar(title, 2 * prompts.tokens * len(blocks)) as advance:
        for block, _ in blocks:
            mine = {name: module for name, module in modules.items() if name.startswith(block + ".")}
            grams: dict[str, torch.Tensor] = {}
            outputs: dict[str, float] = {}
            hooks = [
                module.register_forward_hook(_gather(name, runner, weights, grams)) for name, module in mine.items()
            ]
            with hooked(*hooks):
                for done in runner.peek():
                    advance(done)
            factors: dict[str, Factors] = {}
            for name, gram in grams.items():
                base = weight_of(mine[name]).double().cpu()
                outputs[name] = max(float(((base @ gram) * base).sum()), 1e-300)
                strength = prior * gram.diagonal().mean() + 1e-12
                found = truncated(deltas.pop(name), gram + strength * torch.eye(len(gram), dtype=gram.dtype))
                factors[name] = Factors(found.up, found.down, [g / outputs[name] for g in found.gains])
            ranks = dict.fromkeys(factors, rank) if rank else spend(factors, budget // len(blocks))
            fitted = {name: factors[name].site(min(r, MAX_RANK)) for name, r in _ordered(factors, ranks)}
            sites |= fitted
            with attach(model, {"fit": Correction(fitted)}, "fit"):
                for done in runner.step():
                    advance(done)
    return Correction(sites)


def _gather(name: str, runner: LayerRunner, weights: torch.Tensor, grams: dict[str, torch.Tensor]) -> Any:
    """A hook that adds the weighted Gram matrix of a linear layer's inputs over the real tokens of a batch."""

    def hook(_module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        x = inputs[0]
        x = x.reshape(-1, x.shape[-1])
        where, flat = runner.current
        if len(x) != where.numel():
            return  # a layer that sees only some tokens (an expert of a mixture) keeps its weights
        x = x[where.reshape(-1)].float()
        w = weights[flat].to(x)
        gram = ((x * w[:, None]).T @ x).double().cpu()
        grams[name] = grams[name] + gram if name in grams else gram

    return hook


def _ordered(factors: dict[str, Factors], ranks: dict[str, int]) -> list[tuple[str, int]]:
    return [(name, ranks[name]) for name in factors if ranks.get(name)]
