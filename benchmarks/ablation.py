"""What each part of the method is worth: merge x correction x calibration size x seed, measured on held-out examples.

    python benchmarks/ablation.py --quick        # a quarter of an hour on two cores
    python benchmarks/ablation.py                # the whole grid
    python benchmarks/ablation.py --generation   # in its place, scores of what the models write
    python benchmarks/ablation.py --merges "task arithmetic 0.4" --corrections "surgery;DARTS" --sizes 5,50  # a part

Every cell is kept in the cache as soon as it is measured, so that the same command goes on where it stopped; features
come from the feature store. Prints JSON; `--docs FILE` also puts the tables between the marks of that name in a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from ablation_tables import document

from mergedarts import testbed
from mergedarts.checksums import digest_files
from mergedarts.cli.main import quiet_libraries
from mergedarts.config import Domain, parse_run
from mergedarts.correction import Correction, Position
from mergedarts.domains import split_of
from mergedarts.evaluation import harness
from mergedarts.features import Readout
from mergedarts.files import cache_dir, digest_text, read_json, write_text
from mergedarts.fit import expert_extras, fit_domain, layers_needed
from mergedarts.fit.adam import fit_adam
from mergedarts.fit.losses import token_weights
from mergedarts.fit.plan import wants_entropy
from mergedarts.heldout import HeldOut
from mergedarts.job import DomainJob, Job, prepare, run_expert, run_merged, with_eval_prompts
from mergedarts.measures import TokenMeasures
from mergedarts.merging import merge_cached
from mergedarts.models import load_tokenizer
from mergedarts.prompts import read_examples
from mergedarts.runtime import attach
from mergedarts.store import digest_tensors

#: mergekit's method, its parameters for each expert, and for the whole merge.
MERGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "task arithmetic 0.4": ("task_arithmetic", {"weight": 0.4}, {}),
    "task arithmetic 0.7": ("task_arithmetic", {"weight": 0.7}, {}),
    "TIES": ("ties", {"weight": 1.0, "density": 0.5}, {"normalize": True}),
    "DARE-TIES": ("dare_ties", {"weight": 1.0, "density": 0.5}, {"normalize": True}),
    "linear": ("linear", {"weight": 1 / 3}, {}),
}
TA = "task arithmetic 0.4"
_ADAM = {"sites": "final", "rank": 16, "form": "residual"}
_ALL_TOKENS = {"method": "adam", "prompt_weight": 1.0}
#: The budget that a LoRA of rank 1 on every linear layer spends in three domains, as a share of the model.
LORA1 = 305_280 * 3 / 134_515_008
#: Settings of the run file; a number instead is a table of that many position biases and nothing else.
CORRECTIONS: dict[str, dict[str, Any] | int] = {
    "constant bias": 1,
    "position bias": 512,
    "surgery": {"preset": "surgery"},
    "surgery + EWL1": {"correction": _ADAM | {"position": "none"}, "fit": _ALL_TOKENS | {"loss": "ewl1"}},
    "surgery + position": {"correction": _ADAM | {"position": {"table": 512}}, "fit": _ALL_TOKENS | {"loss": "l1"}},
    "DARTS": {"preset": "paper"},
    "closed form, final": {"correction": {"sites": "final", "rank": 16}},
    "closed form, final, KL": {"correction": {"sites": "final", "rank": 16}, "fit": {"objective": "kl"}},
    "in depth 0.1%": {"budget": 0.001, "correction": {"svd_share": 0}},
    "in depth 0.1%, states metric": {"budget": 0.001, "correction": {"svd_share": 0}, "fit": {"metric": "states"}},
    "in depth 305k": {"budget": LORA1, "correction": {"svd_share": 0}},
    "default 0.1%": {"budget": 0.001},
    "default 305k": {"budget": LORA1},
    "linear, rank 1": {"correction": {"form": "linear", "rank": 1}},
    "LoRA by SVD, rank 1": {"correction": {"form": "svd", "rank": 1}},
    "LoRA by SVD, rank 2": {"correction": {"form": "svd", "rank": 2}},
    "LoRA by SVD, rank 4": {"correction": {"form": "svd", "rank": 4}},
}
#: What another seed changes: the start of Adam, the split of the calibration set, the draws of the Fisher metric.
RANDOM = ("surgery", "surgery + EWL1", "surgery + position", "DARTS", "in depth 0.1%", "in depth 305k", "default 0.1%")
GENERATED = ("surgery", "DARTS", "default 0.1%", "default 305k", "LoRA by SVD, rank 1")

#: Answers at a time.
BATCH = 32


@dataclass(frozen=True)
class Cell:
    """One fit; `none` and `expert` are cells without one."""

    merge: str
    correction: str
    samples: int
    seed: int = 0


def whole_grid() -> list[Cell]:
    """Every correction and seed on every merge at 50 prompts, and every size on the first merge."""
    cells = [
        Cell(merge, name, 50, seed)
        for merge in MERGES
        for name in CORRECTIONS
        for seed in (range(5) if name in RANDOM else range(1))
    ]
    sized = [name for name in CORRECTIONS if not name.startswith("LoRA")]  # an SVD needs no prompts
    return cells + [Cell(TA, name, samples) for samples in (5, 10, 25, 100) for name in sized]


def quick_grid() -> list[Cell]:
    """25 prompts, one seed; two seeds of surgery and DARTS; three corrections on a second merge."""
    names = (
        "constant bias", "position bias", "surgery", "surgery + EWL1", "surgery + position", "DARTS",
        "closed form, final", "in depth 0.1%", "LoRA by SVD, rank 1",
    )  # fmt: skip
    cells = [Cell(TA, name, 25) for name in names]
    cells += [Cell(TA, name, 25, 1) for name in ("surgery", "DARTS")]
    return cells + [Cell("TIES", name, 25) for name in ("surgery", "DARTS", "in depth 0.1%")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the subset that takes a quarter of an hour on two cores")
    parser.add_argument("--examples", type=int, help="held-out examples a domain (quick: 30, otherwise 60)")
    parser.add_argument("--merges", help="of the whole grid, these merges alone, separated by ';'")
    parser.add_argument("--corrections", help="of the whole grid, these corrections alone, separated by ';'")
    parser.add_argument("--sizes", help="of the whole grid, these numbers of prompts alone, separated by ','")
    parser.add_argument("--seeds", type=int, default=5, help="at most so many seeds")
    parser.add_argument("--generation", action="store_true", help="scores of what the models write, and nothing else")
    parser.add_argument("--docs", type=Path, help="a Markdown file whose marked part takes the tables")
    parser.add_argument("--mark", default="ablation", help="name of the marks")
    args = parser.parse_args()
    quiet_libraries()
    begun = time.monotonic()
    cells = quick_grid() if args.quick else part_of(whole_grid(), args)
    cells = [] if args.generation else cells
    examples = args.examples or (30 if args.quick else 60)
    records = [record for merge in MERGES for record in run_merge(merge, cells, examples)]
    result: dict[str, Any] = {"quick": args.quick, "examples": examples, "records": records, "generation": []}
    if args.generation:
        chosen = args.corrections.split(";") if args.corrections else GENERATED
        result["generation"] = generation([name for name in GENERATED if name in chosen])
    result["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(result))
    if args.docs:
        document(args.docs, result, args.mark)


def part_of(cells: list[Cell], args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line names."""
    merges = args.merges.split(";") if args.merges else list(MERGES)
    corrections = args.corrections.split(";") if args.corrections else list(CORRECTIONS)
    sizes = [int(size) for size in args.sizes.split(",")] if args.sizes else [cell.samples for cell in cells]
    if unknown := {*merges, *corrections} - {*MERGES, *CORRECTIONS}:
        raise SystemExit(f"No such merge or correction: {', '.join(sorted(unknown))}.")
    mine = [c for c in cells if c.merge in merges and c.correction in corrections and c.samples in sizes]
    return [c for c in mine if c.seed < args.seeds]


