"""`calibrate` against its limit: the same tokens once through the bare expert and once through the bare merged model.

Every measurement is a process of its own with an empty feature store; the two kinds take turns, and ratios are of
medians. A bare pass runs each decoder over the same batches and keeps nothing. Loading of models is timed apart, and
is in no ratio but those of all of `calibrate`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mergedarts import RunFile, calibrate, parse_run, testbed
from mergedarts.cli.main import quiet_libraries
from mergedarts.features import batches, padded
from mergedarts.fit.closed_form import Statistics
from mergedarts.fit.fisher import FisherPass
from mergedarts.fit.sweep import Site
from mergedarts.job import Job, prepare
from mergedarts.layerwise import LayerRunner
from mergedarts.models import outline, parameter_count


class Meter:
    """Seconds of the wall and of the CPU by what was done, and the peak memory before anything was and at the end."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.before = 0  # the first model is loaded: interpreter, libraries, prompts and what reading these left

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, metered."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "load" and not self.before:
                self.before = peak_rss()
            wall, cpu = time.monotonic(), time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.wall[name] = self.wall.get(name, 0.0) + time.monotonic() - wall
                self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu

        return run

    def result(self) -> dict[str, Any]:
        return {"wall": self.wall, "cpu": self.cpu, "rss_before_bytes": self.before, "peak_rss_bytes": peak_rss()}


def peak_rss() -> int:
    """The most bytes of resident memory, mapped files included, that this process has had.

    On Linux, `getrusage` would count what the process that started this one had at the time.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def settings(samples: int, domains: int, metric: str, dtype: str) -> RunFile:
    """A run over the testbed."""
    chosen = testbed.DOMAINS[:domains]
    return parse_run(
        {
            "merged": str(testbed.merged_model()),
            "fit": {"metric": metric},
            "dtype": dtype,
            "domains": {
                d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib")), "samples": samples}
                for d in chosen
            },
        }
    )


@torch.inference_mode()
def bare_pass(model: Any, job: Job, domain: int) -> None:
    """A domain's tokens once through a decoder."""
    prompts = job.domains[domain].prompts
    for batch in batches(prompts):
        model.get_decoder()(input_ids=padded(prompts, batch, job.device), use_cache=False)


def bare(run: RunFile, meter: Meter) -> None:
    """Both passes of every domain; the merged model is loaded once."""
    job = prepare(run, Path.cwd())
    load, run_pass = meter.timed("load", job.load), meter.timed("passes", bare_pass)
    for i, domain in enumerate(job.domains):
        model = load(domain.expert)
        run_pass(model, job, i)
        del model
    model = load(job.merged)
    for i in range(len(job.domains)):
        run_pass(model, job, i)


def metered_calibration(run: RunFile, meter: Meter, out: Path) -> None:
    """`calibrate` as it is, with its parts metered from outside."""
    import mergedarts.features as features
    import mergedarts.job as job

    job.load_model = meter.timed("load", job.load_model)
    features.final_states = meter.timed("expert's pass", features.final_states)
    FisherPass.run = meter.timed("expert's metric", FisherPass.run)  # type: ignore[method-assign]
    Statistics.plain = meter.timed("Gram matrices of the fit", Statistics.plain)  # type: ignore[method-assign]
    Site.choose = meter.timed("choice of ridge and position", Site.choose)  # type: ignore[method-assign]
    Site.fit = meter.timed("fit of the sites", Site.fit)  # type: ignore[method-assign]
    LayerRunner.step = _step(meter)  # type: ignore[method-assign]
    seconds = meter.timed("calibrate", calibrate)(run, out)["seconds"]
    meter.wall |= {f"stage: {name}": value for name, value in seconds.items()}


def _step(meter: Meter) -> Any:
    step = LayerRunner.step

    def metered(self: LayerRunner) -> Any:
        inner = step(self)
        following = meter.timed("merged pass in the sweep", lambda: next(inner, None))
        while (done := following()) is not None:
            yield done

    return metered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=50, help="prompts a domain")
    parser.add_argument("--domains", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--metric", default="auto", choices=("auto", "states"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", action="store_true", help="print every run, not the medians alone")
    parser.add_argument("--only", choices=("bare", "calibrate"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet_libraries()
    run = settings(given.samples, given.domains, given.metric, given.dtype)
    if given.only:
        meter = Meter()
        if given.only == "bare":
            bare(run, meter)
        else:
            os.environ["MERGEDARTS_CACHE"] = os.environ["LIMIT_STORE"]
            metered_calibration(run, meter, Path(os.environ["LIMIT_STORE"]) / "out")
        print(json.dumps(meter.result()))
        return
    runs: dict[str, list[dict[str, Any]]] = {"bare": [], "calibrate": []}
    for _ in range(given.repeats):
        for what, results in runs.items():
            with tempfile.TemporaryDirectory() as store:
                command = [sys.executable, __file__, *sys.argv[1:], "--only", what]
                environment = os.environ | {"LIMIT_STORE": store}
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    job = prepare(run, Path.cwd())
    rows = [sum(len(b) * max(len(d.prompts.sequences[i]) for i in b) for b in batches(d.prompts)) for d in job.domains]
    tokens = sum(d.prompts.tokens for d in job.domains)
    report: dict[str, Any] = {"tokens": tokens, "padding": 1 - tokens / sum(rows), "threads": torch.get_num_threads()}
    for what, results in runs.items():
        report[what] = {
            kind: {name: statistics.median(r[kind][name] for r in results) for name in results[0][kind]}
            for kind in ("wall", "cpu")
        } | {name: statistics.median(r[name] for r in results) for name in ("rss_before_bytes", "peak_rss_bytes")}
    for kind in ("wall", "cpu"):
        limit = report["bare"][kind]["passes"]
        report[f"{kind}_ratio"] = report["calibrate"][kind]["calibrate"] / limit
    wall = report["calibrate"]["wall"]
    stages = ("expert features", "expert's metric", "merged features", "fit")
    stages_wall = sum(wall[f"stage: {name}"] for name in stages) - wall["load"]  # every load is in one of these
    report["features_and_fit_ratio"] = stages_wall / report["bare"]["wall"]["passes"]
    own = wall["choice of ridge and position"] + wall["fit of the sites"]
    report["fit_alone_ratio"] = own / report["bare"]["wall"]["passes"]
    report["model_bytes"] = parameter_count(outline(job.merged)) * job.dtype.itemsize
    report["memory_ratio"] = report["calibrate"]["peak_rss_bytes"] / report["bare"]["peak_rss_bytes"]
    print(json.dumps(report | ({"runs": runs} if given.json else {}), indent=None if given.json else 1))


if __name__ == "__main__":
    main()
