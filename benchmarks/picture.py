"""Draws the README's picture from the JSON of `fit.py`: share of the KL gap closed against parameters added.

python benchmarks/fit.py --json > fit.json && python benchmarks/picture.py fit.json docs/fit.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FAMILIES = {
    "mergedarts (default)": ("#1b6ca8", "o-", ("default 0.1%", "default 0.3%", "default 305k", "default 1%")),
    "LoRA by truncated SVD": ("#c0562b", "s--", ("svd 0.1%", "svd 0.3%", "svd 305k", "svd 1%")),
    "DARTS as published": ("#3b8a4c", "D", ("paper",)),
    "Representation Surgery": ("#8a5fa8", "^", ("surgery",)),
}


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    domains = result["domains"]
    figure, axes = plt.subplots(1, len(domains), figsize=(4.0 * len(domains), 4.2), sharey=True, squeeze=False)
    for axis, (domain, rows) in zip(axes[0], domains.items(), strict=True):
        for label, (colour, style, names) in FAMILIES.items():
            points = [rows[name] for name in names if name in rows]
            if not points:
                continue
            x = [p["parameters"] / 1000 for p in points]
            y = [100 * p["share_closed"] for p in points]
            low = [100 * (p["share_closed"] - p["share_ci"][0]) for p in points]
            high = [100 * (p["share_ci"][1] - p["share_closed"]) for p in points]
            axis.errorbar(x, y, yerr=[low, high], fmt=style, color=colour, label=label, capsize=3, markersize=6)
        axis.axhline(0, color="#888888", linewidth=0.8)
        axis.set_xscale("log")
        ticks = [25, 50, 100, 200, 400]
        axis.set_xticks(ticks, [f"{t}k" for t in ticks])
        axis.minorticks_off()
        axis.set_title(f"{domain} ({rows['merged']['sequences']} held-out examples)", fontsize=11)
        axis.set_xlabel("parameters added for the domain")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("KL gap to the expert closed, %")
    axes[0][0].set_ylim(-12, 100)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(sys.argv[2], dpi=160)


if __name__ == "__main__":
    main()
