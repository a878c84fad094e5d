"""Token weights and the L1 losses on hidden states.

Knows formulas; reads no files and runs no model.
"""

from __future__ import annotations

import torch

from ..distributed import total


def token_weights(
    entropy: torch.Tensor | None, predicts: torch.Tensor, loss: str, gamma: float, prompt_weight: float
) -> torch.Tensor:
    """Weight of each token in a fit, with mean 1.

    Args:
        entropy: [N] predictive entropy of the expert in nats; `l1` needs none.
        predicts: [N] whether the next token is a response's; where none is (prompts alone), all count as such.
        loss: `l1` weighs tokens alike; `ewl1` by `entropy ** gamma` (gamma 1: DARTS, arXiv 2608.28547).
        prompt_weight: factor on the tokens that do not predict a response.

    Returns:
        [N] float64, of mean 1 over all processes; uniform over the counted tokens where all entropies are zero.
    """
    weights = torch.ones(len(predicts), dtype=torch.float64)
    if total(float(predicts.sum())) > 0:
        weights = torch.where(predicts, weights, torch.full_like(weights, prompt_weight))
    if loss == "ewl1":
        assert entropy is not None
        tempered = entropy.double().clamp(min=0) ** gamma
        if total(float((weights * tempered).sum())) > 0:
            weights = weights * tempered
    return weights / (total(float(weights.sum())) / total(len(weights)))


def weighted_l1(corrected: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_t w_t |h'_t - h*_t|_1 / (d sum_t w_t)` of states [N, d] and weights [N].

    EWL1 with entropies as weights, the L1 loss of Representation Surgery with ones.
    """
    per_token = (corrected - target).abs().sum(-1)
    return (weights * per_token).sum() / (corrected.shape[-1] * weights.sum())
