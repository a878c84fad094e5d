"""`mergedarts merge` on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from .conftest import World, is_mistake, listing, ran, write_yaml

pytestmark = pytest.mark.slow


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def config(world: World, **changes: Any) -> dict[str, Any]:
    return {
        "merge_method": "linear",
        "models": [{"model": world.expert("code"), "parameters": {"weight": 1.0}}],
        "dtype": "float32",
    } | changes


def test_weights_are_those_of_task_arithmetic_with_the_adapter_merged(world: World) -> None:
    merged, base = weights(world.merged), weights(world.base)
    lora = load_file(world.root / "models" / "maths-lora" / "adapter_model.safetensors")
    experts = [weights(world.root / "models" / name) for name in ("code", "chat")]
    for name, value in base.items():
        delta = sum(e[name] - value for e in experts)
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in lora:
            delta = delta + 2.0 * lora[f"{prefix}.lora_B.weight"] @ lora[f"{prefix}.lora_A.weight"]
        torch.testing.assert_close(merged[name], value + 0.4 * delta, rtol=1e-4, atol=1e-5)


def test_the_folder_is_whole_and_its_paths_absolute(world: World) -> None:
    kept = yaml.safe_load((world.merged / "mergekit_config.yml").read_text())
    assert kept["base_model"] == str(world.base)
    assert [m["model"] for m in kept["models"]][1] == world.expert("maths")
    assert (world.merged / "tokenizer.json").is_file()
    strays = [p.name for p in world.merged.parent.iterdir() if p.name.startswith(".")]
    assert strays == []


def test_a_merge_of_ours_is_replaced_and_nothing_else(world: World, tmp_path: Path) -> None:
    merge = write_yaml(tmp_path / "m.yml", config(world))
    out = tmp_path / "out"
    assert ran("merge", merge, out).code == 0
    (out / "stale").write_text("x")
    assert ran("merge", merge, out).code == 0
    assert not (out / "stale").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    before = listing(tmp_path)
    is_mistake(ran("merge", merge, foreign), str(foreign), "name another folder")
    a_file = foreign / "thesis.txt"
    is_mistake(ran("merge", merge, a_file), str(a_file))
    assert listing(tmp_path) == before


def test_an_empty_folder_may_be_filled(world: World, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = ran("merge", write_yaml(tmp_path / "m.yml", config(world)), tmp_path / "out")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").is_file() or list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merge_method": "no_such_method"}, ["m.yml"]),
        ({"models": []}, ["m.yml"]),
        ({"models": [{"model": "./nowhere"}]}, ["nowhere", "does not exist"]),
        ({"models": [{"model": "a+b+c"}]}, ["a+b+c"]),
        ({"models": [{"model": "BASE+nowhere-lora"}]}, ["nowhere-lora"]),
        ({"models": "code"}, ["m.yml"]),
        ({"dtype": "float99"}, ["m.yml"]),
        ({"base_model": 7, "merge_method": "task_arithmetic"}, ["m.yml"]),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_mistakes_in_the_config(world: World, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    merge = write_yaml(tmp_path / "m.yml", config(world, **changes))
    merge.write_text(merge.read_text().replace("BASE", str(world.base)))
    before = listing(tmp_path)
    is_mistake(ran("merge", merge, tmp_path / "out"), *words)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("text", ["", "just text", "- 1\n- 2\n", "models: [\n", "a: 1\n"])
def test_what_is_not_a_mergekit_config(tmp_path: Path, text: str) -> None:
    merge = tmp_path / "m.yml"
    merge.write_text(text)
    is_mistake(ran("merge", merge, tmp_path / "out"), str(merge))
    is_mistake(ran("merge", tmp_path / "missing.yml", tmp_path / "out"), "missing.yml")
    assert [p.name for p in tmp_path.iterdir()] == ["m.yml"]


def test_models_of_other_shapes_do_not_merge(world: World, tmp_path: Path) -> None:
    from .conftest import make_model, make_tokenizer, save

    save(make_model(hidden_size=16), make_tokenizer(), tmp_path / "narrow")
    merge = write_yaml(
        tmp_path / "m.yml",
        config(world, models=[{"model": m, "parameters": {"weight": 0.5}} for m in (str(world.base), "narrow")]),
    )
    is_mistake(ran("merge", merge, tmp_path / "out"), "m.yml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.yml", "narrow"]
