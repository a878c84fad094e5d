"""Low-rank updates of the linear layers: a LoRA for each domain, by truncated SVD or fitted from activations.

Knows weight differences and the algebra of their truncation; the running of single layers is in `layerwise`.
"""

from __future__ import annotations

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


def truncated(difference: torch.Tensor, gram: torch.Tensor | None = None, count: int = MAX_RANK) -> Factors:
    """Leading terms of the best low-rank approximation of a weight difference [out, in].

    Args:
        difference: expert minus merged.
        gram: [in, in] positive definite metric of the inputs (their weighted Gram matrix plus the prior's strength on
            the diagonal); None for the plain truncated SVD (Eckart & Young 1936).
        count: terms at most.
    """
    delta = difference.double()
    root = torch.linalg.cholesky(gram) if gram is not None else None
    seen = delta if root is None else delta @ root
    gains, lead = leading((seen.T if seen.shape[0] <= seen.shape[1] else seen,), min(count, *seen.shape))
    if seen.shape[0] <= seen.shape[1]:
        up, down = lead, lead.T @ delta
    else:
        # The right vectors in the inputs' metric; back through the root for the map itself.
        up = seen @ lead
        down = lead.T if root is None else torch.linalg.solve_triangular(root.T, lead, upper=True).T
    return Factors(up.float(), down.float(), gains.tolist())


def spend(factors: dict[str, Factors], budget: int) -> dict[str, int]:
    """Ranks by layer under a budget of parameters: one rank everywhere before a second, the narrowest layers first.

    Of layers equally narrow those of larger gain come first. Gains of layers of different kinds are not of one unit, as
    they know nothing of what follows; spending by them alone is worse on the testbed (docs/fit.md).
    """
    ranks: dict[str, int] = {}
    for rank in range(MAX_RANK):
        able = [name for name, f in factors.items() if rank < len(f.gains) and f.gains[rank] > 0]
        for name in sorted(able, key=lambda name: (factors[name].cost, -factors[name].gains[rank])):
            if factors[name].cost <= budget and ranks.get(name, 0) == rank:
                ranks[name] = rank + 1
                budget -= factors[name].cost
    return ranks


def differences(model: PreTrainedModel, expert: FeatureStore) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight difference, expert minus merged, of each linear layer; one at a time in memory."""
    with safe_open(expert.path / f"{WEIGHTS}.safetensors", "pt") as stored:
        for name, module in linear_layers(model).items():
            yield name, stored.get_tensor(name).float() - weight_of(module).float().cpu()


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
            fitted = {name: factors[name].site(r) for name, r in ordered(factors, ranks)}
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


def ordered(factors: dict[str, Factors], ranks: dict[str, int]) -> list[tuple[str, int]]:
    """Names and ranks above 0 in the order of the model."""
    return [(name, ranks[name]) for name in factors if ranks.get(name)]
