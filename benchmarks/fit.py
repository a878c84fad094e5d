"""What each way of repairing is worth at its parameters: presets, closed forms, budgets, and a truncated-SVD LoRA.

One run on the testbed, every variant on the same features and the same held-out examples; prints a table, or JSON with
`--json`. `--keep FILE` writes each domain down once it is measured; a run that was cut goes on from there.
`--experts DIR --merged DIR` measures other experts (folders `math`, `code`, `instruct`), such as full fine-tunes by
`testbed/train.py --full`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mergedarts import testbed
from mergedarts.cli.main import quiet_libraries
from mergedarts.config import Domain, parse_run
from mergedarts.domains import split_of
from mergedarts.features import Readout
from mergedarts.files import write_text
from mergedarts.fit import expert_extras, fit_domain
from mergedarts.fit.plan import wants_entropy
from mergedarts.heldout import HeldOut
from mergedarts.job import prepare, run_expert, run_merged, with_eval_prompts
from mergedarts.measures import TokenMeasures, bootstrap
from mergedarts.models import load_config, parameter_count
from mergedarts.prompts import read_examples

#: Parameters of a rank-1 LoRA on every linear layer of the testbed, and of every fifth layer at rank 16.
LORA1, FIFTH = 305_280, 138_240


def variants(total: int, domains: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Settings by name; budgets written as shares of the model for all domains together."""

    def share(each: int) -> float:
        return each * domains / total

    out: dict[str, dict[str, Any]] = {
        "surgery": {"preset": "surgery"},
        "paper": {"preset": "paper"},
        "closed form, final": {"correction": {"sites": "final", "rank": 16}},
        "default 0.1%": {"budget": 0.001},
        "default 0.3%": {"budget": 0.003},
        "default 1%": {"budget": 0.01},
        "default 138k": {"budget": share(FIFTH)},
        "default 305k": {"budget": share(LORA1)},
        "full metric 138k": {"budget": share(FIFTH), "fit": {"metric": "fisher"}},
        "svd 0.1%": {"correction": {"form": "svd"}, "budget": 0.001},
        "svd 0.3%": {"correction": {"form": "svd"}, "budget": 0.003},
        "svd 1%": {"correction": {"form": "svd"}, "budget": 0.01},
        "svd 305k": {"correction": {"form": "svd"}, "budget": share(LORA1)},
        "linear 305k": {"correction": {"form": "linear"}, "budget": share(LORA1)},
        "residual 0.3%": {"correction": {"form": "residual"}, "budget": 0.003},
        "residual 305k": {"correction": {"form": "residual"}, "budget": share(LORA1)},
        "residual 1%": {"correction": {"form": "residual"}, "budget": 0.01},
        "states metric 0.3%": {"correction": {"form": "residual"}, "fit": {"metric": "states"}, "budget": 0.003},
    }
    return {k: v for k, v in out.items() if not quick or k in ("paper", "default 0.1%", "svd 0.1%")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--samples", type=int, default=50, help="calibration prompts a domain")
    parser.add_argument("--examples", type=int, default=60, help="held-out examples a domain")
    parser.add_argument("--domains", default=",".join(testbed.DOMAINS))
    parser.add_argument("--variants", help="names, separated by ';' (all of them if not given)")
    parser.add_argument("--quick", action="store_true", help="three variants")
    parser.add_argument("--experts", type=Path, help="folder with an expert for each domain")
    parser.add_argument("--merged", type=Path, help="their merge")
    parser.add_argument("--data", type=Path, help="folder with DOMAIN_calib.jsonl and DOMAIN_eval.jsonl")
    parser.add_argument("--keep", type=Path, help="file for the domains measured so far")
    args = parser.parse_args()
    quiet_libraries()
    kept: dict[str, Any] = {"domains": {}, "seconds": {}, "paired": {}, "feature_seconds": 0.0}
    if args.keep and args.keep.exists():
        kept = json.loads(args.keep.read_text(encoding="utf-8"))
        asked = set(args.variants.split(";") if args.variants else variants(1, 1, args.quick))
        if any(asked - set(rows_) for rows_ in kept["domains"].values()):
            raise SystemExit(f"{args.keep} was made with other variants; remove it, or name another file.")
    names = args.domains.split(",")
    for domain in names if args.keep else [args.domains]:
        if domain not in kept["domains"]:
            merge(kept, benchmark(args, domain))
            if args.keep:
                write_text(args.keep, json.dumps(kept))
    result = kept
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds the domains of another result; seconds are summed."""
    into["domains"] |= other["domains"]
    into["paired"] |= other["paired"]
    into["feature_seconds"] = round(into["feature_seconds"] + other["feature_seconds"], 1)
    for name, seconds in other["seconds"].items():
        into["seconds"][name] = round(into["seconds"].get(name, 0.0) + seconds, 2)


def benchmark(args: argparse.Namespace, domains: str) -> dict[str, Any]:
    """Every variant on every domain: {"domains": {D: {VARIANT: measures}}, "seconds": ..., "paired": ...}."""

    def data(domain: str, part: str) -> str:
        return str(args.data / f"{domain}_{part}.jsonl" if args.data else testbed.prompts(domain, part))

    names = domains.split(",")
    settings: dict[str, Any] = {
        "merged": str(args.merged or testbed.merged_model()),
        "domains": {
            d: {
                "expert": str(args.experts / d) if args.experts else testbed.expert(d),
                "prompts": data(d, "calib"),
                "samples": args.samples,
            }
            for d in names
        },
    }
    start = time.monotonic()
    base = prepare(parse_run(settings), Path.cwd())
    total = parameter_count(model := base.load(base.merged))
    del model
    chosen = variants(total, len(testbed.DOMAINS), args.quick)
    if args.variants:
        chosen = {name: chosen[name] for name in args.variants.split(";")}
    jobs = {}
    for name, extra in chosen.items():
        run = parse_run(settings | extra)
        # A budget is for all three domains, however many are measured.
        jobs[name] = replace(
            base, run=run.model_copy(update={"budget": run.budget * len(names) / len(testbed.DOMAINS)})
        )
    held, fitting = [], []
    for domain in base.domains:
        depths = list(range(load_config(base.merged).num_hidden_layers))
        fit_on, expert = run_expert(base, domain, depths, entropies=any(map(wants_entropy, jobs.values())))
        for job in jobs.values():
            expert_extras(job, fit_on, split_of(job, fit_on)[0], expert)
        given = Domain(expert="", prompts=data(domain.name, "eval"), samples=args.examples)
        other = with_eval_prompts(base, domain, read_examples(given, domain.name, Path.cwd()))
        ready, expert = run_expert(base, other, [])
        fitting.append(fit_on)
        held.append(ready)
        del expert
    model = None
    for domain in [*fitting, *held]:
        model = run_merged(base, domain, model)
    model = model or base.load(base.merged)
    readout = Readout(model)
    out: dict[str, Any] = {"domains": {}, "seconds": dict.fromkeys(jobs, 0.0), "paired": {}}
    out["feature_seconds"] = round(time.monotonic() - start, 1)
    for fit_on, domain in zip(fitting, held, strict=True):
        check = HeldOut(base, domain, model, readout, list(range(len(domain.prompts.sequences))))
        measures: dict[str, TokenMeasures] = {"merged": check.merged(), "expert": check.expert()}
        measures["expert, merged head"] = check.expert_under_merged_head()
        parameters = dict.fromkeys(measures, 0)
        for name, job in jobs.items():
            begun = time.monotonic()
            correction = fit_domain(job, fit_on, model, readout, split_of(job, fit_on)[0]).correction
            out["seconds"][name] = round(out["seconds"][name] + time.monotonic() - begun, 2)
            measures[name] = check.corrected(correction)
            parameters[name] = correction.parameter_count
            print(f"{domain.name}: {name} KL {measures[name].means()['kl']:.5f}", file=sys.stderr, flush=True)
        out["domains"][domain.name] = rows(measures, parameters)
        for a, b in (("default 305k", "svd 305k"), ("default 1%", "svd 1%"), ("default 0.1%", "paper")):
            if a in measures and b in measures:
                out["paired"].setdefault(domain.name, {})[f"KL {a} / {b}"] = ratio(measures[a], measures[b])
    return out


def rows(measures: dict[str, TokenMeasures], parameters: dict[str, int]) -> dict[str, Any]:
    """Means with 95% intervals over sequences."""
    out: dict[str, Any] = {}
    merged = measures["merged"]
    for name, sample in measures.items():
        row: dict[str, Any] = sample.means()
        row["parameters"] = parameters[name]
        row["kl_ci"] = list(bootstrap({"x": sample}, lambda m: m["x"]["kl"]))
        row["kl_high_ci"] = list(bootstrap({"x": sample}, lambda m: m["x"]["kl_high"]))
        row["share_closed"] = 1 - row["kl"] / merged.means()["kl"]
        row["share_ci"] = list(bootstrap({"m": merged, "x": sample}, lambda m: 1 - m["x"]["kl"] / m["m"]["kl"]))
        out[name] = row
    return out


def ratio(a: TokenMeasures, b: TokenMeasures) -> dict[str, Any]:
    """KL of a over KL of b on the same tokens, paired by sequence."""
    low, high = bootstrap({"a": a, "b": b}, lambda m: m["a"]["kl"] / m["b"]["kl"])
    return {"ratio": float(a.kl.sum() / b.kl.sum()), "ci": [low, high]}


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    console = Console()
    for domain, variants_ in result["domains"].items():
        first = variants_["merged"]
        table = Table(title=f"{domain}: {first['sequences']} examples, {first['tokens']} tokens", title_justify="left")
        for column in (
            "variant",
            "parameters",
            "EWL1",
            "KL [95%]",
            "KL where H > 1",
            "agreement",
            "NLL",
            "share [95%]",
        ):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for name, row in variants_.items():
            table.add_row(
                name, f"{row['parameters']:,}", f"{row['ewl1']:.4f}",
                f"{row['kl']:.4f} \\[{row['kl_ci'][0]:.4f}, {row['kl_ci'][1]:.4f}]", f"{row['kl_high']:.4f}",
                f"{row['agreement']:.1%}", f"{row['nll']:.3f}",
                f"{row['share_closed']:.0%} \\[{row['share_ci'][0]:.0%}, {row['share_ci'][1]:.0%}]",
            )  # fmt: skip
        console.print(table)
        for what, value in result["paired"].get(domain, {}).items():
            console.print(f"{what}: {value['ratio']:.2f} \\[{value['ci'][0]:.2f}, {value['ci'][1]:.2f}]")
    console.print("seconds of fit, all domains:", result["seconds"], "features:", result["feature_seconds"])


if __name__ == "__main__":
    main()
