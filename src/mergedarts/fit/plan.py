"""Turns a run's settings into closed-form fits: sites, ranks, position forms and ridge, chosen where they are open.

Knows the settings and the stores; the algebra, the sweep and the metric live in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import EverySite, PositionForm
from ..correction import Correction
from ..errors import UserError
from ..features import Readout
from ..files import digest_text
from ..heads import load_head
from ..heldout import HeldOut
from ..job import DomainJob, Job
from ..models import load_config, outline, parameter_count
from ..store import FeatureStore
from .budget import even_ranks, site_cost
from .final import OPEN_FORMS as FINAL_FORMS
from .final import FinalData, fit_final
from .fisher import Metric, load_metric, metric_sequences
from .linear import factors_of, fit_svd, rank_one_cost, weight_of
from .losses import token_weights
from .mixed import choose_share, fit_share
from .sweep import SweepSettings, sweep
from .writers import writers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Ridges tried at the probes of a sweep where the settings leave it open.
RIDGES = (0.01, 0.1, 1.0)
#: Position forms tried inside the rank where the settings leave them open.
OPEN_FORMS = (PositionForm(form="constant"), PositionForm(form="smooth", size=4))
#: Weight updates are tried where a domain's budget is at least this share of a rank-1 update of every linear layer.
LEAST_BUDGET = 1 / 3
#: Weight of prompt tokens in depth without a Fisher metric; about what one gives them in the early layers.
DEPTH_PROMPT_WEIGHT = 0.2


@dataclass(frozen=True)
class FitResult:
    """A correction, what was chosen on the way, and what a user should know of it."""

    correction: Correction
    choices: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def wants_depth(job: Job) -> bool:
    """Whether a run corrects the residual stream after layers, or what writes to it."""
    run = job.run
    return run.fit.method == "closed-form" and run.correction.form != "svd" and run.correction.sites != "final"


def wants_fisher(job: Job) -> bool:
    """Whether a run needs the Fisher metric of the layers."""
    return wants_depth(job) and job.run.fit.metric in ("auto", "fisher")


def wants_entropy(job: Job) -> bool:
    """Whether a fit weighs tokens by the expert's entropy: `loss: auto` does so where there is no Fisher metric."""
    if job.run.correction.form == "svd":
        return False
    loss = job.run.fit.loss
    return loss == "ewl1" or (loss == "auto" and not wants_fisher(job))


def wants_weights(job: Job) -> bool:
    """Whether a run needs the experts' linear weights beside the merged model's."""
    return job.run.correction.form == "svd" or wants_updates(job)


def wants_updates(job: Job) -> bool:
    """Whether a run may spend some of its budget on weight updates beside the corrections in depth."""
    correction = job.run.correction
    if correction.form == "residual" or not wants_depth(job) or correction.svd_share == 0:
        return False
    if correction.svd_share != "auto":
        return True
    if correction.rank != "auto" or correction.sites not in ("auto", "all"):
        return False  # ranks or sites that are asked for are the whole correction
    merged = outline(job.merged)
    return domain_budget(job, parameter_count(merged)) >= LEAST_BUDGET * rank_one_cost(merged)


def domain_budget(job: Job, parameters: int) -> int:
    """Parameters that one domain may add to a model of so many."""
    return int(job.run.budget * parameters / len(job.domains))


def layers_of(job: Job, count: int) -> list[int]:
    """The decoder layers that a run's `sites` name, of `count`."""
    sites = job.run.correction.sites
    if sites == "final":
        return []
    if isinstance(sites, EverySite):
        if sites.every > count:
            raise UserError(f"'correction.sites: every: {sites.every}' names no layer of a model with {count}.")
        return list(range(sites.every - 1, count, sites.every))
    if isinstance(sites, list):
        bad = [i for i in sites if not 0 <= i < count]
        if bad:
            raise UserError(f"'correction.sites' names layer {bad[0]}, but the model has layers 0 to {count - 1}.")
        return sorted(set(sites))
    return list(range(count))


