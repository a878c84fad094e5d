"""How time and memory of `calibrate` grow with tokens, domains, width and processes, on random weights.

Every run is a process of its own (or a launcher of two) with an empty feature store; a row is the median of its
repeats, which take turns. An exponent is the slope of log seconds or log bytes on log size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from random_models import Shape, build, relative, write_prompts


def shape_of(width: int, layers: int) -> Shape:
    return Shape(width, layers, 2 * width, width // 64, max(1, width // 128), 1024)


def run(folder: Path, case: dict[str, int], layers: int, metric: str) -> dict[str, float]:
    """Seconds and peak bytes (summed over processes) of one calibration."""
    shape = shape_of(case["width"], layers)
    models = folder / f"width-{case['width']}"
    if not models.exists():
        build(models / "merged", shape)
        for i in range(8):
            relative(models / "merged", models / f"expert-{i}", shape, [i % layers], seed=1 + i, share=0.3)
    prompts = write_prompts(folder / f"{case['prompts']}.jsonl", case["prompts"], 128)
    settings = {
        "merged": str(models / "merged"), "budget": 0.02, "router": False,
        "correction": {"rank": 2, "position": "constant"}, "fit": {"metric": metric, "ridge": 1.0},
        "domains": {
            f"d{i}": {"expert": str(models / f"expert-{i}"), "prompts": str(prompts), "samples": case["prompts"]}
            for i in range(case["domains"])
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "darts.yml"
        file.write_text(yaml.safe_dump(settings))
        count, command = case["processes"], [sys.executable]
        if count > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command += ["-m", "mergedarts.cli", "calibrate", str(file), "--out", f"{name}/out", "--json"]
        threads = max(1, (os.cpu_count() or 1) // count)
        environment = os.environ | {"MERGEDARTS_CACHE": f"{name}/cache", "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.05)
        assert process.stdout is not None
        config = json.loads(process.stdout.read())
    stages = {k: v for k, v in config["seconds"].items() if k != "prepare"}
    return {"seconds": sum(stages.values()), "peak_bytes": peak, **{f"stage: {k}": v for k, v in stages.items()}}


def resident(pid: int) -> int:
    """Resident bytes of a process and its children."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return own + sum(resident(int(child)) for child in children)


def exponent(sizes: list[int], values: list[float]) -> float:
    return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="of 128 tokens, at the smallest size")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--metric", default="auto", choices=("auto", "fisher", "states"))
    parser.add_argument("--axes", nargs="+", default=["tokens", "domains", "width", "processes"])
    parser.add_argument("--json", action="store_true", help="one line")
    given = parser.parse_args()
    base = {"prompts": given.prompts, "domains": 1, "width": given.width, "processes": 1}
    axes = {
        "tokens": [base | {"prompts": given.prompts * n} for n in (1, 2, 4, 8)],
        "domains": [base | {"domains": n} for n in (1, 2, 4, 8)],
        "width": [base | {"width": n} for n in (256, 512, 1024, 2048)],
        "processes": [base | {"prompts": given.prompts * 4, "processes": n} for n in (1, 2)],
    }
    key = {"tokens": "prompts"}
    cases = [(axis, case) for axis in given.axes for case in axes[axis]]
    report: dict[str, object] = {"prompt_tokens": 128, "layers": given.layers, "metric": given.metric}
    with tempfile.TemporaryDirectory() as name:
        found: list[list[dict[str, float]]] = [[] for _ in cases]
        for _ in range(given.repeats):
            for results, (_, case) in zip(found, cases, strict=True):
                results.append(run(Path(name), case, given.layers, given.metric))
    for axis in given.axes:
        rows = [
            case | {k: round(statistics.median(r[k] for r in results), 3) for k in results[0]}
            for results, (its, case) in zip(found, cases, strict=True)
            if its == axis
        ]
        sizes = [row[key.get(axis, axis)] for row in rows]
        report[axis] = {"rows": rows}
        if axis == "processes":
            report[axis]["ratio"] = round(rows[1]["seconds"] / rows[0]["seconds"], 3)
        else:
            for what in ("seconds", "peak_bytes"):
                report[axis][f"{what}_exponent"] = exponent(sizes, [row[what] for row in rows])
    print(json.dumps(report, indent=None if given.json else 1))


if __name__ == "__main__":
    main()
