"""Input made to harm, and rare input that did: each was once a traceback, a silent mistake or worse."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import (
    World,
    changed,
    environment,
    is_mistake,
    make_model,
    make_tokenizer,
    ran,
    save,
    write_config,
    write_lines,
    write_yaml,
)

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {"preset": "surgery", "fit": {"steps": 2}, "budget": 1}


@pytest.fixture(scope="session")
def surgery(world: World) -> Path:
    """A repaired model of one domain."""
    run = write_yaml(world.root / "runs" / "surgery.yml", world.run("code", **QUICK))
    out = world.root / "repaired" / "surgery"
    assert ran("calibrate", run, "--out", out).code == 0
    return out


def calibrated(run: dict[str, Any], tmp_path: Path) -> Any:
    return ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", tmp_path / "out", "--json")


def test_a_repaired_folder_cannot_switch_remote_code_on(world: World, surgery: Path, tmp_path: Path) -> None:
    """The folder may come from a stranger; whether its model's own code runs is its user's choice alone."""
    from mergedarts.models import ModelRef, fingerprint

    model = Path(shutil.copytree(world.merged, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, "model_type": "evil"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "SHA256SUMS").unlink()
    (model / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'pwned')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'evil'\nclass M(LlamaForCausalLM):\n    config_class = C\n"
    )
    folder = Path(shutil.copytree(surgery, tmp_path / "folder"))
    settings = json.loads((folder / "darts_config.json").read_text())
    settings["merged"] |= {
        "model": str(model), "fingerprint": fingerprint(ModelRef(str(model))), "trust_remote_code": True,
    }  # fmt: skip
    write_config(folder, json.dumps(settings))
    is_mistake(ran("generate", folder, "--domain", "none", "--prompt", "x", "--max-new-tokens", "2"))
    assert not (tmp_path / "pwned").exists()


def test_info_of_a_strangers_folder_cannot_steer_the_terminal(surgery: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(surgery, tmp_path / "folder"))
    config = json.loads((folder / "darts_config.json").read_text())
    config["merged"]["model"] = "\x1b[5mm"
    config["domains"]["code"] |= {"expert": "\x1b]0;title\x07", "notes": ["\x1b[2J\r[red]x"]}
    config["settings"]["preset"] = "\x1b[31m"
    write_config(folder, json.dumps(config))
    shown = ran("info", folder)
    assert shown.code in (0, 2)
    assert all(c.isprintable() or c in "\n\t" for c in shown.out + shown.err), repr(shown.out)


def test_output_names_cannot_steer_the_terminal(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", **QUICK))
    for args in (("calibrate", run, "--out", tmp_path / "\x1b[31mred"),
                 ("merge", world.root / "models" / "merge.yml", tmp_path / "\x1b[31mblue")):  # fmt: skip
        done = ran(*args)
        assert done.code in (0, 2)
        assert "\x1b" not in done.out + done.err, repr(done.out)


def test_a_path_is_printed_whole(world: World, tmp_path: Path) -> None:
    """Where stdout is no terminal, a long path must not be broken over lines: people pipe it on."""
    run = write_yaml(tmp_path / "darts.yml", world.run("code", **QUICK))
    out = tmp_path / ("long" * 40)
    done = ran("calibrate", run, "--out", out)
    assert done.code == 0, done.err
    assert f"repaired model written to {out}\n" in done.out


def mutations(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from mutations(value, (*path, key))


def test_any_value_of_another_type_in_darts_config(surgery: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(surgery, tmp_path / "folder"))
    whole = json.loads((folder / "darts_config.json").read_text())
    tracebacks = []
    for path in mutations(whole):
        for value in (None, [], "x", {}, -1):
            config = copy.deepcopy(whole)
            at = config
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            write_config(folder, json.dumps(config))
            try:
                shown = ran("info", folder)
            except Exception as error:
                tracebacks.append((path, value, repr(error)))
                continue
            if shown.code:
                is_mistake(shown)
    assert tracebacks == []


def test_sequences_without_any_error(world: World, tmp_path: Path) -> None:
    """An expert that differs in the embedding of one token is the merged model wherever that token is missing."""
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(world.merged, dtype=torch.float32)
    model.get_input_embeddings().weight.data[tokenizer("z")["input_ids"][0]] += 1
    expert = save(model, tokenizer, tmp_path / "expert")
    prompts = write_lines(
        tmp_path / "p.jsonl", [{"prompt": f"say {'zy'[i % 2]} {i}", "response": f"done {i}"} for i in range(12)]
    )
    run = world.run("code", fit={"holdout": 0.4})
    run["domains"]["code"] |= {"expert": str(expert), "prompts": str(prompts)}
    done = calibrated(run, tmp_path)
    assert done.code == 0, done.err
    text = (tmp_path / "out" / "darts_config.json").read_text()
    assert "NaN" not in text + done.out
    assert "Infinity" not in text + done.out


def test_an_expert_that_writes_ids_the_merged_model_lacks(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world.expert("code"), dtype=torch.float32)
    model.resize_token_embeddings(320, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[304:].normal_(0, 2)
    run = world.run("maths")
    run["domains"]["maths"]["expert"] = str(save(model, make_tokenizer(), tmp_path / "expert"))
    done = calibrated(run, tmp_path)
    if done.code:
        is_mistake(done, str(tmp_path / "expert"))


def test_a_path_with_a_plus_sign(world: World, tmp_path: Path) -> None:
    expert = Path(shutil.copytree(world.expert("code"), tmp_path / "a+b"))
    run = world.run("code", **QUICK)
    run["domains"]["code"]["expert"] = str(expert)
    done = calibrated(run, tmp_path)
    assert done.code == 0, done.err


def test_two_experts_of_one_name_are_not_told_apart_by_guessing(world: World, tmp_path: Path) -> None:
    models = []
    for name, domain in (("one", "code"), ("two", "chat")):
        shutil.copytree(world.expert(domain), tmp_path / name / "checkpoint-9")
        models.append({"model": f"{name}/checkpoint-9", "parameters": {"weight": 0.5}})
    merge = write_yaml(tmp_path / "m.yml", {"merge_method": "linear", "models": models, "dtype": "float32"})
    assert ran("merge", merge, tmp_path / "merged").code == 0
    run = world.run("code", merged="merged", **QUICK)
    run["domains"]["code"]["expert"] = "checkpoint-9"
    is_mistake(calibrated(run, tmp_path), "checkpoint-9")


def test_a_relative_cache_folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written names the merged model by a path that holds from any folder."""
    monkeypatch.setenv("MERGEDARTS_CACHE", "cache")
    run = world.run("code", **QUICK) | {"merge": str(world.root / "models" / "merge.yml")}
    del run["merged"]
    path = write_yaml(tmp_path / "darts.yml", run)
    done = ran("calibrate", path, "--out", "out", cwd=tmp_path)
    assert done.code == 0, done.err
    monkeypatch.delenv("MERGEDARTS_CACHE")
    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path / "cache"))
    told = ran(
        "generate", tmp_path / "out", "--domain", "none", "--prompt", "x", "--max-new-tokens", "2", cwd=Path("/")
    )
    assert told.code == 0, told.err


