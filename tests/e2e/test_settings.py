"""What the settings of a run file do: each is done, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergedarts import job, parse_run

from .conftest import (
    Ran,
    World,
    calibrate,
    is_mistake,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "correction",
    [
        {"sites": "final"},
        {"sites": "final", "rank": 4, "position": "none"},
        {"sites": "all", "rank": 2},
        {"sites": {"every": 2}, "rank": 2},
        {"sites": [0, 2], "rank": 3},
        {"rank": "full"},
        {"rank": 4, "position": "constant"},
        {"rank": 4, "position": {"smooth": 4}},
        {"rank": 4, "positions": 16},
        {"form": "residual", "rank": 4},
        {"form": "linear", "rank": 1},
        {"form": "svd", "rank": 1},
    ],
    ids=str,
)
def test_what_the_run_file_asks_for_is_done_or_refused(
    world: World, tmp_path: Path, correction: dict[str, Any]
) -> None:
    """A setting that is accepted shows in what is written; one that cannot be done is a mistake and never ignored."""
    out, done = calibrate(world.run("code", correction=correction, budget=1), tmp_path)
    if done.code:
        is_mistake(done)
        return
    sites = json.loads((out / "darts_config.json").read_text())["sites"]["code"]
    entry = done.json["domains"]["code"]
    assert entry["shipped"], (entry, done.err)
    assert sites
    if correction.get("sites") == "final":
        assert [s["site"] for s in sites] == ["final"]
    if correction.get("sites") == "all":
        assert [s["site"] for s in sites] == [f"model.layers.{i}" for i in range(3)]
    if isinstance(correction.get("sites"), list):
        assert [s["site"] for s in sites] == ["model.layers.0", "model.layers.2"]
    if isinstance(correction.get("sites"), dict):
        assert [s["site"] for s in sites] == ["model.layers.1"]
    if isinstance(correction.get("rank"), int):
        assert {s["rank"] for s in sites} == {correction["rank"]}
    if correction.get("rank") == "full":
        assert max(s["rank"] for s in sites) == 32
    position = correction.get("position")
    if position == "none":
        assert all("position" not in s for s in sites)
    if isinstance(position, dict):
        assert {(s["position"]["form"], s["position"]["size"]) for s in sites} == {("smooth", 4)}
    if "positions" in correction:
        assert {(s["position"]["form"], s["position"]["size"]) for s in sites} == {("table", 16)}
    if correction.get("form") in ("linear", "svd"):
        assert {s["kind"] for s in sites} == {"linear"}


@pytest.mark.parametrize(
    "fit",
    [
        {"objective": "kl"},
        {"metric": "states"},
        {"metric": "fisher", "loss": "ewl1", "gamma": 0.5},
        {"prompt_weight": 0.0},
        {"prompt_weight": 1.0},
        {"ridge": 0.0},
        {"ridge": 1e6},
        {"seed": 2**40},
        {"holdout": 0.9},
    ],
    ids=str,
)
def test_fit_settings_are_done_or_refused(world: World, tmp_path: Path, fit: dict[str, Any]) -> None:
    correction = {"sites": "final"} if "objective" in fit else {}
    _, done = calibrate(world.run("code", fit=fit, correction=correction), tmp_path)
    if done.code:
        is_mistake(done)
    elif fit == {"objective": "kl"}:
        assert done.json["domains"]["code"]["shipped"], done.err


def test_dtypes(world: World, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        _, done = calibrate(world.run("code", dtype=dtype), tmp_path)
        assert done.code == 0, done.err
        assert done.json["domains"]["code"]["shipped"]


def test_settings_kept_are_the_settings_given(repaired: tuple[Path, Ran], world: World) -> None:
    given = yaml.safe_load((world.root / "runs" / "darts.yml").read_text())
    kept = repaired[1].json["settings"]
    assert kept["merged"] == given["merged"]
    assert kept["budget"] == given["budget"]


@pytest.mark.parametrize(
    ("native", "dtype", "said"), [(False, "bfloat16", 1), (False, "float32", 0), (True, "bfloat16", 0)]
)
def test_a_dtype_that_this_cpu_only_emulates_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool, dtype: str, said: int
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(job, "say", lines.append)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    job.prepare(parse_run(world.run("code", dtype=dtype, device="cpu")), tmp_path)
    assert [line for line in lines if "dtype: float32" in line] == lines
    assert len(lines) == said
