"""The paper's fit: gradient descent by Adam on the final site, on cached features.

Knows the update rule of Representation Surgery and DARTS (method.md); never runs a language model.
"""

from __future__ import annotations

import math

import torch

from ..correction import Position, SiteCorrection
from ..progress import bar

CHUNK_TOKENS = 1024


def fit_adam(
    states: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    *,
    rank: int,
    position: Position | None,
    steps: int,
    lr: float,
    seed: int,
    title: str = "fit",
) -> SiteCorrection:
    """Fit `h' = h - up relu(down h) - b[p]` to the expert's final states by full-batch Adam (0.9, 0.999).

    `down` begins Kaiming-uniform (uniform in +-1/sqrt(d), as a linear layer's), `up` and b at zero; no weight decay.

    Args:
        states: [N, d] the merged model's final states, any float dtype.
        target: [N, d] the expert's.
        weights: [N] as `token_weights` returns them.
        positions: [N] positions from the first token of each sequence.
        rank: of the low-rank part.
        position: a table, or None for standard surgery.

    Returns:
        The correction in float32, after `steps` updates.
    """
    width = states.shape[1]
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(width)
    down = torch.empty(rank, width).uniform_(-bound, bound, generator=generator)
    up = torch.zeros(width, rank)
    bias = None if position is None else torch.zeros(position.size, width)
    site = SiteCorrection("final", down, up, bias, position, relu=True).to(states.device)
    optimizer = torch.optim.Adam(site.parameters(), lr=lr)
    counted = weights > 0
    chunks = list(
        zip(
            states[counted].float().split(CHUNK_TOKENS),
            target[counted].float().split(CHUNK_TOKENS),
            (weights[counted] / (width * weights.sum())).float().split(CHUNK_TOKENS),
            positions[counted].split(CHUNK_TOKENS),
            strict=True,
        )
    )
    with bar(title, steps, "steps") as advance:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            for h, goal, w, p in chunks:
                error = site(h, h, p) - goal
                # The gradient of w |error|_1 is w sign(error): no need to keep |error| for the backward pass.
                error.backward(error.detach().sign_().mul_(w[:, None]))
            optimizer.step()
            advance(1)
    result: SiteCorrection = site.requires_grad_(False).cpu()
    return result
