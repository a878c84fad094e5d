"""What corrections cost in speed: tokens a second of decoding and of prefill, with and without them.

On the testbed's merged model (or `--model DIR`), paired: all variants take each single step in turn, so that what else
the machine does meets them alike, and a figure is the median over steps of the ratio to the bare model's speed in the
same step, with its 95% bootstrap interval. The variants share their weights. Speed does not depend on the values of a
correction, so these are zeros of the default's shapes; nothing has to be calibrated. Prints a table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

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


Timed = dict[str, list[float]]


def twin(model: Any) -> Any:
    """A model of the same weights, not of copies of them, with hooks of its own."""
    shared = [*model.parameters(), *model.buffers()]
    return deepcopy(model, {id(tensor): tensor for tensor in shared})


def timed(model: Any, **inputs: Any) -> tuple[float, Any]:
    """Seconds of one pass, with all work done that was asked for, and what it gave."""
    start = now(model)
    out = model(**inputs)
    return now(model) - start, out


def now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def turns(names: list[str], count: int) -> Iterator[list[str]]:
    """The names in an order that moves on by one each time."""
    for i in range(count):
        yield names[i % len(names) :] + names[: i % len(names)]


@torch.inference_mode()
def prefill(models: dict[str, Any], batch: int, length: int, count: int) -> Timed:
    """Seconds of passes over a batch of prompts, by model."""
    seconds: Timed = {name: [] for name in models}
    for number, names in enumerate(turns(list(models), count + 1)):
        ids = torch.randint(5, 1000, (batch, length), device=models["bare"].device)
        for name in names:
            # All logits: of a slice of the states, which is not contiguous, a CPU's bfloat16 product is far slower than
            # of the copy that a correction at the final site makes.
            took, _ = timed(models[name], input_ids=ids, use_cache=True)
            if number:  # the first warms up
                seconds[name].append(took)
    return seconds


@torch.inference_mode()
def decode(models: dict[str, Any], batch: int, prompt: int, count: int, restart: int = 32) -> Timed:
    """Seconds of single steps of greedy decoding, by model; after `restart` steps another prompt begins."""
    seconds: Timed = {name: [] for name in models}
    device = models["bare"].device
    mask = torch.ones(batch, prompt + restart, dtype=torch.long, device=device)
    last: dict[str, Any] = {}
    for number, names in enumerate(turns(list(models), count)):
        step = number % restart
        if step == 0:
            ids = torch.randint(5, 1000, (batch, prompt), device=device)
            for name, model in models.items():
                last[name] = model(input_ids=ids, attention_mask=mask[:, :prompt], use_cache=True, logits_to_keep=1)
        for name in names:
            out = last[name]
            cache = "cache" if hasattr(out, "cache") else "past_key_values"
            took, last[name] = timed(
                models[name], input_ids=out.logits[:, -1:].argmax(-1),
                attention_mask=mask[:, : prompt + step + 1], use_cache=True, **{cache: getattr(out, cache)},
            )  # fmt: skip
            seconds[name].append(took)
    return seconds


def summary(bare: np.ndarray, seconds: np.ndarray, tokens: int) -> dict[str, Any]:
    """Tokens a second, and the median ratio to the bare speed with its 95% bootstrap interval."""
    ratios = bare / seconds
    found = bootstrap((ratios,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    speed = tokens / float(np.median(seconds))
    return {"tokens_per_second": speed, "ratio": float(np.median(ratios)), "ci": [float(low), float(high)]}


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(
        ModelRef(str(args.model or testbed.merged_model())), DTYPES[args.dtype], pick_device(args.device)
    )
    layers = len(decoder_layers(model))
    models = {"bare": model}
    for name, sites, rank in (("final", 0, 0), ("six layers", 6, 6), (f"all {layers} layers", layers, 1)):
        models[name] = twin(model)
        attach(models[name], {"x": correction(model, sites, rank)}, "x")
    out: dict[str, Any] = {
        "model": args.model or "testbed", "dtype": args.dtype, "device": str(model.device),
        "machine": platform.machine(), "threads": torch.get_num_threads(), "pairs": args.pairs, "work": {},
    }  # fmt: skip
    work = {f"decode, batch {b}": partial(decode, models, b, args.prompt, args.pairs) for b in BATCHES}
    work |= {
        f"prefill of {args.length}, batch {b}": partial(prefill, models, b, args.length, max(2, args.pairs // 4))
        for b in (1, 4)
    }
    tokens = [*BATCHES, args.length, 4 * args.length]
    for (name, run), count in zip(work.items(), tokens, strict=True):
        seconds = {variant: np.array(values) for variant, values in run().items()}
        out["work"][name] = {variant: summary(seconds["bare"], values, count) for variant, values in seconds.items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--model", type=Path, help="another model folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--pairs", type=int, default=256, help="steps of decoding; a quarter as many prefills")
    parser.add_argument("--prompt", type=int, default=32, help="tokens before decoding begins")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prefill")
    args = parser.parse_args()
    quiet_libraries()
    result = benchmark(args)
    if args.json:
        print(json.dumps(result, default=str))
        return
    table = Table(title=f"speed relative to the bare model, median of {args.pairs} steps", title_justify="left")
    names = list(next(iter(result["work"].values())))
    for name in ("", "tokens/s bare", *names[1:]):
        table.add_column(name, justify="right" if name else "left")
    for name, row in result["work"].items():
        cells = (f"{row[v]['ratio']:.3f} \\[{row[v]['ci'][0]:.3f}, {row[v]['ci'][1]:.3f}]" for v in names[1:])
        table.add_row(name, f"{row['bare']['tokens_per_second']:,.0f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
