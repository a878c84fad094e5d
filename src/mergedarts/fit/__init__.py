"""Fits a domain's correction by the method its run file names.

Knows which features each method needs and hands them over; the methods live in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..correction import Correction, Position
from ..features import Readout
from ..job import DomainJob, Job
from .adam import fit_adam
from .losses import token_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FitResult:
    """A correction, what was chosen on the way, and what a user should know of it."""

    correction: Correction
    choices: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def layers_needed(job: Job) -> list[int]:
    """Decoder layers whose states of the expert a fit reads."""
    return []


def fit_domain(job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, fitted: list[int]) -> FitResult:
    """Fit one domain's correction on some of its sequences; the features must be in the store."""
    return _adam(job, domain, fitted)


def _adam(job: Job, domain: DomainJob, fitted: list[int]) -> FitResult:
    correction, fit = job.run.correction, job.run.fit
    prompts = domain.prompts
    mine = torch.isin(torch.from_numpy(prompts.sequence_index()), torch.tensor(fitted))
    expert = job.store(domain.expert_print, prompts)
    weights = token_weights(
        expert.load("entropy")["entropy"][mine],
        torch.from_numpy(prompts.predicts())[mine],
        fit.loss,
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
