"""The main job: from a run file to a repaired model, stage by stage.

Knows the order of the stages and what is said of them; each stage's knowledge lives in its own module.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, distributed, fanout
from .claims import claim
from .config import Domain, RunFile
from .correction import Correction
from .domains import Clock, Outcome, held_out, merged_model, repair_domain, run_experts, split_of
from .errors import UserError
from .features import Readout
from .fit import check_processes, layers_needed
from .fit.plan import wants_fisher
from .folders import check_replaceable
from .job import Job, prepare
from .progress import warn
from .repaired import CONFIG, write_repaired
from .room import check_features
from .router import Router
from .routing import fit_routing, wrong_routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrate(run: RunFile, out: Path, base: Path | None = None, ray: str | None = None) -> dict[str, Any]:
    """Fit corrections for every domain and write the repaired model.

    Args:
        run: the settings.
        out: folder to write; an earlier repaired model there is replaced when the new one is whole.
        base: folder that relative paths in `run` are relative to; the working folder by default.
        ray: have each domain repaired by a Ray task: 'local' starts Ray on this machine, anything else is the address
            of a cluster that runs ('auto' finds the one of this machine). Ray that this process has joined is used.

    Returns:
        What `darts_config.json` holds.

    Raises:
        UserError: bad input (nothing is written), or, with `strict`, a domain that is not improved.
    """
    if ray is not None:
        fanout.check_alone()
    with distributed.group(), claim(out) if distributed.rank() == 0 else nullcontext():
        return _calibrate(run, out, base or Path.cwd(), ray)


def _calibrate(run: RunFile, out: Path, base: Path, ray: str | None) -> dict[str, Any]:
    clock = Clock()
    with clock.stage("prepare"), distributed.together():
        check_replaceable(out, CONFIG)
        job = prepare(run, base)
        check_processes(job)
        if ray in (None, fanout.LOCAL):
            check_room(job)
    model: PreTrainedModel | None = None
    readout: Readout | None = None
    if ray is None:
        domains = [run_experts(job, domain, clock) for domain in job.domains]
        model, readout = merged_model(job, domains, clock)
        outcomes = [repair_domain(job, domain, model, readout, clock) for domain in domains]
    else:
        outcomes = fanout.repair_domains(job, ray, clock)
    corrections = {outcome.domain.name: outcome.correction for outcome in outcomes}
    router, routing = None, None
    if run.router:
        if model is None or readout is None:
            model, readout = merged_model(job, [], clock)
        with clock.stage("router"):
            router, routing = _router(job, outcomes, model, readout, corrections)
    config = _described(job, outcomes, routing)
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


def check_room(job: Job) -> None:
    """Raise `UserError` where the disk has no room for the features of a run's domains."""
    layers = len(layers_needed(job))
    check_features(job, layers, layers if wants_fisher(job) else 0)


def _router(
    job: Job, outcomes: list[Outcome], model: PreTrainedModel, readout: Readout, corrections: dict[str, Correction]
) -> tuple[Router | None, dict[str, Any]]:
    """The router, and what is said of it."""
    domains = [outcome.domain for outcome in outcomes]
    router, routing = fit_routing(job, domains, model, corrections, [split_of(job, domain) for domain in domains])
    if router is None:
        warn(routing["note"])
        return None, routing
    found = {domain.name: held_out(job, domain, model, readout) for domain in domains}
    checks = {name: check for name, check in found.items() if check is not None}
    tables = {outcome.domain.name: outcome.described["held_out"] for outcome in outcomes}
    routing["kl"] = wrong_routing(checks, corrections, tables)
    return router, routing


def _described(job: Job, outcomes: list[Outcome], routing: dict[str, Any] | None) -> dict[str, Any]:
    """What `darts_config.json` says of a run."""
    run, total = job.run, outcomes[0].parameters
    added = sum(outcome.described["parameters"] for outcome in outcomes)
    share = added / total
    if share > run.budget * 1.0005:
        warn(f"the settings add {share:.2%} of the model's parameters, more than the budget of {run.budget:.2%}.")
    return {
        "mergedarts": __version__,
        "merged": {
            "model": str(job.merged),
            "fingerprint": job.merged_print,
            "parameters": total,
            "trust_remote_code": job.merged.trust_remote_code,
        },
        "domains": {outcome.domain.name: outcome.described for outcome in outcomes},
        "parameters": {"added": added, "share": share, "budget": run.budget},
        "router": routing,
        "settings": run.model_dump(mode="json", exclude={"domains", "store"}),
    }


def _source(domain: Domain, base: Path) -> dict[str, Any]:
    """What makes a domain's sequences again: prompts (a file by its whole path), samples, rollout."""
    data = domain.model_dump(mode="json", include={"prompts", "samples", "rollout"})
    if isinstance(domain.prompts, str):
        data["prompts"] = str((base / Path(domain.prompts).expanduser()).absolute())
    return data
