"""Fits a domain's correction by the method its run file names.

Knows which features each method needs and hands them over; the methods live in the modules beside this one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ..correction import Correction, Position
from ..distributed import gather, size
from ..errors import UserError
from ..features import Readout
from ..job import DomainJob, Job
from ..models import load_config, parameter_count
from .adam import fit_adam
from .fisher import FisherPass
from .linear import WEIGHTS, keep_weights
from .losses import token_weights
from .plan import (
    FitResult,
    closed_form,
    domain_budget,
    fisher_name,
    layers_of,
    measured_on,
    wants_depth,
    wants_entropy,
    wants_fisher,
    wants_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layers_needed(job: Job) -> list[int]:
    """Decoder layers whose states of the expert a fit reads; a metric goes back through those of every later layer."""
    count = load_config(job.merged).num_hidden_layers
    layers = layers_of(job, count) if wants_depth(job) else []
    return list(range(min(layers), count)) if layers and wants_fisher(job) else layers


def check_processes(job: Job) -> None:
    """Raise `UserError` where a fit needs all tokens in one process, and there are more."""
    if size() > 1 and (not wants_depth(job) or wants_weights(job)):
        raise UserError(
            "Several processes fit corrections in depth only; run this fit in one, or set 'correction.svd_share: 0' "
            "where the budget would pay for weight updates."
        )


def needs_final(job: Job) -> bool:
    """Whether a fit reads the merged model's final states."""
    return not wants_depth(job) and not wants_weights(job)


def expert_extras(job: Job, domain: DomainJob, fitted: list[int], expert: PreTrainedModel | None) -> None:
    """Make sure the store holds what a fit reads of the expert beside its states: metrics of layers, linear weights.

    Loads the expert where something is missing and it is not at hand.
    """
    if wants_weights(job):
        with job.weights_store(domain).making(WEIGHTS) as missing:
            if missing:
                expert = expert or job.load(domain.expert)
                keep_weights(expert, job.weights_store(domain))
    if not wants_fisher(job):
        return
    store, seed = job.store(domain.expert_print, domain.prompts), job.run.fit.seed
    chosen = measured_on(job, domain, fitted)
    layers = layers_of(job, load_config(job.merged).num_hidden_layers)
    names = {i: fisher_name(seed, chosen, i) for i in layers}
    with store.making(*names.values()) as missing:
        # Summed over all processes: what one of them lacks, all make.
        lacking = sorted(set().union(*gather({i for i, name in names.items() if name in missing})))
        if lacking:
            name, title = partial(fisher_name, seed, chosen), f"{domain.name}: expert's metric"
            passing = FisherPass(domain.prompts, chosen, lacking, store, name, seed, title)
            passing.run(expert or job.load(domain.expert))


def fit_domain(job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, fitted: list[int]) -> FitResult:
    """Fit one domain's correction on some of its sequences; the features must be in the store."""
    if job.run.fit.method == "adam":
        return _adam(job, domain, fitted)
    return closed_form(job, domain, model, readout, fitted, domain_budget(job, parameter_count(model)))


def _adam(job: Job, domain: DomainJob, fitted: list[int]) -> FitResult:
    correction, fit = job.run.correction, job.run.fit
    prompts = domain.prompts
    mine = torch.isin(torch.from_numpy(prompts.sequence_index()), torch.tensor(fitted))
    expert = job.store(domain.expert_print, prompts)
    weights = token_weights(
        expert.load("entropy")["entropy"][mine] if wants_entropy(job) else None,
        torch.from_numpy(prompts.predicts())[mine],
        "ewl1" if wants_entropy(job) else "l1",
        1.0 if fit.gamma is None else fit.gamma,
        1.0 if fit.prompt_weight is None else fit.prompt_weight,
    )
    form = correction.position_form
    position = None
    if form is not None and form.form != "none":
        position = Position("table", form.size or 1)
    site = fit_adam(
        job.store(job.merged_print, prompts).load("final")["hidden"][mine].to(job.device),
        expert.load("final")["hidden"][mine].to(job.device),
        weights.to(job.device),
        torch.from_numpy(prompts.positions())[mine].to(job.device),
        rank=correction.rank if isinstance(correction.rank, int) else 16,
        position=position,
        steps=fit.steps,
        lr=fit.lr,
        seed=fit.seed,
        title=f"{domain.name}: fit",
    )
    return FitResult(Correction({"final": site}))
