"""What the exports of a repaired model cost, and whether they write what the original writes.

Calibrates the testbed by the default, exports every form and domain, and writes greedy answers to held-out prompts:
original against `hub`, `lora` against `folded`, the latter two in bfloat16 and in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mergedarts
from mergedarts import parse_run, testbed
from mergedarts.cli.main import quiet_libraries
from mergedarts.config import Domain
from mergedarts.export import export
from mergedarts.export.hub import load_hub
from mergedarts.models import ModelRef, load_model
from mergedarts.prompts import read_examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=50, help="calibration prompts a domain")
    parser.add_argument("--prompts", type=int, default=30, help="held-out prompts a domain")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--domains", default=",".join(testbed.DOMAINS))
    parser.add_argument("--json", action="store_true", help="on one line")
    args = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args)
    print(json.dumps(result, indent=None if args.json else 1))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """{"domains": {D: {"lora", "folded": what the export says, "equal": {PAIR: answers}}}, "logits": ...}."""
    domains = {
        d: {"expert": testbed.expert(d), "prompts": str(testbed.prompts(d, "calib")), "samples": args.samples}
        for d in args.domains.split(",")
    }
    mergedarts.calibrate(parse_run({"merged": str(testbed.merged_model()), "domains": domains}), folder / "repaired")
    hub = export(folder / "repaired", "hub", folder / "hub")
    lora = export(folder / "repaired", "lora", folder / "lora")
    out: dict[str, Any] = {"prompts": args.prompts, "tokens": args.tokens, "logits": hub["logits"], "domains": {}}
    original, tokenizer, handle = mergedarts.load(folder / "repaired")
    exported = load_hub(folder / "hub", original.dtype, original.device)
    for domain in domains:
        folded = export(folder / "repaired", "folded", folder / domain, domain=domain)
        given = Domain(expert="", prompts=str(testbed.prompts(domain, "eval")), samples=args.prompts)
        texts = [
            tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in e.turns[: -1 if e.has_response else None]],
                add_generation_prompt=True,
                tokenize=False,
            )
            for e in read_examples(given, domain, Path.cwd())
        ]

        def answers(model: Any, texts: list[str] = texts, **options: Any) -> list[list[int]]:
            return generate(model, tokenizer, texts, args.tokens, **options)

        handle.domain = domain
        want = answers(original)
        equal = {"original, hub": same(want, answers(exported, domain=domain))}
        for dtype in (torch.bfloat16, torch.float32):
            plain = answers(load_model(ModelRef(str(folder / domain)), dtype, original.device))
            tuned = answers(with_adapter(folder / "lora" / domain, dtype, original.device))
            name = str(dtype).removeprefix("torch.")
            equal[f"lora, folded, {name}"] = same(tuned, plain)
            equal[f"original, lora, {name}"] = same(want, tuned)
        out["domains"][domain] = {"lora": lora["domains"][domain], "folded": folded["domains"][domain], "equal": equal}
        print(f"{domain}: {equal}", file=sys.stderr, flush=True)
    return out


def with_adapter(adapter: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The merged model with an adapter, as PEFT loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(ModelRef(str(testbed.merged_model())), dtype, device), str(adapter))


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, texts: list[str], tokens: int, **options: Any) -> list[list[int]]:
    """Greedy answers, ten prompts at a time, padded on the left."""
    out: list[list[int]] = []
    for start in range(0, len(texts), 10):
        batch = tokenizer(
            texts[start : start + 10], return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        ids = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **options)
        out += ids[:, batch["input_ids"].shape[1] :].tolist()
    return out


def same(a: list[list[int]], b: list[list[int]]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
