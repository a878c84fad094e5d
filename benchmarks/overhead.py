"""What corrections cost in speed: tokens a second of decoding and of prefill, with and without them.

On the testbed's merged model (or `--model DIR`), paired: every round runs all variants in turn, and a figure is the
median over rounds of the ratio to the bare model's speed in the same round. Speed does not depend on the values of a
correction, so these are zeros of the default's shapes; nothing has to be calibrated. Prints a table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mergedarts import attach, testbed
from mergedarts.cli.main import quiet_libraries
from mergedarts.correction import Correction, Position, SiteCorrection
from mergedarts.models import DTYPES, ModelRef, decoder_layers, load_model, pick_device

BATCHES = (1, 8, 32)


def correction(model: Any, sites: int, rank: int) -> Correction:
    """The final site (`sites` 0), or some layers spread evenly; four cosines of log-position inside the rank."""
    width = model.get_output_embeddings().weight.shape[1]
    position = Position("smooth", 4, 512)

    def site(kind: Any, size: int) -> SiteCorrection:
        zeros = torch.zeros
        return SiteCorrection(kind, zeros(size, width), zeros(width, size), position=position, inner=zeros(4, size))

    names = [name for name, _ in decoder_layers(model)]
    if sites == 0:
        return Correction({"final": site("final", 16)})
    return Correction({names[(i + 1) * len(names) // sites - 1]: site("residual", rank) for i in range(sites)})


@torch.inference_mode()
def prefill(model: Any, batch: int, length: int) -> float:
    """Tokens a second of one pass over a batch of prompts."""
    ids = torch.randint(5, 1000, (batch, length), device=model.device)
    start = now(model)
    # All logits: of a slice of the states, which is not contiguous, a CPU's bfloat16 product is far slower than of the
    # copy that a correction at the final site makes.
    model(input_ids=ids, use_cache=True)
    return batch * length / (now(model) - start)


@torch.inference_mode()
def decode(model: Any, batch: int, prompt: int, steps: int) -> float:
    """Tokens a second of greedy decoding after a prompt that is not counted."""
    ids = torch.randint(5, 1000, (batch, prompt), device=model.device)
    mask = torch.ones(batch, prompt + steps, dtype=torch.long, device=model.device)
    out = model(input_ids=ids, attention_mask=mask[:, :prompt], use_cache=True, logits_to_keep=1)
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    name = "cache" if hasattr(out, "cache") else "past_key_values"
    start = now(model)
    for step in range(steps):
        ids = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=ids, attention_mask=mask[:, : prompt + step + 1], use_cache=True, **{name: cache})
    return batch * steps / (now(model) - start)


def now(model: Any) -> float:
    """Seconds, with all work done that was asked for."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(
        ModelRef(str(args.model or testbed.merged_model())), DTYPES[args.dtype], pick_device(args.device)
    )
    layers = len(decoder_layers(model))
    variants: dict[str, Correction | None] = {
        "bare": None,
        "final": correction(model, 0, 0),
        "six layers": correction(model, 6, 6),
        f"all {layers} layers": correction(model, layers, 1),
    }
    work = {f"decode, batch {b}": lambda b=b: decode(model, b, args.prompt, args.steps) for b in BATCHES}
    work |= {f"prefill, batch {b}": lambda b=b: prefill(model, b, args.length) for b in (1, 4)}
    speeds: dict[str, dict[str, list[float]]] = {name: {v: [] for v in variants} for name in work}
    for number in range(-1, args.rounds):  # the first round warms up
        order = list(variants)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name, run in work.items():
            for variant in order:
                made = variants[variant]
                with attach(model, {"x": made}, "x") if made is not None else nullcontext():
                    speed = run()
                if number >= 0:
                    speeds[name][variant].append(speed)
    out: dict[str, Any] = {
        "model": args.model or "testbed", "dtype": args.dtype, "device": str(model.device),
        "machine": platform.machine(), "threads": torch.get_num_threads(), "rounds": args.rounds, "work": {},
    }  # fmt: skip
    for name, by_variant in speeds.items():
        out["work"][name] = {}
        for variant, values in by_variant.items():
            ratios = sorted(v / bare for v, bare in zip(values, by_variant["bare"], strict=True))
            out["work"][name][variant] = {
                "tokens_per_second": statistics.median(values),
                "ratio": statistics.median(ratios),
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--model", type=Path, help="another model folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=32, help="tokens before decoding begins")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prefill")
    args = parser.parse_args()
    quiet_libraries()
    result = benchmark(args)
    if args.json:
        print(json.dumps(result, default=str))
        return
    table = Table(title=f"speed relative to the bare model, median of {args.rounds} rounds", title_justify="left")
    names = list(next(iter(result["work"].values())))
    for name in ("", "tokens/s bare", *names[1:]):
        table.add_column(name, justify="right" if name else "left")
    for name, row in result["work"].items():
        cells = (
            f"{row[v]['ratio']:.3f} \\[{row[v]['quartiles'][0]:.3f}, {row[v]['quartiles'][1]:.3f}]" for v in names[1:]
        )
        table.add_row(name, f"{row['bare']['tokens_per_second']:,.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