def measured_on(job: Job, domain: DomainJob, fitted: list[int]) -> list[int]:
    """The fitted sequences that the Fisher metric is estimated on: all of them where it is asked for by name."""
    if job.run.fit.metric == "fisher":
        return sorted(fitted)
    return metric_sequences(domain.prompts, fitted, int(load_config(job.merged).hidden_size), domain.whole_places)


def fisher_name(seed: int, chosen: list[int], layer: int) -> str:
    """The name in the store of a layer's metric, estimated on some of the sequences by signs of a seed."""
    return f"fisher-signs-{digest_text(repr((seed, chosen)))[:12]}-{layer}"


def closed_form(
    job: Job,
    domain: DomainJob,
    model: PreTrainedModel,
    readout: Readout,
    fitted: list[int],
    budget: int,
) -> FitResult:
    """Fit one domain by closed form, within `budget` parameters where the settings leave ranks open."""
    correction = job.run.correction
    rank = correction.rank if isinstance(correction.rank, int) else None
    if correction.form == "svd":
        weights = job.weights_store(domain)
        return FitResult(fit_svd(model, weights, budget, rank, f"{domain.name}: truncated SVD"))
    if correction.sites == "final":
        return _final(job, domain, model, readout, fitted, budget)
    if wants_updates(job):
        return _mixed(job, domain, model, readout, fitted, budget)
    return _depth(job, domain, model, fitted, fitted, budget)


class _Tokens:
    """Entropies, marks and weights of the tokens a domain is fitted on."""

    def __init__(self, job: Job, domain: DomainJob, expert: FeatureStore, fitted: list[int]) -> None:
        self.rows = torch.isin(torch.from_numpy(domain.prompts.sequence_index()), torch.tensor(fitted))
        self.expert = expert
        self._fit = job.run.fit
        self._loss = "ewl1" if wants_entropy(job) else "l1"
        self._deep = job.run.correction.sites != "final"
        self._entropy = expert.load("entropy")["entropy"][self.rows] if wants_entropy(job) else None
        self._predicts = torch.from_numpy(domain.prompts.predicts())[self.rows]

    def weights(self, metric: Metric | None) -> torch.Tensor:
        """[n] weights: by the loss asked for, and for prompt tokens by the setting or by what the metric gives them.

        A Fisher metric says itself how much an undecided token matters, so it comes without entropy weights unless
        they are asked for.
        """
        prompt = self._fit.prompt_weight
        if prompt is None:
            if metric is None:
                # At the final site only what is generated matters; in depth a prompt's states are attended to.
                prompt = DEPTH_PROMPT_WEIGHT if self._deep else 0.0
            else:
                prompt = min(1.0, metric.prompt / metric.response) if metric.response > 0 else 1.0
        gamma = 0.5 if self._fit.gamma is None else self._fit.gamma
        return token_weights(self._entropy, self._predicts, self._loss, gamma, prompt)