# ---------------------------------------------------------------------------------------------------- merges and jobs


def merged_model(merge: str) -> Path:
    """A merge of the testbed's experts, made by mergekit where it is missing."""
    method, each, whole = MERGES[merge]
    config = {
        "merge_method": method,
        "base_model": str(testbed.base_model()),
        "models": [{"model": testbed.expert(d), "parameters": each} for d in testbed.DOMAINS],
        "parameters": whole,
        "dtype": "bfloat16",
    }
    if method == "linear":
        del config["base_model"]
    path = cache_dir() / "ablation" / f"{digest_text(merge)}.yml"
    write_text(path, yaml.safe_dump(config, sort_keys=False))
    return merge_cached(path)


def job_of(merge: str, samples: int) -> Job:
    domains = {
        d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib")), "samples": samples}
        for d in testbed.DOMAINS
    }
    return prepare(parse_run({"merged": str(merged_model(merge)), "domains": domains}), Path.cwd())


def settings_of(job: Job, cell: Cell) -> Job:
    """The job with a cell's correction; that of a table of biases differs in the seed of its split alone."""
    chosen = CORRECTIONS[cell.correction]
    extra = chosen if isinstance(chosen, dict) else {"preset": "surgery"}
    fit = extra.get("fit", {}) | {"seed": cell.seed}
    given = job.run.model_dump(include={"merged"}) | {
        "domains": {name: domain.model_dump() for name, domain in job.run.domains.items()}
    }
    return replace(job, run=parse_run(given | extra | {"fit": fit}))


