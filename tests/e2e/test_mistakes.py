"""What a user can get wrong: one sentence, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import (
    LINES,
    World,
    is_mistake,
    listing,
    make_adapter,
    make_model,
    make_tokenizer,
    ran,
    save,
    started,
    write_yaml,
)

pytestmark = pytest.mark.slow

Edit = Callable[[dict[str, Any]], Any]


def refused(run: Any, tmp_path: Path, *words: str, text: str | None = None) -> None:
    """`calibrate` says the words and leaves the folder of the run file, where `--out` is, as it was."""
    path = tmp_path / "darts.yml"
    path.write_text(json.dumps(run) if text is None else text)
    before = listing(tmp_path)
    is_mistake(ran("calibrate", path, "--out", tmp_path / "out"), *words)
    assert listing(tmp_path) == before


# ------------------------------------------------------------------------------------------------- in true processes


def test_processes_end_with_code_2_and_one_sentence(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", merged=str(tmp_path / "nowhere")))
    before = listing(tmp_path)
    for args, word in (
        (("calibrate", tmp_path / "missing.yml", "--out", tmp_path / "out"), "missing.yml"),
        (("calibrate", run, "--out", tmp_path / "out"), "nowhere"),
        (("merge", tmp_path / "missing.yml", tmp_path / "out"), "missing.yml"),
        (("info", tmp_path), str(tmp_path)),
        (("generate", tmp_path, "--domain", "x", "--prompt", "x"), str(tmp_path)),
    ):
        is_mistake(started(world.cache, *args), word)
    assert listing(tmp_path) == before


def test_the_command_line_itself() -> None:
    for args in ([], ["--help"], ["-h"], ["calibrate", "--help"], ["--version"]):
        done = ran(*args)
        assert done.code in (0, 2)
        assert "Traceback" not in done.out + done.err
    assert ran("--version").out.startswith("mergedarts ")
    for args in (["nonsense"], ["calibrate"], ["calibrate", "x.yml"], ["info"], ["calibrate", "x", "--no-such"]):
        assert ran(*args).code == 2


# ---------------------------------------------------------------------------------------------------- the run file


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r.update(mergd="x"), ["'mergd'", "merged", "line"]),
        (lambda r: r["domains"]["code"].update(expret="x"), ["expret", "expert"]),
        (lambda r: r.update(fit={"stepz": 3}), ["fit.stepz", "steps"]),
        (lambda r: r.update(correction={"rnk": 3}), ["correction.rnk", "rank"]),
        (lambda r: r.update(fit={"steps": "many"}), ["fit.steps", "many"]),
        (lambda r: r.update(fit={"steps": 0}), ["fit.steps"]),
        (lambda r: r.update(fit={"steps": 10**9}), ["fit.steps"]),
        (lambda r: r.update(fit={"lr": -1}), ["fit.lr"]),
        (lambda r: r.update(fit={"lr": float("nan")}), ["fit.lr"]),
        (lambda r: r.update(fit={"lr": float("inf"), "method": "adam"}), ["fit.lr"]),
        (lambda r: r.update(fit={"ridge": float("inf")}), ["fit.ridge"]),
        (lambda r: r.update(fit={"holdout": 1}), ["fit.holdout"]),
        (lambda r: r.update(fit=[1]), ["fit"]),
        (lambda r: r.update(fit=None), ["fit"]),
        (lambda r: r.update(correction={"rank": 0}), ["correction.rank"]),
        (lambda r: r.update(correction={"rank": 1.5}), ["correction.rank"]),
        (lambda r: r.update(correction={"rank": True}), ["correction.rank"]),
        (lambda r: r.update(correction={"position": {"table": 0}}), ["table"]),
        (lambda r: r.update(correction={"position": "often"}), ["position"]),
        (lambda r: r.update(correction={"positions": 3, "position": "none"}), ["positions"]),
        (lambda r: r.update(correction={"sites": [7]}), ["sites", "7"]),
        (lambda r: r.update(correction={"sites": [-1]}), ["sites", "-1"]),
        (lambda r: r.update(correction={"sites": []}), ["sites"]),
        (lambda r: r.update(correction={"sites": {"every": 9}}), ["sites"]),
        (lambda r: r.update(correction={"sites": "some"}), ["sites"]),
        (lambda r: r.update(budget="a lot"), ["budget", "a lot"]),
        (lambda r: r.update(budget=0), ["budget"]),
        (lambda r: r.update(budget="nan%"), ["budget"]),
        (lambda r: r.update(preset="best"), ["preset", "best"]),
        (lambda r: r.update(preset=["paper"]), ["preset"]),
        (lambda r: r.update(preset={"a": 1}), ["preset"]),
        (lambda r: r.update(dtype="int8"), ["dtype", "int8"]),
        (lambda r: r.update(device="toaster"), ["toaster"]),
        (lambda r: r.update(device="meta"), ["meta"]),
        (lambda r: r.update(device=""), ["device"]),
        (lambda r: r.update(max_tokens=1), ["max_tokens"]),
        (lambda r: r.update(domains={}), ["domains"]),
        (lambda r: r.update(domains=[]), ["domains"]),
        (lambda r: r.update(domains=None), ["domains"]),
        (lambda r: r.pop("domains"), ["domains"]),
        (lambda r: r.pop("merged"), ["merged"]),
        (lambda r: r.update(merge="m.yml"), ["merged", "merge"]),
        (lambda r: r.update(merged=""), []),
        (lambda r: r.update(merged="  "), ["model"]),
        (lambda r: r.update(merged="/etc/passwd"), ["/etc/passwd"]),
        (lambda r: r.update(merged="no/such-model"), ["no/such-model"]),
        (lambda r: r.update(merged="https://example.com/x"), ["https://example.com/x"]),
        (lambda r: r.update(merged="a\x00b"), ["model"]),
        (lambda r: r["domains"]["code"].update(expert="a\x00b"), []),
        (lambda r: r["domains"]["code"].update(expert="x" * 5000), []),
        (lambda r: r["domains"]["code"].update(prompts="x" * 5000), []),
        (lambda r: r["domains"]["code"].update(prompts="a\x00b"), []),
        (lambda r: r["domains"]["code"].pop("expert"), ["domains.code.expert"]),
        (lambda r: r["domains"]["code"].pop("prompts"), ["domains.code.prompts"]),
        (lambda r: r["domains"]["code"].update(expert=""), []),
        (lambda r: r["domains"]["code"].update(expert="/nowhere"), ["/nowhere"]),
        (lambda r: r["domains"]["code"].update(samples=0), ["samples"]),
        (lambda r: r["domains"]["code"].update(rollout=-1), ["rollout"]),
        (lambda r: r["domains"]["code"].update(prompts={"dataset": "x"}), ["column"]),
        (lambda r: r["domains"]["code"].update(prompts=7), ["prompts"]),
        (lambda r: r["domains"].update(code=None), ["domains.code"]),
        (lambda r: r["domains"].update({"../etc": r["domains"]["code"]}), ["../etc"]),
        (lambda r: r["domains"].update({"a/b": r["domains"]["code"]}), ["a/b"]),
        (lambda r: r["domains"].update({"a.b": r["domains"]["code"]}), ["a.b"]),
        (lambda r: r["domains"].update({"": r["domains"]["code"]}), ["domain"]),
        (lambda r: r["domains"].update({"none": r["domains"]["code"]}), ["none"]),
        (lambda r: r["domains"].update({"a\n": r["domains"]["code"]}), ["domain"]),
        (lambda r: r["domains"].update({"x" * 65: r["domains"]["code"]}), ["domain"]),
        (lambda r: r["domains"].update({"x" * 5000: r["domains"]["code"]}), []),
    ],
)  # fmt: skip
def test_settings(world: World, tmp_path: Path, edit: Edit, words: list[str]) -> None:
    run = world.run("code")
    edit(run)
    text = json.dumps(run).replace("NaN", ".nan").replace("Infinity", ".inf")
    refused(run, tmp_path, *words, text=text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["darts.yml"]),
        ("just text", ["darts.yml"]),
        ("- a\n- b\n", ["darts.yml"]),
        ("merged: [\n", ["darts.yml", "line"]),
        ("a: 1\na: 2\n", ["'a'", "line 2"]),
        ("merged: m\ndomains:\n  a: {expert: a, prompts: b}\n  a: {expert: a, prompts: b}\n", ["domain 'a'", "twice"]),
        ("merged: !!python/object/apply:os.system ['touch pwned']\ndomains: {}\n", ["darts.yml"]),
        ("merged: !custom x\ndomains: {}\n", ["darts.yml"]),
        ("merged: *nothing\n", ["darts.yml"]),
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
         "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
         "e: [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]\n", ["darts.yml", "aliases"]),
        ("a: &a [*a]\n", ["darts.yml"]),
        ("merged: &m {x: *m}\n", ["darts.yml"]),
        ("[" * 3000, ["darts.yml"]),
        ("merged: m\n---\nmerged: n\n", ["darts.yml"]),
        ("? [a, b]\n: c\n", ["darts.yml"]),
        ("? {a: b}\n: c\n", ["darts.yml"]),
        ("1: 2\n", ["darts.yml"]),
        ("null: 2\n", ["darts.yml"]),
        ("x: 2026-99-99\n", ["darts.yml"]),
        ("x: 0x\n", ["darts.yml"]),
        ("merged: 3\ndomains: {a: {expert: a, prompts: b}}\n", ["merged"]),
        ("<<: [1]\n", ["darts.yml"]),
        ("\x00", ["darts.yml"]),
        ("a: \x1b[31mred\n", ["darts.yml"]),
        ("# " + "x" * (1 << 20), ["1 MiB"]),
    ],
    ids=range(25),
)  # fmt: skip
def test_text_of_the_run_file(tmp_path: Path, text: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(None, tmp_path, *words, text=text)
    assert not (tmp_path / "pwned").exists()


def test_run_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yml").write_bytes(b"merged: caf\xe9\n")
    (tmp_path / "folder.yml").mkdir()
    os.symlink(tmp_path / "loop.yml", tmp_path / "loop.yml")
    before = listing(tmp_path)
    for name in ("latin.yml", "folder.yml", "loop.yml", "missing.yml", "x" * 300):
        is_mistake(ran("calibrate", tmp_path / name, "--out", tmp_path / "out"), name[:20])
    assert listing(tmp_path) == before


def test_aliases_and_merge_keys_that_are_fair(world: World, tmp_path: Path) -> None:
    domain = world.run("code")["domains"]["code"]
    text = (
        f"merged: {world.merged}\nbudget: 50%\ndtype: float32\npreset: surgery\nfit: {{steps: 2}}\n"
        f"domains:\n  one: &one {json.dumps(domain)}\n  two: *one\n  three:\n    <<: *one\n    samples: 6\n"
    )
    (tmp_path / "darts.yml").write_text(text)
    done = ran("calibrate", tmp_path / "darts.yml", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert list(done.json["domains"]) == ["one", "two", "three"]


# ----------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["p.jsonl", "no prompts"]),
        (b"\n\n  \n", ["p.jsonl", "no prompts"]),
        (b'{"prompt": "a"}\n{"prompt"\n', ["p.jsonl", "line 2"]),
        (b'{"promt": "a"}\n', ["line 1", "prompt"]),
        (b'{"prompt": ""}\n', ["line 1"]),
        (b'{"prompt": 3}\n', ["line 1"]),
        (b'{"prompt": "a", "response": 3}\n', ["line 1", "response"]),
        (b"[1]\n", ["line 1"]),
        (b"null\n", ["line 1"]),
        (b"NaN\n", ["line 1"]),
        (b"[" * 100_000 + b"\n", ["line 1"]),
        (b'{"prompt": ' + b"9" * 5000 + b"}\n", ["line 1"]),
        (b'{"messages": []}\n', ["line 1", "messages"]),
        (b'{"messages": [{"role": "user"}]}\n', ["line 1", "messages"]),
        (b'{"messages": [{"role": "robot", "content": "x"}]}\n', ["line 1", "messages"]),
        (b'{"messages": {"role": "user", "content": "x"}}\n', ["line 1", "messages"]),
        (b'{"prompt": "\xff"}\n', ["p.jsonl", "UTF-8"]),
        (b'{"prompt": "\\ud800"}\n{"prompt": "b"}\n', ["line 1"]),
        (b'{"prompt": "' + b"a" * 500_000 + b'"}\n', ["line 1", "characters"]),
        (b'{\n  "prompt": "a"\n}\n', ["line 1"]),
        (b'[{"prompt": "a"},\n {"prompt": "b"}]\n', ["line 1"]),
    ],
    ids=range(21),
)
def test_prompt_files(world: World, tmp_path: Path, data: bytes, words: list[str]) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)
    run = world.run("code")
    run["domains"]["code"]["prompts"] = "p.jsonl"
    refused(run, tmp_path, *words)


def test_prompt_paths(world: World, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("missing.jsonl", "folder", "/dev/null", "\x1b[31mred.jsonl"):
        run = world.run("code")
        run["domains"]["code"]["prompts"] = name
        refused(run, tmp_path, "'code'")


def test_a_second_domain_is_checked_before_the_first_is_run(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    run = world.run("code", "maths")
    run["domains"]["maths"]["expert"] = "/nowhere"
    refused(run, tmp_path, "/nowhere")
    assert not (fresh_cache / "features").exists()


# ------------------------------------------------------------------------------------------------------------ models


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


# --------------------------------------------------------------------------------------------------------- the disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave about so many bytes of a file system free."""
    with (disk / "filler").open("wb", buffering=0) as stream:
        try:
            while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > leave:
                stream.write(b"\0" * 4096)
        except OSError:
            pass  # full


