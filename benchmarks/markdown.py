"""Prints the tables of the docs from the JSON of `fit.py`.

python benchmarks/markdown.py fit.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for domain, rows in result["domains"].items():
        first = rows["merged"]
        print(f"**{domain}** ({first['sequences']} held-out examples, {first['tokens']} response tokens)\n")
        print("| | parameters | EWL1 | KL [95%] | KL where H > 1 | agreement | NLL | gap closed [95%] |")
        print("|---|---|---|---|---|---|---|---|")
        for name, row in rows.items():
            low, high = row["kl_ci"]
            share = "" if name in ("merged", "expert") else f"{100 * row['share_closed']:.0f}% "
            share += f"[{100 * row['share_ci'][0]:.0f}, {100 * row['share_ci'][1]:.0f}]" if share else ""
            print(
                f"| {name} | {row['parameters']:,} | {row['ewl1']:.4f} | {row['kl']:.4f} [{low:.4f}, {high:.4f}] "
                f"| {row['kl_high']:.4f} | {row['agreement']:.1%} | {row['nll']:.3f} | {share} |"
            )
        for what, value in result["paired"].get(domain, {}).items():
            print(f"\n{what}, paired: {value['ratio']:.2f} [{value['ci'][0]:.2f}, {value['ci'][1]:.2f}]")
        print()
    print("Seconds of fit, three domains:", ", ".join(f"{k} {v:.0f}" for k, v in result["seconds"].items()))


if __name__ == "__main__":
    main()