def test_the_merged_model_may_be_a_model_with_an_adapter(world: World, tmp_path: Path) -> None:
    done = calibrated(world.run("code", merged=world.expert("maths"), **QUICK), tmp_path)
    assert done.code == 0, done.err
    told = ran("generate", tmp_path / "out", "--domain", "code", "--prompt", "x", "--max-new-tokens", "2")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    "changes",
    [
        {"models": [{"model": {"model": {"path": "/nowhere"}}, "parameters": {"weight": 1.0}}]},
        {"tokenizer_source": "nonsense"},
        {"models": [{"model": "BASE", "parameters": {"weight": "x"}}]},
    ],
    ids=str,
)
def test_merges_that_fail_leave_nothing(world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {"merge_method": "linear", "models": [{"model": "BASE", "parameters": {"weight": 1.0}}]}
    merge = write_yaml(tmp_path / "m.yml", config | {"dtype": "float32"} | changes)
    merge.write_text(merge.read_text().replace("BASE", str(world.base)))
    is_mistake(ran("merge", merge, tmp_path / "new" / "deep" / "out"), "m.yml")
    assert [p.name for p in tmp_path.iterdir()] == ["m.yml"]


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [2, null]}'])
def test_generation_configs(world: World, tmp_path: Path, text: str) -> None:
    merged = Path(shutil.copytree(world.merged, tmp_path / "merged"))
    (merged / "generation_config.json").write_text(text)
    done = calibrated(world.run("maths", merged=str(merged), **QUICK), tmp_path)
    assert done.code in (0, 2)
    if done.code:
        is_mistake(done, "generation_config.json")


def test_a_write_that_is_cut_short_is_no_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nearly full disk takes part of what is written and says so by a count alone."""
    from mergedarts import UserError
    from mergedarts.store import FeatureStore

    monkeypatch.setenv("MERGEDARTS_CACHE", str(tmp_path))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[: max(1, len(data) // 2)], at))
    store = FeatureStore("model", "prompts", torch.float32)
    try:
        with store.writers({"x": (4, 8)}, torch.float32) as writers:
            writers["x"].write(0, torch.ones(4, 8))
    except (UserError, OSError):
        assert not store.has("x")
        return
    assert torch.equal(store.load("x")["hidden"], torch.ones(4, 8))


def test_text_that_is_not_utf8(world: World, surgery: Path) -> None:
    """On stdin and as an argument, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "mergedarts.cli",
        "generate",
        str(surgery),
        "--domain",
        "none",
        "--max-new-tokens",
        "2",
    ]
    for more, stdin in (([], b"abc\xff\xfe"), (["--prompt", b"abc\xff"], b"")):
        done = subprocess.run(
            [*map(os.fsencode, command), *more], input=stdin, capture_output=True, env=environment(world.cache)
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 2)


def test_a_terminal_of_plain_ascii(world: World, surgery: Path) -> None:
    ascii_only = environment(world.cache) | {"PYTHONIOENCODING": "ascii"}
    for more in ([], ["--json"]):
        shown = subprocess.run(
            [sys.executable, "-m", "mergedarts.cli", "info", str(surgery), *more],
            capture_output=True, text=True, env=ascii_only,
        )  # fmt: skip
        assert "Traceback" not in shown.stderr, shown.stderr
        assert shown.returncode == 0


def test_a_model_of_one_layer_and_an_expert_of_noise(world: World, tmp_path: Path) -> None:
    """An expert that has nothing in common with the merge ends in a correction or a warning, and never a traceback."""
    tokenizer = make_tokenizer()
    merged = save(make_model(num_hidden_layers=1), tokenizer, tmp_path / "merged")
    expert = save(changed(make_model(5, num_hidden_layers=1), 6, share=3.0), tokenizer, tmp_path / "expert")
    run = world.run("code", merged=str(merged))
    run["domains"]["code"]["expert"] = str(expert)
    done = calibrated(run, tmp_path)
    assert done.code == 0, done.err