@pytest.mark.parametrize("leave", [0, 4096, 16384])
def test_no_space_for_the_result(world: World, tmp_path: Path, small_disk: Path, leave: int) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="paper", fit={"steps": 2}, budget=1))
    fill(small_disk, leave)
    before = listing(small_disk)
    is_mistake(ran("calibrate", run, "--out", small_disk / "out"), "No space left", str(small_disk))
    assert listing(small_disk) == before


def test_no_space_keeps_the_old_result(world: World, tmp_path: Path, small_disk: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="paper", fit={"steps": 2}, budget=1))
    out = small_disk / "out"
    assert ran("calibrate", run, "--out", out).code == 0
    fill(small_disk, 0)
    before = listing(small_disk)
    is_mistake(ran("calibrate", run, "--out", out), "No space left", str(out))
    assert listing(small_disk) == before
    assert ran("info", out).code == 0


@pytest.mark.parametrize("leave", [0, 8192, 65536])
def test_no_space_for_features(
    world: World, tmp_path: Path, small_disk: Path, leave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEDARTS_CACHE", str(small_disk / "cache"))
    fill(small_disk, leave)
    run = write_yaml(tmp_path / "darts.yml", world.run("code", "maths"))
    is_mistake(ran("calibrate", run, "--out", tmp_path / "out"), "No space left")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["darts.yml", "disk"]
    # What the store kept is whole: with space, the same command ends well.
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = ran("calibrate", run, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert not [p for p in (small_disk / "cache").rglob("*") if p.name.endswith(".tmp")]


def test_no_space_for_a_merge(world: World, small_disk: Path) -> None:
    fill(small_disk, 32768)
    before = listing(small_disk)
    is_mistake(ran("merge", world.root / "models" / "merge.yml", small_disk / "out"), "No space left", str(small_disk))
    assert listing(small_disk) == before


def test_a_limit_on_the_size_of_files(world: World, tmp_path: Path) -> None:
    """As `ulimit -f` sets it: Python ignores the signal, and writing fails."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = started(world.cache, "merge", world.root / "models" / "merge.yml", tmp_path / "out", preexec_fn=limited)
    is_mistake(done, "No space left", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="surgery", fit={"steps": 2}, budget=1))
    (tmp_path / "file").write_text("x")
    before = listing(tmp_path)
    for target in (tmp_path / "file" / "out", tmp_path / ("x" * 300), Path("/proc/out"), Path("/dev/null/x")):
        is_mistake(ran("calibrate", run, "--out", target), str(target)[:60])
        is_mistake(ran("merge", world.root / "models" / "merge.yml", target), str(target)[:60])
    assert listing(tmp_path) == before


def test_a_cache_that_cannot_be_written(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code"))
    (tmp_path / "file").write_text("x")
    before = listing(tmp_path)
    for cache in (tmp_path / "file" / "cache", Path("/proc/cache")):
        monkeypatch.setenv("MERGEDARTS_CACHE", str(cache))
        is_mistake(ran("calibrate", run, "--out", tmp_path / "out"), str(cache))
        assert listing(tmp_path) == before


def test_out_of_awkward_shape(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code", preset="surgery", fit={"steps": 2}, budget=1))
    deep = tmp_path / "new" / "deep" / "out"
    assert ran("calibrate", run, "--out", deep).code == 0
    assert ran("calibrate", run, "--out", f"{deep}/").code == 0
    odd = tmp_path / "a b é 🙂 [red]x[/red]"
    done = ran("calibrate", run, "--out", odd)
    assert done.code == 0, done.err
    assert "[red]x[/red]" in done.out.replace("\n", "")
    assert ran("info", odd).code == 0
    os.symlink(deep, tmp_path / "link")
    assert ran("calibrate", run, "--out", tmp_path / "link").code == 0
    assert ran("info", tmp_path / "link").code == 0
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    assert ran("calibrate", run, "--out", tmp_path / "dangling").code in (0, 2)
    here = tmp_path / "here"
    here.mkdir()
    is_mistake(ran("calibrate", run, "--out", ".", cwd=tmp_path))
    done = ran("calibrate", run, "--out", ".", cwd=here)
    assert done.code in (0, 2), done.err
    assert not list(tmp_path.rglob(".*.tmp"))
    assert not list(tmp_path.rglob(".*.old"))


# -------------------------------------------------------------------------------------------------- the feature store


def test_broken_features_are_said_or_made_again(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    assert ran("calibrate", run, "--out", tmp_path / "out").code == 0
    before = listing(tmp_path)
    files = [p for p in sorted(fresh_cache.rglob("*")) if p.is_file() and "digests" not in p.parts]
    one_a_kind = {re.sub(r"\d+", "", p.name) + p.parent.parent.name: p for p in files}
    for path in one_a_kind.values():
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        done = ran("calibrate", run, "--out", tmp_path / "out2")
        if done.code:
            is_mistake(done, str(fresh_cache))
            assert listing(tmp_path) == before
        shutil.rmtree(tmp_path / "out2", ignore_errors=True)
        path.unlink()
        done = ran("calibrate", run, "--out", tmp_path / "out2")
        if done.code:
            is_mistake(done)
        shutil.rmtree(tmp_path / "out2", ignore_errors=True)
        path.write_bytes(whole)


def test_a_killed_run_is_taken_up(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """Every moment of death: after each file that appears in the store, the next run ends well and alike."""
    import mergedarts.store

    run = write_yaml(tmp_path / "darts.yml", world.run("maths"))
    real = os.replace
    deaths = 0
    for survive in range(1, 60, 8):
        shutil.rmtree(fresh_cache, ignore_errors=True)
        count = 0

        def dying(*args: Any) -> None:
            nonlocal count
            count += 1
            if count > survive:  # noqa: B023
                raise KeyboardInterrupt
            real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mergedarts.store.os, "replace", dying)
            killed = ran("calibrate", run, "--out", tmp_path / "out")
        if killed.code == 0:
            break
        assert killed.code == 130
        deaths += 1
        assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]
        after = ran("calibrate", run, "--out", tmp_path / "out")
        assert after.code == 0, after.err
        shutil.rmtree(tmp_path / "out")
    assert deaths > 2
