"""The main job: from a run file to a repaired model, stage by stage.

Knows the order of the stages and what is said of them; each stage's knowledge lives in its own module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import __version__, distributed
from .claims import claim
from .config import Domain, RunFile
from .correction import Correction
from .errors import UserError
from .features import Readout
from .fit import check_processes, expert_extras, fit_domain, layers_needed, needs_final
from .fit.plan import wants_fisher
from .folders import check_replaceable
from .heldout import HeldOut
from .job import DomainJob, Job, check_lengths, prepare, run_expert, run_merged
from .measures import TokenMeasures, bootstrap, ratio
from .models import parameter_count
from .progress import warn
from .repaired import CONFIG, write_repaired
from .room import check_features
from .router import Router
from .routing import fit_routing, wrong_routing

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
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 3)


def calibrate(run: RunFile, out: Path, base: Path | None = None) -> dict[str, Any]:
    """Fit corrections for every domain and write the repaired model.

    Args:
        run: the settings.
        out: folder to write; an earlier repaired model there is replaced when the new one is whole.
        base: folder that relative paths in `run` are relative to; the working folder by default.

    Returns:
        What `darts_config.json` holds.

    Raises:
        UserError: bad input (nothing is written), or, with `strict`, a domain that is not improved.
    """
    with distributed.group(), claim(out) if distributed.rank() == 0 else nullcontext():
        return _calibrate(run, out, base or Path.cwd())


def _calibrate(run: RunFile, out: Path, base: Path) -> dict[str, Any]:
    clock = Clock()
    with clock.stage("prepare"), distributed.together():
        check_replaceable(out, CONFIG)
        job = prepare(run, base)
        check_processes(job)
        layers = len(layers_needed(job))
        check_features(job, layers, layers if wants_fisher(job) else 0)
    domains = []
    for domain in job.domains:
        ready, expert = domain, None
        with clock.stage("expert features"), distributed.together():
            if domain.prompts.sequences:
                ready, expert = run_expert(job, domain, layers_needed(job))
                check_lengths(ready)
        with clock.stage("expert's metric"):
            expert_extras(job, ready, split_of(job, ready)[0], expert)
        domains.append(ready)
        del expert
    config, corrections, router = _repair(job, domains, clock)
    config["seconds"] = clock.seconds
    for name, given in run.domains.items():
        if given.prompts is not None:
            config["domains"][name]["source"] = _source(given, base)
    unimproved = [name for name, d in config["domains"].items() if not d["shipped"]]
    if unimproved and run.strict:
        raise UserError(
            f"Domain '{unimproved[0]}' is not improved on held-out prompts ('strict'); nothing was written."
        )
    if distributed.rank() == 0:
        write_repaired(out, config, corrections, router)
    return config


def _repair(
    job: Job, domains: list[DomainJob], clock: Clock
) -> tuple[dict[str, Any], dict[str, Correction], Router | None]:
    """Fit and check each domain with the merged model in memory."""
    run = job.run
    with clock.stage("merged features"):
        model: PreTrainedModel | None = None
        for domain in domains if needs_final(job) else ():
            model = run_merged(job, domain, model)
        model = model or job.load(job.merged)
        readout = Readout(model)
    corrections: dict[str, Correction] = {}
    described: dict[str, Any] = {}
    checks: dict[str, HeldOut] = {}
    for domain in domains:
        fitted, held = split_of(job, domain)
        with clock.stage("fit"):
            result = fit_domain(job, domain, model, readout, fitted)
        with clock.stage("held-out check"):
            check = HeldOut(job, domain, model, readout, held) if held else None
            if check is not None and len(check):
                checks[domain.name] = check
            shipped, table = _check(checks.get(domain.name), result.correction)
        if shipped:
            corrections[domain.name] = result.correction
        else:
            corrections[domain.name] = Correction()
            warn(f"domain '{domain.name}' is not improved on held-out prompts and ships uncorrected.")
        notes, whole = result.notes, domain.whole()
        if not held:
            notes = [*notes, "nothing was held out, so whether the repair helps was not measured."]
        for note in notes:
            warn(f"domain '{domain.name}': {note}")
        described[domain.name] = {
            "expert": str(domain.expert),
            "expert_fingerprint": domain.expert_print,
            "prompts": whole.digest,
            "sequences": {"fit": int(distributed.total(len(fitted))), "held_out": int(distributed.total(len(held)))},
            "tokens": whole.tokens,
            "parameters": corrections[domain.name].parameter_count,
            "shipped": shipped,
            "held_out": table,
            "choices": result.choices,
            "notes": notes,
        }
    router, routing = None, None
    if run.router:
        splits = [split_of(job, domain) for domain in domains]
        with clock.stage("router"):
            router, routing = fit_routing(job, domains, model, corrections, splits)
            if router is None:
                warn(routing["note"])
            else:
                tables = {name: described[name]["held_out"] for name in checks}
                routing["kl"] = wrong_routing(checks, corrections, tables)
    total = parameter_count(model)
    added = sum(d["parameters"] for d in described.values())
    share = added / total
    if share > run.budget * 1.0005:
        warn(f"the settings add {share:.2%} of the model's parameters, more than the budget of {run.budget:.2%}.")
    config = {
        "mergedarts": __version__,
        "merged": {
            "model": str(job.merged),
            "fingerprint": job.merged_print,
            "parameters": total,
            "trust_remote_code": job.merged.trust_remote_code,
        },
        "domains": described,
        "parameters": {"added": added, "share": share, "budget": run.budget},
        "router": routing,
        "settings": run.model_dump(mode="json", exclude={"domains", "store"}),
    }
    return config, corrections, router


def _source(domain: Domain, base: Path) -> dict[str, Any]:
    """What makes a domain's sequences again: prompts (a file by its whole path), samples, rollout."""
    data = domain.model_dump(mode="json", include={"prompts", "samples", "rollout"})
    if isinstance(domain.prompts, str):
        data["prompts"] = str((base / Path(domain.prompts).expanduser()).absolute())
    return data


def split_of(job: Job, domain: DomainJob) -> tuple[list[int], list[int]]:
    """The sequences a domain is fitted on, and those it is checked on."""
    return domain.split(job.run.fit.holdout, job.run.fit.seed)


def _check(check: HeldOut | None, correction: Correction) -> tuple[bool, dict[str, Any] | None]:
    """Whether a correction lowers the KL on held-out sequences, and the table that shows it."""
    if check is None:
        return True, None
    with torch.inference_mode():
        before, after, expert = check.merged(), check.corrected(correction), check.expert()
        floor = check.expert_under_merged_head()
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
