"""The final site fitted to what it is for: the KL between the expert's and the corrected predictions.

Knows the expert's likeliest tokens and L-BFGS; starts from a closed-form solution. With p the expert's probabilities
and E_p[W] the expected row of the output embedding, KL = log sum_v exp(w_v h') - h' E_p[W] + const: convex in h', and
so in a linear correction. The sum runs over the expert's top-k tokens; what the others add is kept as at the start.
"""

from __future__ import annotations

import torch

from ..correction import SiteCorrection
from ..errors import UserError
from ..features import Readout
from ..progress import bar

STEPS = 30
CHUNK = 512


def fit_kl(
    site: SiteCorrection,
    states: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    readout: Readout,
    expert_head: tuple[torch.Tensor, torch.Tensor | None] | None,
    top_k: int,
    title: str,
) -> tuple[SiteCorrection, dict[str, float]]:
    """Lower the weighted KL on the expert's top-k tokens by L-BFGS over up and the position functions.

    Args:
        site: where to start; its `down` stays, so that the problem is convex.
        states, target: [n, d] of merged model and expert; weights, positions: [n].
        top_k: tokens of the expert's vocabulary; all of it gives the full KL.

    Returns:
        The correction, and the objective before and after (nats a token, up to the entropy of the expert).
    """
    weight, bias = readout.head
    if not readout.is_plain(states[:4]):
        raise UserError("'fit.objective: kl' needs logits that are the output embedding's own; this model bends them.")
    k = min(top_k, weight.shape[0])
    start = site(states.float(), states.float(), positions).detach()
    ids, expected, rest = [], [], []
    for h, goal in zip(start.split(CHUNK), target.split(CHUNK), strict=True):
        log_p = readout(goal, expert_head)[:, : weight.shape[0]].log_softmax(-1)
        top = log_p.topk(k, -1).indices
        z = readout(h.to(weight.dtype))
        rest.append(z.scatter(-1, top, float("-inf")).logsumexp(-1) if k < z.shape[-1] else None)
        ids.append(top)
        p = log_p.exp()
        expected.append((p @ weight[: p.shape[1]].float(), None if bias is None else p @ bias[: p.shape[1]].float()))
    share = (weights / weights.sum()).float()
    parameters = [p for p in (site.up, site.position_bias) if p is not None]
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.LBFGS(parameters, max_iter=STEPS, line_search_fn="strong_wolfe", history_size=20)
    values: list[float] = []
    with bar(title + " to KL", STEPS * 1.25, "evaluations") as advance, torch.enable_grad():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for i, (h, p, w) in enumerate(
                zip(states.split(CHUNK), positions.split(CHUNK), share.split(CHUNK), strict=True)
            ):
                fixed = site(h.float(), h.float(), p)
                rows = weight[ids[i]].float()
                z = torch.einsum("nkd,nd->nk", rows, fixed)
                mean, offset = expected[i]
                linear = (fixed * mean).sum(-1)
                if bias is not None and offset is not None:
                    z, linear = z + bias[ids[i]].float(), linear + offset
                others = rest[i]
                if others is not None:
                    z = torch.cat([z, others[:, None]], 1)
                loss = (w * (z.logsumexp(-1) - linear)).sum()
                loss.backward()
                total = total + loss.detach()
            values.append(float(total))
            advance(1)
            return total

        optimizer.step(closure)
    site.requires_grad_(False)
    return site, {"before": values[0], "after": values[-1], "top_k": float(k)}
