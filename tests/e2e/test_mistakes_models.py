"""Experts and merged models that a user can get wrong: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import LINES, World, make_adapter, make_model, make_tokenizer, refused, save

pytestmark = pytest.mark.slow


def with_expert(world: World, expert: object) -> dict[str, Any]:
    run = world.run("code")
    run["domains"]["code"]["expert"] = str(expert)
    return run


def test_experts_of_another_shape(world: World, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    narrow = save(make_model(hidden_size=16), tokenizer, tmp_path / "narrow")
    short = save(make_model(num_hidden_layers=2), tokenizer, tmp_path / "short")
    refused(with_expert(world, narrow), tmp_path, str(narrow), str(world.merged), "hidden size 16", "32")
    refused(with_expert(world, short), tmp_path, str(short), "number of layers 2", "3")


def test_a_tokenizer_of_other_ids(world: World, tmp_path: Path) -> None:
    other = save(make_model(), make_tokenizer([line[::-1] for line in LINES]), tmp_path / "other")
    refused(with_expert(world, other), tmp_path, str(other), str(world.merged), "tokenizer")


def spoil(name: str, folder: Path) -> None:
    weights = folder / "model.safetensors"
    if name == "pickle":
        torch.save({}, folder / "pytorch_model.bin")
        weights.unlink()
    if name == "no weights":
        weights.unlink()
    if name == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    if name == "cut to nothing":
        weights.write_bytes(b"")
    if name == "garbage":
        weights.write_bytes(b"garbage" * 1000)
    if name == "header bomb":
        weights.write_bytes((2**62).to_bytes(8, "little") + b"{" * 100)
    if name == "no config":
        (folder / "config.json").unlink()
    if name == "broken config":
        (folder / "config.json").write_text("{")
    if name == "config of a list":
        (folder / "config.json").write_text("[]")
    if name == "unknown family":
        (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    if name == "remote code":
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "x", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "evil.py").write_text("import pathlib; pathlib.Path('/tmp/mergedarts-pwned').touch()")
    if name == "encoder":
        (folder / "config.json").write_text('{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 3}')
    if name == "no tokenizer":
        for path in folder.glob("*token*"):
            path.unlink()
    if name == "broken tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    if name == "other shapes":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        save_file({k: v[:5].clone() for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    if name == "a tensor less":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors.pop("model.layers.1.mlp.down_proj.weight")
        save_file(tensors, weights, metadata={"format": "pt"})
    if name == "nan":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors["model.norm.weight"][3] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
    if name == "lost shard":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
        )
        weights.rename(folder / "model-00001-of-00002.safetensors")


SPOILED = (
    "pickle", "no weights", "cut", "cut to nothing", "garbage", "header bomb", "no config", "broken config",
    "config of a list", "unknown family", "remote code", "encoder", "no tokenizer", "broken tokenizer", "other shapes",
    "a tensor less", "nan", "lost shard",
)  # fmt: skip


@pytest.mark.parametrize("which", ["expert", "merged"])
@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_model_folders(world: World, tmp_path: Path, name: str, which: str) -> None:
    folder = Path(shutil.copytree(world.expert("code"), tmp_path / "spoiled"))
    spoil(name, folder)
    run = with_expert(world, folder) if which == "expert" else world.run("code", merged=str(folder))
    refused(run, tmp_path, "spoiled" if name != "nan" else "not finite")
    assert not Path("/tmp/mergedarts-pwned").exists()


def test_adapters(world: World, tmp_path: Path) -> None:
    good = world.root / "models" / "maths-lora"
    refused(with_expert(world, good), tmp_path, str(good))  # an adapter alone, without its model
    refused(with_expert(world, f"{world.base}+{world.base}"), tmp_path, str(world.base), "adapter")
    refused(with_expert(world, f"{world.base}+{tmp_path / 'nowhere'}"), tmp_path, "nowhere", "adapter")
    narrow = save(make_model(hidden_size=16), make_tokenizer(), tmp_path / "narrow")
    unfit = make_adapter(narrow, tmp_path / "unfit", 5)
    refused(with_expert(world, f"{world.base}+{unfit}"), tmp_path, str(unfit))
    pickled = Path(shutil.copytree(good, tmp_path / "pickled"))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(with_expert(world, f"{world.base}+{pickled}"), tmp_path, str(pickled), "pickle")
    cut = Path(shutil.copytree(good, tmp_path / "cut"))
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:-100])
    refused(with_expert(world, f"{world.base}+{cut}"), tmp_path, str(cut))
    broken = Path(shutil.copytree(good, tmp_path / "broken"))
    for text in ("{", "[]", "{}", '{"peft_type": "NONSUCH"}'):
        (broken / "adapter_config.json").write_text(text)
        refused(with_expert(world, f"{world.base}+{broken}"), tmp_path, str(broken))
    # For layers that the model does not have, nothing would be merged: not an expert at all.
    config = json.loads((good / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["no_such_layer"]}))
    refused(with_expert(world, f"{world.base}+{broken}"), tmp_path, str(broken))


def test_an_expert_name_that_the_merge_does_not_know(world: World, tmp_path: Path) -> None:
    refused(with_expert(world, "physics"), tmp_path, "physics")


def test_a_template_that_refuses(world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(world.merged, tmp_path / "merged"))
    for template in ("{{ raise_exception('no') }}", "{% for %}", "{{ messages[9].x.y }}", "{% set x = 1 %}"):
        for old in folder.glob("chat_template*"):
            old.unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        refused(world.run("code", merged=str(folder)), tmp_path)
