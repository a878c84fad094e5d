"""The router of a run: fitted on every domain's prompts, and what it is worth on the held-out ones.

Knows the run, its splits and what is said of a router; the algebra is in `fit.router`, its use in `runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .correction import Correction
from .distributed import every
from .errors import UserError
from .fit.router import FOLDS, Template, choose_depth, depth_groups, prompt_means, prompt_part
from .heldout import HeldOut
from .job import DomainJob, Job
from .models import decoder_layers
from .prompts import PromptSet
from .router import UNSURE, Router
from .runtime import free_depth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Split = tuple[list[int], list[int]]


def fit_routing(
    job: Job, domains: list[DomainJob], model: PreTrainedModel, corrections: dict[str, Correction], splits: list[Split]
) -> tuple[Router | None, dict[str, Any]]:
    """Fit the router and measure it.

    Args:
        model: the merged model, loaded.
        corrections: those that ship, by domain.
        splits: by domain, the sequences to fit on and those held out.

    Returns:
        The router and what `darts_config.json` says of it; no router and a note where there is too little to fit on.
    """
    try:
        layers = len(decoder_layers(model))
    except UserError as error:
        return None, {"note": f"no router was fitted: {error}"}
    bare = [domain.name for domain in domains if not domain.prompts.sequences]
    if bare:
        return None, {"note": f"no router was fitted: domain '{bare[0]}' has no prompts."}
    parts = [PromptSet(tuple(prompt_part(s) for s in domain.prompts.sequences)) for domain in domains]
    template = Template.of(every([s.ids for part in parts for s in part.sequences]))
    names = [domain.name for domain in domains]

    def means(depths: list[int], part: int) -> list[torch.Tensor]:
        """By domain, [N, depths, d] of the prompts fitted on (part 0) or held out (1)."""
        out = []
        for domain, prompts, split in zip(domains, parts, splits, strict=True):
            store = job.store(job.merged_print, prompts)
            title = f"{domain.name}: prompts for the router"
            found = prompt_means(model, prompts, template, store, depths, title)
            pairs = every([(domain.whole_places[i], found[i]) for i in split[part]])
            ordered = [mean for _, mean in sorted(pairs, key=lambda pair: pair[0])]
            rows = torch.stack(ordered) if ordered else found[:0]
            # A prompt that is nothing but the template has no mean, and cannot be fitted on.
            out.append(rows if part else rows[rows[:, 0, 0].isfinite()])
        return out

    free = free_depth(model, [name for c in corrections.values() for name, _ in c.items()])
    near = depth_groups(layers, free)[0]
    few = [name for name, x in zip(names, means(near, 0), strict=True) if len(x) < FOLDS]
    if few:
        return None, {"note": f"no router was fitted: it needs {FOLDS} different prompts of domain '{few[0]}'."}

    def labelled(depths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = means(depths, 0)
        return torch.cat(rows), torch.arange(len(names)).repeat_interleave(torch.tensor([len(x) for x in rows]))

    found, folds = choose_depth(labelled, names, layers, free, template)
    router = found.router
    group = next(depths for depths in depth_groups(layers, free) if router.depth in depths)
    confusion: dict[str, dict[str, int]] = {}
    held = means(group, 1)
    for name, x in zip(names, held, strict=True):
        chosen = router.choose(x[:, group.index(router.depth)]) if len(x) else []
        confusion[name] = {(other or UNSURE): chosen.count(other) for other in [*names, None]}
    right, count = sum(confusion[n][n] for n in names), sum(map(len, held))
    return router, {
        "depth": router.depth,
        "layers": layers,
        "second_pass": router.depth > free,
        "parameters": sum(b.numel() for b in router.buffers()),
        "temperature": float(router.get_buffer("levels")[1]),
        "fold_accuracy": {str(depth): round(accuracy, 5) for depth, accuracy in folds.items()},
        "held_out": {"sequences": count, "accuracy": right / count if count else None, "chosen": confusion},
    }


def wrong_routing(
    checks: dict[str, HeldOut], corrections: dict[str, Correction], tables: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Held-out KL to the expert of each domain under every domain's correction, and under none (`unsure`).

    Args:
        checks: the held-out sequences of each domain.
        corrections: those that ship; one without sites is none.
        tables: by domain, what was measured under none and under its own.
    """
    out: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, check in checks.items():
            bare = float(tables[name]["merged"]["kl"])
            others = [other for other, correction in corrections.items() if correction and other != name]
            measured = check.measure_all(*((check.states(corrections[other]), None) for other in others))
            out[name] = dict.fromkeys(corrections, bare)  # a correction without sites is none
            if corrections[name]:
                out[name][name] = float(tables[name]["repaired"]["kl"])
            out[name] |= {o: float(m.means()["kl"] or 0.0) for o, m in zip(others, measured, strict=True)}
            out[name][UNSURE] = bare
    return out
