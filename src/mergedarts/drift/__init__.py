"""Diagnosis of a merge: where its hidden states and predictions drifted from the experts', before and after a repair.

Knows the order of the stages; measuring, binning and fitting live in the modules beside this one, pictures in `report`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import Domain, RunFile
from ..domains import split_of
from ..errors import UserError
from ..features import Readout
from ..heldout import HeldOut
from ..job import DomainJob, Job, check_lengths, prepare, run_expert, run_merged, with_eval_prompts
from ..measures import TokenMeasures
from ..models import load_config, load_tokenizer
from ..prompts import PromptSet, read_examples
from ..runtime import attach
from .bootstrap import Estimate, Resampler
from .calibrated import Calibrated
from .disagreements import disagreements
from .layers import LayerSums, run_layers
from .slopes import UNITS, SlopeSums, answers, high_entropy, slope, slope_sums
from .systematic import Side, systematic
from .tokens import Places, Series, axes, overall, series
from .types import SCHEMA, Answer, DomainDrift, Drift, ModelDrift, Point, Slope, Systematic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "SCHEMA",
    "Answer",
    "Case",
    "DomainDrift",
    "Drift",
    "Estimate",
    "ModelDrift",
    "Point",
    "Slope",
    "Systematic",
    "assemble",
    "diagnose",
    "diagnose_repaired",
    "domain_drift",
    "layer_drift",
    "measure_on",
]


@dataclass(frozen=True)
class Case:
    """The sequences of one domain: those the systematic share is fitted on, and those that are measured.

    Attributes:
        fit: the domain with its calibration prompts; fitted: indices of them, empty where none are left to fit on.
        held: the domain with the prompts that are measured; measured: indices of them.
    """

    fit: DomainJob
    fitted: list[int]
    held: DomainJob
    measured: list[int]


def diagnose(
    run: RunFile,
    base: Path | None = None,
    *,
    held_out: dict[str, Path] | None = None,
    examples: int = 50,
    layers: bool = True,
) -> Drift:
    """Diagnose a merge as a run file describes it.

    Measured are the sequences that `calibrate` would hold out, or, by domain, the first `examples` of a file in
    `held_out`. A domain of one prompt, and `fit.holdout: 0`, measure all there is and leave the systematic share out.

    Args:
        run: the settings; of correction and fit, `fit.seed` and `fit.holdout` alone are read.
        base: folder that relative paths in `run` are relative to; the working folder by default.
        layers: also measure after every decoder layer, which runs the merged model over the measured sequences.

    Raises:
        UserError: bad input, as in `calibrate`.
    """
    held = held_out or {}
    fresh = {name for name, domain in run.domains.items() if domain.prompts is None}
    for name in fresh - set(held):
        raise UserError(f"Domain '{name}' has no prompts to measure on; give some with '--held-out {name}=FILE'.")
    given = {name: {"prompts": str(held[name].absolute()), "samples": examples} for name in fresh}
    domains = {name: domain.model_copy(update=given.get(name, {})) for name, domain in run.domains.items()}
    return _diagnose(
        run.model_copy(update={"domains": domains}), base or Path.cwd(), held, examples, layers, None, fresh
    )


def diagnose_repaired(
    folder: str | Path,
    *,
    prompts: dict[str, str] | None = None,
    experts: dict[str, str] | None = None,
    held_out: dict[str, Path] | None = None,
    examples: int = 50,
    merged: str | None = None,
    layers: bool = True,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Drift:
    """Diagnose a repaired model: the merged model before and after, on the sequences that its calibration held out.

    Args:
        folder: what `calibrate` wrote.
        prompts, experts, merged: by domain, where calibration prompts and experts are now, if they have moved; the
            merged model likewise. They must be those of the calibration.
        held_out, examples, layers: as in `diagnose`; with `held_out`, the calibration prompts may be gone.
        device, dtype, trust_remote_code: as in `mergedarts.load`.

    Raises:
        UserError: not a repaired model, prompts or models that are missing or not those of the calibration.
    """
    calibrated = Calibrated.read(Path(folder))
    held = held_out or {}
    run, fresh = calibrated.run(
        prompts or {}, experts or {}, held, examples,
        {"merged": merged, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code},
    )  # fmt: skip
    return _diagnose(run, Path.cwd(), held, examples, layers, calibrated, fresh)


def _diagnose(
    run: RunFile,
    base: Path,
    held_out: dict[str, Path],
    examples: int,
    layers: bool,
    calibrated: Calibrated | None,
    fresh: set[str],
) -> Drift:
    """Diagnose; `fresh` are domains whose prompts in `run` are the held-out examples themselves."""
    for name in held_out:
        if name not in run.domains:
            raise UserError(f"There is no domain '{name}' here; choose one of {', '.join(run.domains)}.")
    job = prepare(run, base)
    if calibrated is not None:
        calibrated.check_models(job)
    depth = load_config(job.merged).num_hidden_layers if layers else 0
    cases = []
    for domain in job.domains:
        new = domain.name in fresh
        other = None if new else held_out.get(domain.name)
        cases.append(_case(job, domain, other, examples, list(range(depth)), calibrated, new))
    model: PreTrainedModel | None = None
    for case in cases:
        model = run_merged(job, case.held, model)
        model = run_merged(job, case.fit, model) if case.fitted else model
    model = model or job.load(job.merged)
    readout, tokenizer = Readout(model), load_tokenizer(job.merged)
    domains: dict[str, DomainDrift] = {}
    sums: dict[str, dict[str, dict[str, SlopeSums]]] = {}
    for case in cases:
        name = case.held.name
        held = HeldOut(job, case.held, model, readout, case.measured)
        states, by_layer = {"merged": held.merged_states}, {}
        if layers:
            by_layer["merged"], _ = layer_drift(job, case, held, model, depth, "merged")
        if calibrated is not None:
            correction = calibrated.corrections[name]
            deep = any(site != "final" for site, _ in correction.items())
            if layers and deep:
                with attach(model, {name: correction}, name):
                    by_layer["repaired"], states["repaired"] = layer_drift(job, case, held, model, depth, "repaired")
            else:
                states["repaired"] = held.states(correction)
        measures = dict(zip(states, held.measure_all(*((state, None) for state in states.values())), strict=True))
        domains[name], sums[name] = domain_drift(job, case, held, readout, tokenizer, states, measures, by_layer)
    return assemble(job, domains, sums)


def _case(
    job: Job,
    domain: DomainJob,
    other: Path | None,
    examples: int,
    layers: list[int],
    calibrated: Calibrated | None,
    fresh: bool,
) -> Case:
    """Choose a domain's sequences and make sure that the store holds what is read of the expert."""
    ready, expert = run_expert(job, domain, [])
    check_lengths(ready)
    everything = list(range(len(ready.prompts.sequences)))
    undivided = fresh or len(everything) < 2 or job.run.fit.holdout == 0
    fitted, measured = (everything, []) if undivided else split_of(job, ready)
    held = ready
    if calibrated is not None and not fresh:
        calibrated.check_prompts(ready)
    if other is not None:
        held, expert = run_expert(job, measure_on(job, ready, other, examples), [], expert)
        check_lengths(held)
        measured = list(range(len(held.prompts.sequences)))
        _check_apart(ready, fitted, held)
    elif not measured:
        if calibrated is not None and not fresh:
            raise UserError(
                f"The calibration of domain '{domain.name}' held nothing out to measure on; give other examples "
                f"with '--held-out {domain.name}=FILE'."
            )
        fitted, measured = [], everything
    case = Case(ready, fitted, held, measured)
    if layers and not _layer_rows(job, case, len(layers))[2]:
        run_expert(job, replace(held, prompts=held.prompts.subset(measured), unanswered=()), layers, expert)
    return case


