"""Calibrates a model of 3 billion random weights, larger than a limit on memory, streamed from disk.

The limit is one on resident memory: the kernel's own high-water mark of the process (VmHWM), mapped files included,
must stay below it; nothing is evicted to get there, as a control group would do it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_models import Shape, build, relative, write_prompts

SHAPE = Shape(width=3072, layers=28, feed=8192, heads=24, groups=8, vocabulary=32000)
SMALL = Shape(width=256, layers=4, feed=512, heads=4, groups=2, vocabulary=512)


def run(folder: Path, out: Path, metric: str, every: int, stream: bool) -> dict[str, object]:
    """Calibrate in this process; seconds by stage, peak memory and held-out KL."""
    from mergedarts import calibrate, parse_run
    from mergedarts.cli.main import quiet_libraries

    quiet_libraries()
    settings = parse_run(
        {
            "merged": str(folder / "merged"), "stream": stream, "budget": 0.05,
            "domains": {"one": {"expert": str(folder / "expert"), "prompts": str(folder / "prompts.jsonl")}},
            "correction": {"sites": {"every": every}, "rank": 4, "position": "constant"},
            "fit": {"metric": metric, "ridge": 1.0},
        }
    )  # fmt: skip
    start = time.monotonic()
    config = calibrate(settings, out)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    held = config["domains"]["one"]["held_out"]
    return {
        "seconds": round(time.monotonic() - start, 1), "stages": config["seconds"], "peak_rss_bytes": peak,
        "tokens": config["domains"]["one"]["tokens"], "sites": every, "metric": metric,
        "kl": {"merged": held["merged"]["kl"], "repaired": held["repaired"]["kl"]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=4e9, help="bytes of resident memory")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--length", type=int, default=32, help="tokens a prompt, response included")
    parser.add_argument("--every", type=int, default=7, help="a correction after every so many layers")
    parser.add_argument("--metric", default="fisher", choices=("fisher", "states"))
    parser.add_argument("--small", action="store_true", help="a model that fits, streamed and in memory")
    parser.add_argument("--folder", type=Path, help="where to build the models (7 GB); a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("--only", choices=("streamed", "resident"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        folder = given.folder
        print(json.dumps(run(folder, folder / given.only, given.metric, given.every, given.only == "streamed")))
        return
    shape = SMALL if given.small else SHAPE
    every = 1 if given.small else given.every
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        start = time.monotonic()
        build(folder / "expert", shape)
        relative(folder / "expert", folder / "merged", shape, [0, shape.layers // 2], seed=1, share=0.2)
        write_prompts(folder / "prompts.jsonl", given.prompts, given.length)
        report: dict[str, object] = {
            "parameters": shape.parameters, "model_bytes": 2 * shape.parameters, "limit_bytes": int(given.limit),
            "build_seconds": round(time.monotonic() - start, 1),
        }  # fmt: skip
        for what in ("streamed", "resident") if given.small else ("streamed",):
            options = ["--only", what, "--folder", str(folder), "--metric", given.metric, "--every", str(every)]
            environment = os.environ | {"MERGEDARTS_CACHE": str(folder / f"cache-{what}")}
            command = [sys.executable, __file__, *options]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            report[what] = json.loads(done.stdout.splitlines()[-1])
    streamed = report["streamed"]
    assert isinstance(streamed, dict)
    report["within_limit"] = streamed["peak_rss_bytes"] <= given.limit
    print(json.dumps(report, indent=None if given.json else 1))
    sys.exit(0 if report["within_limit"] else 1)


if __name__ == "__main__":
    main()
