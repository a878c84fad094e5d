"""Turns a run's settings into closed-form fits: sites, ranks, position forms and ridge, chosen where they are open.

Knows the settings and the stores; the algebra, the sweep and the metric live in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config import EverySite
from ..correction import Correction, Position
from ..errors import UserError
from ..features import Readout
from ..job import DomainJob, Job
from .budget import even_ranks
from .fisher import Metric, load_metric
from .losses import token_weights
from .sweep import SweepSettings, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 0.01


@dataclass(frozen=True)
class FitResult:
    """A correction, what was chosen on the way, and what a user should know of it."""

    correction: Correction
    choices: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def wants_depth(job: Job) -> bool:
    """Whether a run corrects the residual stream after layers."""
    return job.run.fit.method == "closed-form" and job.run.correction.sites != "final"


def wants_fisher(job: Job) -> bool:
    """Whether a run needs the Fisher metric of the layers."""
    return wants_depth(job) and job.run.fit.metric in ("auto", "fisher")


def layers_of(job: Job, count: int) -> list[int]:
    """The decoder layers that a run's `sites` name, of `count`."""
    sites = job.run.correction.sites
    if sites == "final":
        return []
    if isinstance(sites, EverySite):
        return list(range(sites.every - 1, count, sites.every))
    if isinstance(sites, list):
        bad = [i for i in sites if not 0 <= i < count]
        if bad:
            raise UserError(f"'correction.sites' names layer {bad[0]}, but the model has layers 0 to {count - 1}.")
        return sorted(set(sites))
    return list(range(count))


def fisher_name(fitted: list[int], layer: int) -> str:
    """The name in the store of a layer's metric, estimated on some of the sequences."""
    from ..files import digest_text

    return f"fisher-{digest_text(repr(fitted))[:12]}-{layer}"


def closed_form(
    job: Job,
    domain: DomainJob,
    model: PreTrainedModel,
    readout: Readout,
    fitted: list[int],
    held: list[int],
    budget: int,
) -> FitResult:
    """Fit one domain by closed form, within `budget` parameters where ranks are left open."""
    run = job.run
    prompts = domain.prompts.subset(fitted)
    rows = torch.isin(torch.from_numpy(domain.prompts.sequence_index()), torch.tensor(fitted))
    expert = job.store(domain.expert_print, domain.prompts)
    layers = layers_of(job, model.config.get_text_config().num_hidden_layers)
    width = model.get_output_embeddings().weight.shape[1]
    position, inside = Position("table", 1), True
    if isinstance(run.correction.rank, int):
        ranks = dict.fromkeys(layers, run.correction.rank)
    else:
        even = even_ranks(len(layers), width, position.size, inside, budget)
        ranks = {layers[i]: rank for i, rank in even.items()}
    entropy = expert.load("entropy")["entropy"][rows]
    predicts = torch.from_numpy(domain.prompts.predicts())[rows]
    metrics: dict[int, Metric] = {}

    def metric(layer: int) -> Metric | None:
        if not wants_fisher(job):
            return None
        if layer not in metrics:
            metrics.clear()
            metrics[layer] = load_metric(expert, fisher_name(fitted, layer))
        return metrics[layer]

    def weights(layer: int) -> torch.Tensor:
        found = metric(layer)
        prompt = run.fit.prompt_weight
        if prompt is None:
            prompt = 0.0 if found is None or found.response <= 0 else min(1.0, found.prompt / found.response)
        loss = "l1" if run.fit.loss in ("auto", "l1") else "ewl1"
        return token_weights(entropy, predicts, loss, 0.5 if run.fit.gamma is None else run.fit.gamma, prompt)

    ridge = RIDGE if run.fit.ridge is None else run.fit.ridge
    result = sweep(
        model, prompts, lambda layer: expert.load(f"layer-{layer}")["hidden"][rows], weights, metric,
        SweepSettings(ranks, position, inside, ridge), f"{domain.name}: fit",
    )  # fmt: skip
    choices: dict[str, Any] = {"ranks": ranks, "ridge": ridge}
    notes = []
    if result.helped:
        notes.append(f"the inputs were too alike to solve at {len(result.helped)} site(s); the ridge was raised there.")
    return FitResult(Correction(dict(result.correction.items())), choices, notes)
