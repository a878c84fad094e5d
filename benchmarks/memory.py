"""Peak memory and seconds of `calibrate` on the testbed against one model run once over the same prompts.

Each in a process of its own with an empty feature store; prints both peaks and their ratio.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mergedarts import calibrate, parse_run, testbed
from mergedarts.cli.main import quiet_libraries


def run(what: str, store: Path) -> None:
    """The work of one process; prints its peak in bytes and its seconds."""
    quiet_libraries()
    start = time.monotonic()
    settings = parse_run(
        {
            "merged": str(testbed.merged_model()),
            "domains": {
                d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib"))} for d in testbed.DOMAINS
            },
        }
    )
    os.environ["MERGEDARTS_CACHE"] = str(store)
    if what == "calibrate":
        calibrate(settings, store / "out")
    else:
        from mergedarts.features import final_states
        from mergedarts.job import prepare

        job = prepare(settings, Path.cwd())
        model = job.load(job.merged)
        for domain in job.domains:
            final_states(model, domain.prompts, lambda batch, state: None, domain.name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"peak_rss_bytes": peak, "seconds": round(time.monotonic() - start, 1)}))


def main() -> None:
    if len(sys.argv) == 3:
        run(sys.argv[1], Path(sys.argv[2]))
        return
    quiet_libraries()
    testbed.merged_model()
    out = {}
    for what in ("one model", "calibrate"):
        with tempfile.TemporaryDirectory() as store:
            done = subprocess.run([sys.executable, __file__, what, store], capture_output=True, text=True, check=True)
        out[what] = json.loads(done.stdout.splitlines()[-1])
    out["memory_ratio"] = round(out["calibrate"]["peak_rss_bytes"] / out["one model"]["peak_rss_bytes"], 3)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
