"""The same input gives the same repair: byte for byte, and within rounding for other batches, threads and orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mergedarts
from mergedarts import features
from mergedarts.fit import fisher

from .conftest import World, write_lines

pytestmark = pytest.mark.slow

FOLDS = 3


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings(world: World, prompts: Path) -> dict[str, Any]:
    run = world.run("code", fit={"holdout": 0})
    run["domains"]["code"]["prompts"] = str(prompts)
    return run


def fitted(world: World, prompts: Path, out: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MERGEDARTS_CACHE", str(cache))
    mergedarts.calibrate(mergedarts.parse_run(settings(world, prompts)), out)
    return out


def logits(folder: Path, domain: str | None) -> torch.Tensor:
    model, tokenizer, _ = mergedarts.load(folder, domain=domain)
    ids = tokenizer("write f4(x) and f5(x) as def", return_tensors="pt").input_ids
    with torch.inference_mode():
        return model(input_ids=ids).logits.double()


def test_byte_for_byte(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        fitted(world, world.prompts("code"), tmp_path / f"out{i}", tmp_path / f"cache{i}", monkeypatch)
        for i in range(2)
    ]
    one, two = ((out / "corrections.safetensors").read_bytes() for out in made)
    assert one == two


@pytest.mark.parametrize("change", ["batches", "threads", "order"])
def test_within_rounding(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Sums in another order differ in the last bits of float32 products; the repair moves by less than 1e-3 of itself.

    The order is changed inside each fold, since what is in a fold is part of the input.
    """
    first = fitted(world, world.prompts("code"), tmp_path / "first", tmp_path / "cache", monkeypatch)
    prompts = world.prompts("code")
    if change == "batches":
        monkeypatch.setattr(features, "BATCH_TOKENS", 40)
        monkeypatch.setattr(fisher, "BATCH_TOKENS", 40)
    elif change == "threads":
        torch.set_num_threads(2)
    else:
        given = rows(prompts)
        order = [
            i
            for group in zip(*(reversed(range(f, len(given), FOLDS)) for f in range(FOLDS)), strict=True)
            for i in group
        ]
        assert sorted(order) == list(range(len(given)))
        assert all(i % FOLDS == at % FOLDS for at, i in enumerate(order))
        prompts = write_lines(tmp_path / "other.jsonl", [given[i] for i in order])
    try:
        other = fitted(world, prompts, tmp_path / "other", tmp_path / "cache2", monkeypatch)
    finally:
        torch.set_num_threads(1)
    bare, before, after = logits(first, None), logits(first, "code"), logits(other, "code")
    assert float((before - bare).abs().max()) > 0.1
    assert float((after - before).abs().max()) < 1e-3 * float((before - bare).abs().max())
