"""Splits a domain's budget between low-rank weight updates, which need no data, and corrections in depth.

Knows shares of a budget and how to compare them on sequences kept from the fit; the two fits live in `linear` and
`plan`. Truncated SVD carries what a map of the residual stream cannot, such as changed attention patterns; the fitted
corrections carry what is left of it, and all of it where the weight difference is not low-rank (a full fine-tune).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..correction import Correction, SiteCorrection
from ..heldout import HeldOut
from ..runtime import attach
from .linear import Factors, ordered, spend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Shares of the budget for weight updates that are tried where the settings leave it open.
SHARES = (0.0, 0.25, 0.5, 0.75)
#: How much lower the KL of held-back sequences must be for weight updates, which hook every linear layer they touch.
LEAST_ADVANTAGE = 0.05
#: Sequences below which no share is tried: too few to compare on.
LEAST_SEQUENCES = 6

#: Fits corrections in depth on some sequences under a budget, on the model as it is.
DepthFit = Callable[[list[int], int], Correction]


def updates(factors: dict[str, Factors], budget: int) -> Correction:
    """Weight updates by truncated SVD under a budget."""
    ranks = spend(factors, budget, narrow=True)
    return Correction({name: factors[name].site(rank) for name, rank in ordered(factors, ranks)})


def fit_share(
    model: PreTrainedModel, factors: dict[str, Factors], share: float, budget: int, fitted: list[int], depth: DepthFit
) -> Correction:
    """Weight updates for a share of the budget, and corrections in depth on top of them for the rest."""
    low = updates(factors, int(share * budget)) if share else Correction()
    if not low:
        return depth(fitted, budget)
    with attach(model, {"updates": low}, "updates"):
        rest = depth(fitted, budget - low.parameter_count)
    sites = dict(low.items())
    for name, site in rest.items():
        sites[name] = _joined(sites[name], site) if name in sites else site
    return Correction(sites)


def _joined(a: SiteCorrection, b: SiteCorrection) -> SiteCorrection:
    """Two updates of one weight as one, of the sum of their ranks."""
    downs = [site.down.detach() for site in (a, b) if site.down is not None]
    ups = [site.up.detach() for site in (a, b) if site.up is not None]
    return SiteCorrection("linear", torch.cat(downs), torch.cat(ups, 1))


def choose_share(
    model: PreTrainedModel,
    factors: dict[str, Factors],
    budget: int,
    fitted: list[int],
    depth: DepthFit,
    held_out: Callable[[list[int]], HeldOut],
) -> tuple[float, dict[str, float]]:
    """The share of least KL on every third of the fitted sequences, when fitted on the others; and each share's KL.

    Args:
        held_out: measures on some sequences.
    """
    if len(fitted) < LEAST_SEQUENCES:
        return 0.0, {}
    kept, rest = fitted[::3], [i for i in fitted if i not in set(fitted[::3])]
    check = held_out(kept)
    if len(check) == 0:
        return 0.0, {}
    kl: dict[float, float] = {}
    for share in SHARES:
        correction = fit_share(model, factors, share, budget, rest, depth)
        with torch.inference_mode():
            kl[share] = float(check.corrected(correction).kl.mean())
    best = min(kl, key=lambda share: kl[share])
    if kl[best] > (1 - LEAST_ADVANTAGE) * kl[0.0]:
        best = 0.0
    return best, {f"{share:g}": value for share, value in kl.items()}