def _final(
    job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, fitted: list[int], budget: int
) -> FitResult:
    """The final site alone."""
    data = _Tokens(job, domain, job.store(domain.expert_print, domain.prompts), fitted)
    correction, fit = job.run.correction, job.run.fit
    width = model.get_output_embeddings().weight.shape[1]
    prompts = domain.prompts
    forms = FINAL_FORMS if correction.position_form is None else (correction.position_form,)
    if correction.rank == "full":
        rank = width
    elif isinstance(correction.rank, int):
        rank = min(correction.rank, width)
    else:
        largest = max(form.size or 1 for form in forms)
        rank = max(1, min(width, (budget - largest * width) // (2 * width)))
    tokens = FinalData(
        job.store(job.merged_print, prompts).load("final")["hidden"][data.rows],
        data.expert.load("final")["hidden"][data.rows],
        data.weights(None),
        torch.from_numpy(prompts.positions())[data.rows],
        torch.from_numpy(prompts.sequence_index())[data.rows],
    )
    site, choices, notes = fit_final(
        tokens, readout, forms=forms, rank=rank, ridge=fit.ridge,
        metric="fisher" if fit.metric == "fisher" else "states", l1=fit.metric != "fisher", objective=fit.objective,
        top_k=fit.top_k, expert_head=load_head(data.expert, model), title=f"{domain.name}: fit",
    )  # fmt: skip
    return FitResult(Correction({"final": site}), choices, notes)


def _mixed(
    job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, fitted: list[int], budget: int
) -> FitResult:
    """Weight updates for a share of the budget, the residual stream after layers for the rest."""
    factors = factors_of(model, job.weights_store(domain), budget, f"{domain.name}: truncated SVD")
    last: list[FitResult] = []

    def depth(chosen: list[int], left: int) -> Correction:
        last[:] = [_depth(job, domain, model, chosen, fitted, left)]
        return last[0].correction

    given = job.run.correction.svd_share
    kl: dict[str, float] = {}
    if given == "auto":
        share, kl = choose_share(
            model, factors, budget, fitted, depth, lambda kept: HeldOut(job, domain, model, readout, kept)
        )
    else:
        share = float(given)
    correction = fit_share(model, factors, share, budget, fitted, depth)
    return replace(last[0], correction=correction, choices=last[0].choices | {"svd_share": share, "svd_share_kl": kl})


def _depth(
    job: Job, domain: DomainJob, model: PreTrainedModel, fitted: list[int], whole: list[int], budget: int
) -> FitResult:
    """The residual stream after layers, fitted on some sequences, in a metric of the `whole` they are taken from."""
    correction, fit = job.run.correction, job.run.fit
    data = _Tokens(job, domain, job.store(domain.expert_print, domain.prompts), fitted)
    layers = layers_of(job, model.config.get_text_config().num_hidden_layers)
    width = model.get_output_embeddings().weight.shape[1]
    # A weight has no bias and knows no position.
    written = writers(model) if correction.form == "linear" else None
    inputs = None if written is None else weight_of(next(iter(written.values()))[1]).shape[1]
    inside = correction.position_form is None
    if written is not None:
        forms: tuple[PositionForm, ...] = (PositionForm(form="none"),)
    else:
        forms = OPEN_FORMS if correction.position_form is None else (correction.position_form,)
    if isinstance(correction.rank, int) or correction.rank == "full":
        ranks = dict.fromkeys(layers, width if correction.rank == "full" else min(width, int(correction.rank)))
    else:
        functions = max(0 if form.form == "none" else form.size or 1 for form in forms)
        even = even_ranks(len(layers), width, functions, inside, budget, inputs)
        ranks = {layers[i]: rank for i, rank in even.items()}
    if not ranks:
        least = site_cost(width, 1, 1, inside, inputs)
        raise UserError(
            f"The budget leaves {budget} parameters for domain '{domain.name}', less than the {least} of one site of "
            "rank 1; raise 'budget'."
        )
    sites = sorted(ranks)
    ridges = RIDGES if fit.ridge is None else (fit.ridge,)
    probes = (sites[0], sites[len(sites) // 2], sites[-1]) if len(ridges) > 1 or len(forms) > 1 else ()
    metrics: dict[int, Metric] = {}
    measured = measured_on(job, domain, whole)

    def metric(layer: int) -> Metric | None:
        if not wants_fisher(job):
            return None
        if layer not in metrics:
            metrics.clear()
            metrics[layer] = load_metric(data.expert, fisher_name(fit.seed, measured, layer))
        return metrics[layer]

    result = sweep(
        model, domain.prompts.subset(fitted), lambda layer: data.expert.load(f"layer-{layer}")["hidden"][data.rows],
        lambda layer: data.weights(metric(layer)), metric, SweepSettings(ranks, forms, inside, ridges, probes, written),
        f"{domain.name}: fit", domain.numbers(fitted),
    )  # fmt: skip
    notes = []
    if result.helped:
        notes.append(f"the inputs were too alike to solve at {len(result.helped)} site(s); the ridge was raised there.")
    choices = {"metric": "fisher" if wants_fisher(job) else "states", "probes": result.chosen}
    return FitResult(result.correction, choices, notes)
