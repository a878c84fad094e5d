"""What is done for one domain: its expert's features, the fit of its correction, and the check on held-out sequences.

Knows one domain at a time; the order of domains, the router and the result are in `repair`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import distributed
from .correction import Correction
from .features import Readout
from .fit import expert_extras, fit_domain, layers_needed, needs_final
from .fit.plan import wants_entropy
from .heldout import HeldOut
from .job import DomainJob, Job, answered, check_lengths, return_memory, run_expert, run_merged
from .measures import TokenMeasures, bootstrap, ratio
from .models import parameter_count
from .progress import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: KL in nats a token below which a difference is rounding.
LEAST_GAIN = 1e-6


@dataclass
class Clock:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add({name: time.monotonic() - start})

    def add(self, seconds: dict[str, float]) -> None:
        for name, more in seconds.items():
            self.seconds[name] = round(self.seconds.get(name, 0.0) + more, 3)


@dataclass(frozen=True)
class Outcome:
    """What became of a domain.

    Attributes:
        domain: with the continuations that its expert wrote.
        correction: the one that ships; without sites where none does.
        described: what `darts_config.json` says of the domain.
        parameters: of the merged model.
    """

    domain: DomainJob
    correction: Correction
    described: dict[str, Any]
    parameters: int


def run_experts(job: Job, domain: DomainJob, clock: Clock) -> DomainJob:
    """Make sure the store holds all that a fit reads of a domain's expert; returns the domain with continuations."""
    ready, expert = domain, None
    with clock.stage("expert features"):
        if domain.prompts.sequences:
            with distributed.together():
                ready, expert = answered(job, domain)
                check_lengths(ready)
                ready, expert = run_expert(job, ready, layers_needed(job), expert, wants_entropy(job))
    with clock.stage("expert's metric"):
        expert_extras(job, ready, split_of(job, ready)[0], expert)
    return_memory()
    return ready


def merged_model(job: Job, domains: list[DomainJob], clock: Clock) -> tuple[PreTrainedModel, Readout]:
    """The merged model, loaded; where a fit reads its final states, they are in the store."""
    with clock.stage("merged features"):
        model: PreTrainedModel | None = None
        for domain in domains if needs_final(job) else ():
            model = run_merged(job, domain, model)
        model = model or job.load(job.merged)
        return model, Readout(model)


def repair_domain(job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout, clock: Clock) -> Outcome:
    """Fit a domain's correction and check it; the expert's features must be in the store."""
    fitted, held = split_of(job, domain)
    with clock.stage("fit"):
        result = fit_domain(job, domain, model, readout, fitted)
        return_memory()
    with clock.stage("held-out check"):
        shipped, table = _check(held_out(job, domain, model, readout), result.correction)
    correction = result.correction
    if not shipped:
        correction = Correction()
        warn(f"domain '{domain.name}' is not improved on held-out prompts and ships uncorrected.")
    notes, whole = result.notes, domain.whole()
    if not held:
        notes = [*notes, "nothing was held out, so whether the repair helps was not measured."]
    for note in notes:
        warn(f"domain '{domain.name}': {note}")
    described = {
        "expert": str(domain.expert),
        "expert_fingerprint": domain.expert_print,
        "prompts": whole.digest,
        "sequences": {"fit": int(distributed.total(len(fitted))), "held_out": int(distributed.total(len(held)))},
        "tokens": whole.tokens,
        "parameters": correction.parameter_count,
        "shipped": shipped,
        "held_out": table,
        "choices": result.choices,
        "notes": notes,
    }
    return Outcome(domain, correction, described, parameter_count(model))


def split_of(job: Job, domain: DomainJob) -> tuple[list[int], list[int]]:
    """The sequences a domain is fitted on, and those it is checked on."""
    return domain.split(job.run.fit.holdout, job.run.fit.seed)


def held_out(job: Job, domain: DomainJob, model: PreTrainedModel, readout: Readout) -> HeldOut | None:
    """The check on a domain's held-out sequences; None where there is nothing to measure on."""
    held = split_of(job, domain)[1]
    check = HeldOut(job, domain, model, readout, held) if held else None
    return check if check is not None and len(check) else None


def _check(check: HeldOut | None, correction: Correction) -> tuple[bool, dict[str, Any] | None]:
    """Whether a correction lowers the KL on held-out sequences, and the table that shows it."""
    if check is None:
        return True, None
    with torch.inference_mode():
        before, after, expert, floor = check.measure_all(
            (check.merged_states, None), (check.states(correction), None),
            (check.target, check.head), (check.target, None),
        )  # fmt: skip
    table = comparison(before, after) | {"expert": expert.means(), "head_floor_kl": floor.means()["kl"]}
    kl_before, kl_after = table["merged"]["kl"], table["repaired"]["kl"]
    return bool(kl_before - kl_after > max(LEAST_GAIN, 1e-3 * kl_before)), table


def comparison(before: TokenMeasures, after: TokenMeasures) -> dict[str, Any]:
    """Means before and after, the share of the KL gap closed, and its 95% interval over sequences."""
    pair = {"merged": before, "repaired": after}
    means = {name: sample.means() for name, sample in pair.items()}
    before_kl, after_kl = float(means["merged"]["kl"] or 0.0), float(means["repaired"]["kl"] or 0.0)
    out: dict[str, Any] = dict(means)
    out["share_closed"] = 1 - after_kl / before_kl if before_kl > LEAST_GAIN else None
    if before_kl > LEAST_GAIN and before.sequence.unique().numel() > 1:
        out["share_closed_ci"] = list(bootstrap(pair, lambda m: 1 - ratio(m["repaired"]["kl"], m["merged"]["kl"])))
    return out
