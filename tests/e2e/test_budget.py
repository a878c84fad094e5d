"""Where a budget goes: weight updates without prompts, beside corrections in depth, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .conftest import World, is_mistake, ran, write_yaml

pytestmark = pytest.mark.slow


def calibrate(run: dict[str, Any], tmp_path: Path) -> tuple[Path, Any]:
    out = tmp_path / "out"
    done = ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", out, "--json")
    assert done.code == 0, done.err
    return out, done


def kinds(out: Path, domain: str) -> set[str]:
    """Kinds of the sites in a folder, from the names of its tensors."""
    names = [name.removeprefix(f"{domain}.") for name in load_file(out / "corrections.safetensors")]
    return {"linear" if "_proj." in name else "residual" for name in names}


def test_truncated_svd_needs_no_prompts(world: World, tmp_path: Path) -> None:
    run = world.run("code", "maths", correction={"form": "svd"})
    del run["domains"]["code"]["prompts"]
    out, done = calibrate(run, tmp_path)
    code, maths = (done.json["domains"][d] for d in ("code", "maths"))
    assert code["shipped"]
    assert code["parameters"] > 0
    assert code["held_out"] is None
    assert maths["held_out"]["repaired"]["kl"] < maths["held_out"]["merged"]["kl"]
    assert "was not measured" in done.err
    assert "no router was fitted: domain 'code' has no prompts" in done.err
    assert kinds(out, "code") == {"linear"}
    shown = ran("info", out)
    assert shown.code == 0
    assert "not measured" in " ".join(shown.out.split())
    assert ran("generate", out, "--domain", "code", "--prompt", "write f1(x)", "--max-new-tokens", "2").code == 0


@pytest.mark.parametrize("form", ["auto", "residual", "linear"])
def test_other_forms_need_prompts(world: World, tmp_path: Path, form: str) -> None:
    run = world.run("code", correction={"form": form})
    del run["domains"]["code"]["prompts"]
    done = ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", tmp_path / "out")
    is_mistake(done, "domains.code.prompts", "form: svd")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0, 0.5, "30%", "auto"])
def test_share_of_the_budget_for_weight_updates(world: World, tmp_path: Path, share: Any) -> None:
    out, done = calibrate(world.run("code", "maths", correction={"svd_share": share}, budget=0.6), tmp_path)
    config = done.json
    for name, entry in config["domains"].items():
        assert entry["shipped"]
        choices = entry["choices"]
        tried = choices.get("svd_share_kl", {})
        if share == "auto":
            best = min(tried, key=tried.get)
            assert float(best if tried[best] <= 0.95 * tried["0"] else 0) == choices["svd_share"]
        else:
            assert tried == {}
        spent = choices.get("svd_share", 0)
        assert kinds(out, name) == ({"residual", "linear"} if spent else {"residual"})
        low = sum(
            t.numel() for n, t in load_file(out / "corrections.safetensors").items()
            if n.startswith(name) and "_proj." in n
        )  # fmt: skip
        assert low <= spent * 0.3 * config["merged"]["parameters"]
    assert config["parameters"]["added"] <= 0.6 * config["merged"]["parameters"]
    if share == "auto":
        shown = ran("info", out).out
        assert "share of the budget for weight updates" in shown


def test_a_low_rank_expert_gets_weight_updates_and_another_does_not_lose_by_them(world: World, tmp_path: Path) -> None:
    """Where the expert is a LoRA of the base the mix wins on held-out sequences; ranks that are asked for are kept."""
    _, done = calibrate(world.run("code", "maths", budget=0.6), tmp_path)
    _, alone = calibrate(world.run("code", "maths", budget=0.6, correction={"svd_share": 0}), tmp_path / "alone")
    for name in ("code", "maths"):
        mixed, plain = (r.json["domains"][name]["held_out"]["repaired"]["kl"] for r in (done, alone))
        assert mixed <= 1.05 * plain
    _, asked = calibrate(world.run("maths", correction={"rank": 2}, budget=0.6), tmp_path / "asked")
    assert "svd_share" not in asked.json["domains"]["maths"]["choices"]
