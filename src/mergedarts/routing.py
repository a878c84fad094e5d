"""The router of a run: fitted on every domain's prompts, and what it is worth on the held-out ones.

Knows the run, its splits and what is said of a router; the algebra is in `fit.router`, its use in `runtime`.
"""

from __future__ import annotations

from functools import cache
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

    @cache
    def means(depths: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """By domain, [N, depths, d] of the prompts fitted on, and of those held out."""
        sets: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for domain, prompts, split in zip(domains, parts, splits, strict=True):
            store = job.store(job.merged_print, prompts)
            found = prompt_means(model, prompts, template, store, depths, f"{domain.name}: prompts for the router")
            for rows, mine in zip(sets, split, strict=True):
                pairs = every([(domain.whole_places[i], found[i]) for i in mine])
                ordered = [mean for _, mean in sorted(pairs, key=lambda pair: pair[0])]
                rows.append(torch.stack(ordered) if ordered else found[:0])
            # A prompt that is nothing but the template has no mean, and cannot be fitted on.
            sets[0][-1] = sets[0][-1][sets[0][-1][:, 0, 0].isfinite()]
        return sets

    free = free_depth(model, [name for c in corrections.values() for name, _ in c.items()])
    groups = depth_groups(layers, free)
    counts = [len(x) for x in means(groups[0])[0]]
    few = [name for name, count in zip(names, counts, strict=True) if count < FOLDS]
    if few:
        return None, {"note": f"no router was fitted: it needs {FOLDS} different prompts of domain '{few[0]}'."}
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor(counts))
    found, folds = choose_depth(lambda depths: torch.cat(means(depths)[0]), labels, names, groups, free, template)
    router = found.router
    group = next(depths for depths in groups if router.depth in depths)
    held = [x[:, group.index(router.depth)] for x in means(group)[1]]
    confusion: dict[str, dict[str, int]] = {}
    for name, x in zip(names, held, strict=True):
        chosen = router.choose(x) if len(x) else []
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