# -------------------------------------------------------------------------------------------------------------- cells


def run_merge(merge: str, cells: list[Cell], examples: int) -> list[dict[str, Any]]:
    """Records of all cells of a merge, and of the merged model and the expert themselves."""
    records: list[dict[str, Any]] = []
    mine = [cell for cell in cells if cell.merge == merge]
    for samples in sorted({cell.samples for cell in mine}):
        records += run_size(merge, [cell for cell in mine if cell.samples == samples], samples, examples)
    return records


def run_size(merge: str, cells: list[Cell], samples: int, examples: int) -> list[dict[str, Any]]:
    """Records of the cells of one merge and calibration size: from the cache, or fitted and measured now."""
    base = job_of(merge, samples)
    jobs = {cell: settings_of(base, cell) for cell in cells}
    records: dict[tuple[str, Cell], dict[str, Any]] = {}
    missing = []
    held_out = {d.name: held_of(base, d, examples) for d in base.domains}
    plain = (Cell(merge, "none", samples), Cell(merge, "expert", samples))
    for domain in base.domains:
        for cell in (*cells, *plain):
            path = place(base, domain, held_out[domain.name], cell, jobs.get(cell))
            if path.is_file():
                records[domain.name, cell] = read_json(path)
            else:
                missing.append((domain, cell, path))
    in_order = [(d.name, cell) for d in base.domains for cell in (*cells, *plain)]
    if not missing:
        return [records[key] for key in in_order]
    fitting: dict[str, DomainJob] = {}
    for domain in base.domains:
        due = [jobs[cell] for d, cell, _ in missing if d is domain and cell in jobs]
        if any(d is domain for d, _, _ in missing):
            layers = sorted({layer for job in due for layer in layers_needed(job)})
            nats = any(map(wants_entropy, due))
            fitting[domain.name], expert = run_expert(base, domain, layers, entropies=nats)
            for job in due:
                expert_extras(job, fitting[domain.name], split_of(job, domain)[0], expert)
            del expert
            held_out[domain.name], expert = run_expert(base, held_out[domain.name], [])
            del expert
    model = None
    for name in fitting:
        for domain in (fitting[name], held_out[name]):
            model = run_merged(base, domain, model)
    model = model or base.load(base.merged)
    readout = Readout(model)
    checks: dict[str, HeldOut] = {}
    for domain, cell, path in missing:
        held = held_out[domain.name]
        if domain.name not in checks:
            checks[domain.name] = HeldOut(base, held, model, readout, list(range(len(held.prompts.sequences))))
        begun = time.monotonic()
        correction, measured = measure(checks[domain.name], jobs.get(cell), cell, fitting[domain.name], model, readout)
        record = asdict(cell) | {
            "domain": domain.name,
            "parameters": correction.parameter_count,
            "seconds": round(time.monotonic() - begun, 1),
            "examples": by_example(measured),
        }
        write_text(path, json.dumps(record))
        records[domain.name, cell] = record
        print(f"{merge}, {domain.name}: {cell.correction} {samples} seed {cell.seed}", file=sys.stderr, flush=True)
    return [records[key] for key in in_order]


def held_of(job: Job, domain: DomainJob, examples: int) -> DomainJob:
    given = Domain(expert="", prompts=str(testbed.prompts(domain.name, "eval")), samples=examples)
    return with_eval_prompts(job, domain, read_examples(given, domain.name, Path.cwd()))


def place(job: Job, domain: DomainJob, held: DomainJob, cell: Cell, own: Job | None) -> Path:
    """Where a cell is kept: by models, prompts, settings and the code of the fits."""
    source = Path(sys.modules["mergedarts"].__file__ or "").parent
    code = digest_files([*(source / "fit").glob("*.py"), source / "correction.py", source / "measures.py"], source)
    settings = "" if own is None else own.run.model_dump_json(exclude={"merged", "domains"})
    parts = [job.merged_print, domain.expert_print, domain.prompts.digest, held.prompts.digest, settings, code]
    name = digest_text(cell.correction, str(cell.seed), *parts)
    return cache_dir() / "ablation" / f"{name}.json"


