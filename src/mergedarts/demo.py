"""The demo: merge the testbed, repair it by several recipes, measure each on held-out examples, let each speak.

Knows the order and the table; merging, fitting and measuring are the product's own.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import testbed
from .config import Domain, parse_run
from .correction import Correction
from .domains import Clock, split_of
from .drift import Case, DomainDrift, Drift, assemble, domain_drift, measure_on
from .errors import UserError
from .features import Readout
from .files import cache_dir
from .generation import answer
from .heldout import HeldOut
from .job import Job, prepare, run_expert, run_merged
from .measures import TokenMeasures, bootstrap, ratio
from .models import is_emulated, load_tokenizer, pick_device
from .progress import say, warn
from .prompts import read_examples
from .repair import calibrate
from .repaired import read_corrections
from .report import PAGE, check_writable, write_report
from .runtime import attach

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Rows of the demo's table between merged and expert: name, preset and what it is.
VARIANTS = (("surgery", "surgery"), ("darts", "paper"), ("repaired", "default"))
NEW_TOKENS = 32


@dataclass(frozen=True)
class Sample:
    """One held-out prompt and what each model answers."""

    domain: str
    prompt: str
    answers: dict[str, str]


@dataclass(frozen=True)
class DemoResult:
    """Means and samples of the demo; `data` is what `--json` prints, `report` the page of the diagnosis if written."""

    data: dict[str, Any]
    samples: list[Sample]
    folders: dict[str, Path]
    report: Path | None


def demo(samples: int = 50, examples: int = 20, speak: bool = True) -> DemoResult:
    """Run the testbed from nothing, in float32 where the CPU only emulates bfloat16.

    Args:
        samples: calibration prompts a domain.
        examples: held-out examples a domain that are measured.
        speak: whether each model answers one prompt a domain.
    """
    clock = Clock()
    with clock.stage("base"):
        testbed.base_model()
    with clock.stage("merge"):
        merged = testbed.merged_model()
    settings = {
        "merged": str(merged),
        "dtype": "float32" if is_emulated(torch.bfloat16, pick_device("auto")) else "bfloat16",
        "domains": {
            d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib")), "samples": samples}
            for d in testbed.DOMAINS
        },
    }
    folders = {"merged": merged}
    # The default first: it reads the expert's states at every layer, of which the others need the last alone.
    for name, preset in reversed(VARIANTS):
        say(f"calibrating {name}")
        folders[name] = cache_dir() / "testbed" / "repaired" / name
        run = parse_run(settings | {"preset": preset, "router": False})
        result = calibrate(run, folders[name])
        for stage, seconds in result["seconds"].items():
            key = f"{name}: fit" if stage == "fit" else stage
            clock.seconds[key] = round(clock.seconds.get(key, 0.0) + seconds, 3)
    corrections = {name: read_corrections(folders[name]) for name, _ in VARIANTS}
    with clock.stage("evaluation"):
        job = prepare(parse_run(settings), Path.cwd())
    tokenizer = load_tokenizer(job.merged)
    measures, drift, model = _measure(job, corrections, examples, tokenizer, clock)
    with clock.stage("report"):
        report = _report(drift)
    spoken: list[Sample] = []
    if speak:
        with clock.stage("generation"):
            spoken = _speak(job, model, tokenizer, corrections)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    data = {
        "domains": {domain: _rows(parts) for domain, parts in measures.items()},
        "answers": {key: answer.sentence for key, answer in drift.answers.items()},
        "dtype": job.run.dtype,
        "seconds": clock.seconds,
        "peak_rss_bytes": peak,
    }
    return DemoResult(data, spoken, folders, report)


def _measure(
    job: Job, corrections: dict[str, dict[str, Correction]], examples: int, tokenizer: Any, clock: Clock
) -> tuple[dict[str, dict[str, TokenMeasures]], Drift, PreTrainedModel]:
    """Measures by domain and model on the evaluation examples, and the diagnosis of the same states."""
    with clock.stage("evaluation"):
        domains = []
        for domain in job.domains:
            held = measure_on(job, domain, testbed.prompts(domain.name, "eval"), examples)
            domains.append(run_expert(job, held, [])[0])
        model: PreTrainedModel | None = None
        for domain in domains:
            model = run_merged(job, domain, model)
        model = model or job.load(job.merged)
        readout = Readout(model)
    out: dict[str, dict[str, TokenMeasures]] = {}
    found: dict[str, DomainDrift] = {}
    sums = {}
    for calibrated, domain in zip(job.domains, domains, strict=True):
        name, chosen = domain.name, list(range(len(domain.prompts.sequences)))
        with clock.stage("evaluation"):
            check = HeldOut(job, domain, model, readout, chosen)
            states = {"merged": check.merged_states}
            states |= {variant: check.states(corrections[variant][name]) for variant in corrections}
            *ours, expert = check.measure_all(*((s, None) for s in states.values()), (check.target, check.head))
            measures = dict(zip(states, ours, strict=True))
            out[name] = measures | {"expert": expert}
        with clock.stage("diagnosis"):
            run_merged(job, calibrated, model)
            case = Case(calibrated, split_of(job, calibrated)[0], domain, chosen)
            pair = ("merged", "repaired")
            found[name], sums[name] = domain_drift(
                job, case, check, readout, tokenizer,
                {variant: states[variant] for variant in pair}, {variant: measures[variant] for variant in pair}, {},
            )  # fmt: skip
    return out, assemble(job, found, sums), model


def _report(drift: Drift) -> Path | None:
    """The page of the diagnosis, where what it needs is installed."""
    target = cache_dir() / "testbed" / "report"
    try:
        check_writable(target)
    except UserError as error:
        warn(f"no report of the diagnosis is written: {error}")
        return None
    write_report(drift, target)
    return target / PAGE


def _rows(parts: dict[str, TokenMeasures]) -> dict[str, dict[str, Any]]:
    """Means by model; repaired models with their share of the KL gap closed and its 95% interval."""
    rows: dict[str, dict[str, Any]] = {}
    merged = parts["merged"]
    for name, sample in parts.items():
        rows[name] = sample.means()
        if name not in ("merged", "expert"):
            pair = {"merged": merged, "after": sample}
            rows[name]["share_closed"] = 1 - rows[name]["kl"] / rows["merged"]["kl"]
            rows[name]["share_closed_ci"] = list(
                bootstrap(pair, lambda m: 1 - ratio(m["after"]["kl"], m["merged"]["kl"]))
            )
    return rows


def _speak(
    job: Job, model: PreTrainedModel, tokenizer: Any, corrections: dict[str, dict[str, Correction]]
) -> list[Sample]:
    """One answer of each model to the first held-out prompt of each domain."""
    prompts = {}
    for domain in job.domains:
        given = Domain(expert="", prompts=str(testbed.prompts(domain.name, "eval")), samples=1)
        prompts[domain.name] = read_examples(given, domain.name, Path.cwd())[0].turns[0][1]
    answers: dict[str, dict[str, str]] = {
        d: {"merged": answer(model, tokenizer, p, NEW_TOKENS)} for d, p in prompts.items()
    }
    for name, by_domain in corrections.items():
        with attach(model, by_domain) as handle:
            for key, prompt in prompts.items():
                handle.domain = key
                answers[key][name] = answer(model, tokenizer, prompt, NEW_TOKENS)
    for domain in job.domains:
        expert = job.load(domain.expert)
        answers[domain.name]["expert"] = answer(expert, tokenizer, prompts[domain.name], NEW_TOKENS)
        del expert
    return [Sample(d, prompts[d], answers[d]) for d in prompts]