def measure_on(job: Job, domain: DomainJob, path: Path, examples: int) -> DomainJob:
    """The domain with the first examples of another file."""
    given = Domain(expert="", prompts=str(path), samples=examples)
    return with_eval_prompts(job, domain, read_examples(given, domain.name, Path.cwd()))


def _check_apart(fit: DomainJob, fitted: list[int], held: DomainJob) -> None:
    """Raise `UserError` where examples to measure on are among those that are fitted."""
    seen = {fit.prompts.sequences[i].ids for i in fitted}
    for i, sequence in enumerate(held.prompts.sequences):
        if sequence.ids in seen:
            raise UserError(
                f"Example {i + 1} of those held out of domain '{held.name}' is among the calibration prompts that are "
                "fitted; take such examples out."
            )


def _layer_rows(job: Job, case: Case, depth: int) -> tuple[PromptSet, list[int], bool]:
    """The prompts whose store has, or is to have, the expert's states by layer, which of them, and whether it does."""
    names = [f"layer-{i}" for i in range(depth)]
    store = job.store(case.held.expert_print, case.held.prompts)
    if all(store.has(name) for name in names):
        return case.held.prompts, case.measured, True
    subset = case.held.prompts.subset(sorted(case.measured))
    store = job.store(case.held.expert_print, subset)
    return subset, list(range(len(case.measured))), all(store.has(name) for name in names)


