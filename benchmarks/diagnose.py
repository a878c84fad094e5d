"""What a diagnosis of the testbed costs beside the two forward passes that it shares with `calibrate`, and its memory.

Each part in a process of its own with an empty feature store. Seconds are of the processor, all threads together, so
that other work on the machine does not count; loading models is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergedarts import parse_run, testbed
from mergedarts.cli.main import quiet_libraries
from mergedarts.domains import split_of
from mergedarts.drift import Case, assemble, domain_drift, layer_drift
from mergedarts.features import Readout
from mergedarts.heldout import HeldOut
from mergedarts.job import prepare, run_expert, run_merged
from mergedarts.models import load_config, load_tokenizer
from mergedarts.report import write_report

PARTS = ("passes", "final", "layers")


def run(what: str, store: Path) -> dict[str, Any]:
    """The work of one process: the passes alone, with the final-site diagnosis, or with layers as well."""
    settings = parse_run(
        {
            "merged": str(testbed.merged_model()),
            "domains": {
                d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib"))} for d in testbed.DOMAINS
            },
        }
    )
    os.environ["MERGEDARTS_CACHE"] = str(store)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start

    job = prepare(settings, Path.cwd())
    depth = load_config(job.merged).num_hidden_layers
    cases = []
    for domain in job.domains:
        expert = job.load(domain.expert)
        with timed("expert pass"):
            ready, _ = run_expert(job, domain, [], expert)
        fitted, measured = split_of(job, ready)
        cases.append(Case(ready, fitted, ready, measured))
        if what == "layers":
            with timed("by layer"):
                subset = replace(ready, prompts=ready.prompts.subset(measured))
                run_expert(job, subset, list(range(depth)), expert)
        del expert
    model = job.load(job.merged)
    for case in cases:
        with timed("merged pass"):
            run_merged(job, case.held, model)
    domains, sums = {}, {}
    for case in cases if what != "passes" else ():
        with timed("final site"):
            readout, tokenizer = Readout(model), load_tokenizer(job.merged)
            held = HeldOut(job, case.held, model, readout, case.measured)
            states = {"merged": held.merged_states}
            measures = {"merged": held.measure(held.merged_states)}
        layers = {}
        if what == "layers":
            with timed("by layer"):
                layers["merged"], _ = layer_drift(job, case, held, model, depth, "merged")
        with timed("final site"):
            found = domain_drift(job, case, held, readout, tokenizer, states, measures, layers)
            domains[case.held.name], sums[case.held.name] = found
    if domains:
        with timed("report"):
            write_report(assemble(job, domains, sums), store / "report")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    tokens = sum(case.held.prompts.tokens for case in cases)
    return {"seconds": {k: round(v, 1) for k, v in seconds.items()}, "peak_rss_bytes": peak, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    quiet_libraries()
    if args.part:
        print(json.dumps(run(args.part, args.store)))
        return
    testbed.merged_model()
    out: dict[str, Any] = {}
    for part in PARTS:
        with tempfile.TemporaryDirectory() as store:
            command = [sys.executable, __file__, "--part", part, "--store", store]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        out[part] = json.loads(done.stdout.splitlines()[-1])
    seconds = out["layers"]["seconds"]
    passes = seconds["expert pass"] + seconds["merged pass"]
    out["final_share"] = round(out["final"]["seconds"]["final site"] / passes, 3)
    out["layers_ratio"] = round((passes + seconds["final site"] + seconds["by layer"]) / passes, 3)
    out["layers_memory_ratio"] = round(out["layers"]["peak_rss_bytes"] / out["passes"]["peak_rss_bytes"], 3)
    if args.json:
        print(json.dumps(out))
        return
    for part in PARTS:
        print(f"{part}: {out[part]['seconds']}, peak {out[part]['peak_rss_bytes'] / 2**30:.2f} GiB")
    print(
        f"final-site diagnosis adds {out['final_share']:.1%} to the two passes over {out['layers']['tokens']:,} tokens"
    )
    print(f"with layers {out['layers_ratio']:.2f} times them, {out['layers_memory_ratio']:.2f} times their peak memory")


if __name__ == "__main__":
    main()