def measure(
    check: HeldOut, job: Job | None, cell: Cell, domain: DomainJob, model: Any, readout: Readout
) -> tuple[Correction, TokenMeasures]:
    """A cell's correction and the measures of held-out tokens with it."""
    if job is None:
        return Correction(), check.merged() if cell.correction == "none" else check.expert()
    fitted = split_of(job, domain)[0]
    if isinstance(rows := CORRECTIONS[cell.correction], int):
        correction = biases(job, domain, fitted, rows)
    else:
        correction = fit_domain(job, domain, model, readout, fitted).correction
    with torch.inference_mode():
        return correction, check.corrected(correction)


def biases(job: Job, domain: DomainJob, fitted: list[int], rows: int) -> Correction:
    """A table of position biases at the final site by the fit of `surgery`, with no low-rank part."""
    prompts = domain.prompts
    mine = torch.isin(torch.from_numpy(prompts.sequence_index()), torch.tensor(fitted))
    expert = job.store(domain.expert_print, prompts)
    fit = job.run.fit
    site = fit_adam(
        job.store(job.merged_print, prompts).load("final")["hidden"][mine],
        expert.load("final")["hidden"][mine],
        token_weights(None, torch.from_numpy(prompts.predicts())[mine], "l1", 1, 1),
        torch.from_numpy(prompts.positions())[mine],
        rank=0, position=Position("table", rows), steps=fit.steps, lr=fit.lr, seed=fit.seed,
    )  # fmt: skip
    return Correction({"final": site})


def by_example(measured: TokenMeasures) -> dict[str, list[float]]:
    """Each measure's mean over the response tokens of each held-out example (EWL1 weighs them by entropy)."""
    _, index = measured.sequence.unique(return_inverse=True)
    out = {}
    for name, (a, b) in measured.sums().items():
        if name != "kl_high":  # an example may have no such token
            sums = [torch.zeros(int(index.max()) + 1, dtype=torch.float64).index_add_(0, index, x) for x in (a, b)]
            out[name] = (sums[0] / sums[1].clamp(min=1e-12)).tolist()
    return out


# --------------------------------------------------------------------------------------------------------- generation


def generation(names: list[str]) -> list[dict[str, Any]]:
    """Scores of what the models write on all examples of the testbed's tasks, by example, one seed."""
    from mergedarts.evaluation.lm import CausalLM

    folder = testbed.folder() / "tasks"
    tasks = harness.Tasks(
        [f"testbed_{d}" for d in testbed.DOMAINS], harness.Settings((folder,), chat=True, batch_size=BATCH)
    )
    base = job_of(TA, 50)
    tokenizer = load_tokenizer(base.merged)
    jobs = {name: settings_of(base, Cell(TA, name, 50)) for name in names}
    layers = sorted({layer for job in jobs.values() for layer in layers_needed(job)})
    out: list[dict[str, Any]] = []

    def score(domain: DomainJob, name: str, print_: str, model: Any) -> None:
        def make() -> CausalLM:
            return CausalLM(f"{name}, {domain.name}", pretrained=model, tokenizer=tokenizer, batch_size=BATCH)

        found = harness.evaluate(tasks, f"testbed_{domain.name}", print_, make)
        for (metric, _), values in found.scores.items():
            out.append({"domain": domain.name, "correction": name, "metric": metric, "scores": values})
        print(f"{domain.name}: {name} has written", file=sys.stderr, flush=True)

    for plain in base.domains:
        expert = base.load(plain.expert)
        score(plain, "expert", plain.expert_print, expert)
        domain, _ = run_expert(base, plain, layers, entropies=any(map(wants_entropy, jobs.values())))
        for job in jobs.values():
            expert_extras(job, domain, split_of(job, domain)[0], expert)
        del expert
        model = run_merged(base, domain, None) or base.load(base.merged)
        score(domain, "none", base.merged_print, model)
        readout = Readout(model)
        for name, job in jobs.items():
            correction = fit_domain(job, domain, model, readout, split_of(job, domain)[0]).correction
            print_ = digest_text(base.merged_print, name, digest_tensors(correction.state_dict()))
            with attach(model, {domain.name: correction}, domain.name):
                score(domain, name, print_, model)
    return out


if __name__ == "__main__":
    main()