def layer_drift(
    job: Job, case: Case, held: HeldOut, model: PreTrainedModel, depth: int, what: str
) -> tuple[LayerSums, torch.Tensor]:
    """One pass of a model, with what is attached to it: its drift by layer, and its final states [m, d]."""
    prompts, chosen, _ = _layer_rows(job, case, depth)
    chosen, offsets = sorted(chosen), prompts.offsets
    store = job.store(case.held.expert_print, prompts)
    with store.reading([f"layer-{i}" for i in range(depth)]) as read:

        def expert(layer: int, i: int) -> torch.Tensor:
            return read(f"layer-{layer}", int(offsets[chosen[i]]), int(offsets[chosen[i] + 1]))

        return run_layers(model, held.prompts, held.counted, expert, f"{case.held.name}: {what} by layer")


def domain_drift(
    job: Job,
    case: Case,
    held: HeldOut,
    readout: Readout,
    tokenizer: Any,
    states: dict[str, torch.Tensor],
    measures: dict[str, TokenMeasures],
    by_layer: dict[str, LayerSums],
) -> tuple[DomainDrift, dict[str, dict[str, SlopeSums]]]:
    """Everything of one domain from states that are at hand.

    Args:
        states: by model (`merged`, perhaps `repaired`) final states [m, d] of all held-out tokens.
        measures: by model, of the counted ones.
        by_layer: by model, where measured.

    Returns:
        The domain, and by model and question the sums for answers over several domains.
    """
    if not len(held):
        raise UserError(
            f"None of the measured examples of domain '{case.held.name}' has a token to measure: they have no "
            "response, or 'max_tokens' cuts it off."
        )
    places = Places.of(held)
    resampler = Resampler(places.sequence)
    values = {name: series(places, held, states[name], measures[name]) for name in states}
    sums = {name: slope_sums(places, value) for name, value in values.items()}
    rows = np.searchsorted(sorted(case.measured), resampler.ids)
    models = {}
    for name, value in values.items():
        along = axes(places, value, resampler)
        if name in by_layer:
            along["layer"] = by_layer[name].points(resampler, rows)
        slopes = {key: slope([part], UNITS[key]) for key, part in sums[name].items()}
        models[name] = ModelDrift(overall(places, value, resampler), along, slopes)
    tokens, kl = high_entropy(places, values["merged"]["kl"])
    drift = DomainDrift(
        expert=case.held.expert.name,
        sequences=models["merged"].overall.sequences,
        tokens=models["merged"].overall.tokens,
        high_entropy_tokens=tokens,
        high_entropy_kl=kl,
        models=models,
        closed=_closed(places, values, resampler),
        systematic=_systematic(job, case, held),
        disagreements=disagreements(held, readout, tokenizer, states, measures),
    )
    return drift, sums


def _closed(places: Places, values: dict[str, Series], resampler: Resampler) -> dict[str, Estimate]:
    """Share of KL and drift that the repair takes away."""
    if "repaired" not in values:
        return {}
    out = {}
    for name in ("kl", "drift"):
        before, after = (
            resampler.sums(values[model][name], chosen=places.counted)[:, 0] for model in ("merged", "repaired")
        )
        out[name] = resampler.ratio(before - after, before)
    return out


def _systematic(job: Job, case: Case, held: HeldOut) -> Systematic | None:
    if not case.fitted:
        return None
    prompts = case.fit.prompts
    sequence = torch.from_numpy(prompts.sequence_index())
    predicts, follows = torch.from_numpy(prompts.predicts()), torch.from_numpy(prompts.next_ids()) >= 0
    mine = torch.isin(sequence, torch.tensor(case.fitted)) & (predicts if predicts.any() else follows)
    if not mine.any():
        return None
    fitted = Side(
        job.store(job.merged_print, prompts).load("final")["hidden"][mine],
        job.store(case.fit.expert_print, prompts).load("final")["hidden"][mine],
        torch.from_numpy(prompts.positions())[mine],
        sequence[mine],
    )
    positions = torch.from_numpy(held.prompts.positions())
    kept = held.counted
    return systematic(fitted, Side(held.merged_states[kept], held.target[kept], positions[kept], held.sequence[kept]))


def assemble(job: Job, domains: dict[str, DomainDrift], sums: dict[str, dict[str, dict[str, SlopeSums]]]) -> Drift:
    """The diagnosis of the whole merge."""
    return Drift(
        merged=job.merged.name,
        merged_fingerprint=job.merged_print,
        dtype=job.run.dtype,
        answers=answers(domains, sums),
        domains=domains,
    )
