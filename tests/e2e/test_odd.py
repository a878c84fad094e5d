"""Long and odd input, numbers gone bad, and bytes that flip: handled, or named in one sentence, and never used."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergedarts.checksums import SUMS

from .conftest import World, changed, is_mistake, make_model, make_tokenizer, ran, save, write_lines, write_yaml

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {"preset": "surgery", "fit": {"steps": 2}, "budget": 1, "router": False}


def calibrated(run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    done = ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert "NaN" not in done.out
    assert "Infinity" not in done.out
    found: dict[str, Any] = done.json
    return found


def refused(run: dict[str, Any], tmp_path: Path, *words: str) -> None:
    done = ran("calibrate", write_yaml(tmp_path / "darts.yml", run), "--out", tmp_path / "out")
    is_mistake(done, *words)
    assert not (tmp_path / "out").exists()


def with_models(world: World, merged: Path, expert: Path, **changes: Any) -> dict[str, Any]:
    run = world.run("code", merged=str(merged), **changes)
    run["domains"]["code"]["expert"] = str(expert)
    return run


# --------------------------------------------------------------------------------------------------- long and odd text


def test_chats_of_eight_thousand_tokens(world: World, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    merged = save(make_model(max_position_embeddings=8192), tokenizer, tmp_path / "merged")
    expert = save(changed(make_model(max_position_embeddings=8192), 1), tokenizer, tmp_path / "expert")
    turn = [{"role": "user", "content": "what is three times four? " * 60}, {"role": "assistant", "content": "twelve"}]
    chats = write_lines(tmp_path / "chat.jsonl", [{"messages": (turn * 30)[: 40 + 2 * i]} for i in range(3)])
    run = with_models(world, merged, expert, max_tokens=8192, correction={"sites": "all", "rank": 1}, router=False)
    run["domains"]["code"]["prompts"] = str(chats)
    found = calibrated(run, tmp_path)["domains"]["code"]
    assert found["tokens"] > 3 * 8000
    cut = calibrated(run | QUICK | {"correction": {}, "max_tokens": 100}, tmp_path)["domains"]["code"]
    assert cut["tokens"] == 300


def test_ten_thousand_prompts(world: World, tmp_path: Path) -> None:
    run = world.run("code", **QUICK)
    rows = [{"prompt": f"{i}", "response": f"{i + 1}"} for i in range(10_000)]
    run["domains"]["code"] |= {"prompts": str(write_lines(tmp_path / "p.jsonl", rows)), "samples": 10_000}
    found = calibrated(run, tmp_path)["domains"]["code"]
    assert found["sequences"] == {"fit": 8000, "held_out": 2000}


@pytest.mark.parametrize("bare", [False, True], ids=["template", "no template"])
def test_odd_texts(world: World, tmp_path: Path, bare: bool) -> None:
    texts = ["a", "\0", "a\0b", "مرحبا بالعالم", "שלום עולם", "👩‍👩‍👧 🙂", "e\u0301\u0301\u0301", "\u202eabc",
             "\x1b[2J", "\u200b", "<|im_end|>", "<script>alert(1)</script>",
             "$(touch /tmp/x)", "{{ 7 * 7 }}",
             "\ufeffx", "a" * 3000]  # fmt: skip
    merged, expert = world.merged, world.root / "models" / "code"
    if bare:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None
        merged = save(make_model(), tokenizer, tmp_path / "merged")
        expert = save(changed(make_model(), 1), tokenizer, tmp_path / "expert")
    run = with_models(world, merged, expert)
    rows = [{"prompt": text, "response": text[::-1]} for text in texts] + [{"prompt": text} for text in texts]
    run["domains"]["code"]["prompts"] = str(write_lines(tmp_path / "p.jsonl", rows))
    found = calibrated(run, tmp_path)
    assert sum(found["domains"]["code"]["sequences"].values()) == 2 * len(texts)
    shown = ran("diagnose", tmp_path / "out", "--out", tmp_path / "report")
    assert shown.code == 0, shown.err
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "\x1b" not in page + shown.out


@pytest.mark.parametrize("template", [
    "{% for i in range(999999999) %}x{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
])  # fmt: skip
def test_templates_that_mean_harm(world: World, tmp_path: Path, template: str) -> None:
    merged = Path(shutil.copytree(world.merged, tmp_path / "merged"))
    (merged / SUMS).unlink()
    for old in merged.glob("chat_template*"):
        old.unlink()
    config = json.loads((merged / "tokenizer_config.json").read_text())
    (merged / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    done = ran("calibrate", write_yaml(tmp_path / "darts.yml", world.run("code", merged=str(merged), **QUICK)),
               "--out", tmp_path / "out")  # fmt: skip
    is_mistake(done)


def test_a_prompt_without_end(world: World, tmp_path: Path) -> None:
    calibrated(world.run("code", **QUICK), tmp_path)
    done = ran("generate", tmp_path / "out", "--domain", "code", stdin="x" * 400_001)
    is_mistake(done, "400,000 characters")


# -------------------------------------------------------------------------------------------------------- odd models


def test_a_union_of_tokenizers(world: World, tmp_path: Path) -> None:
    """One expert has tokens that the others lack; mergekit's union gives the merge a row for each."""
    tokenizer = make_tokenizer()
    base = make_model(vocab_size=len(tokenizer))
    save(base, tokenizer, tmp_path / "base")
    save(changed(make_model(vocab_size=len(tokenizer)), 1), tokenizer, tmp_path / "plain")
    more = make_tokenizer()
    more.add_tokens(["<tool>", "</tool>"])
    grown = changed(make_model(vocab_size=len(tokenizer)), 2)
    grown.resize_token_embeddings(len(more), mean_resizing=False)
    save(grown, more, tmp_path / "grown")
    merge = write_yaml(tmp_path / "merge.yml", {
        "merge_method": "linear", "dtype": "float32", "tokenizer": {"source": "union"},
        "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("plain", "grown")],
    })  # fmt: skip
    done = ran("merge", merge, tmp_path / "merged")
    assert done.code == 0, done.err
    run = world.run("code", "chat", merged=str(tmp_path / "merged"))
    run["domains"]["code"]["expert"], run["domains"]["chat"]["expert"] = str(tmp_path / "plain"), "grown"
    calibrated(run, tmp_path)
    # A text that uses an added token is no text for an expert that does not know it.
    run["domains"]["code"]["prompts"] = str(write_lines(tmp_path / "p.jsonl", [{"prompt": "a <tool> b"}] * 5))
    shutil.rmtree(tmp_path / "out")
    refused(run, tmp_path, "plain", "tokenizer")


@pytest.mark.parametrize("tied", [True, False])
def test_fifty_shards_behind_links_with_spaces_and_accents(world: World, tmp_path: Path, tied: bool) -> None:
    """As the hub's cache lays them out: a snapshot of links to blobs that are called by their digests."""
    tokenizer, models = make_tokenizer(), []
    for seed in (None, 1):
        model = make_model(num_hidden_layers=6, tie_word_embeddings=tied)
        model = model if seed is None else changed(model, seed)
        real = tmp_path / "written"
        model.save_pretrained(real, max_shard_size=1)
        tokenizer.save_pretrained(real)
        assert len(list(real.glob("*.safetensors"))) >= 50
        root = tmp_path / f"models--ä b--{seed} 🙂"
        snapshot = root / "snapshots" / "abc"
        (root / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in real.iterdir():
            blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
        shutil.rmtree(real)
        models.append(snapshot)
    run = with_models(world, *models)
    prompts = tmp_path / "prömpts 🙂 [red].jsonl"
    shutil.copy(world.prompts("code"), prompts)
    run["domains"]["code"]["prompts"] = str(prompts)
    calibrated(run, tmp_path)
    shard = sorted(models[1].glob("*.safetensors"))[20]
    blob = Path(os.path.realpath(shard))
    data = bytearray(blob.read_bytes())
    data[-3] ^= 64
    blob.write_bytes(bytes(data))
    shutil.rmtree(tmp_path / "out")
    refused(run, tmp_path, shard.name, "checksum")


def test_a_model_folder_that_cannot_be_written(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        shutil.copytree(world.merged, folder / "merged")
        shutil.copytree(world.root / "models" / "code", folder / "code")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        calibrated(with_models(world, folder / "merged", folder / "code", **QUICK), tmp_path)
        done = ran("calibrate", tmp_path / "darts.yml", "--out", folder / "out")
        is_mistake(done, str(folder / "out"), "cannot be written")
    finally:
        subprocess.run(["umount", folder], check=True)


# --------------------------------------------------------------------------------------------------- numbers gone bad


def edited(source: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, folder)
    (folder / SUMS).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("which", ["expert", "merged"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite(world: World, tmp_path: Path, which: str, value: float, where: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if where in tensors:
            tensors[where][5, 3] = value

    bad = edited(world.merged if which == "merged" else world.root / "models" / "code", tmp_path / "bad", edit)
    merged = bad if which == "merged" else world.merged
    refused(with_models(world, merged, bad if which == "expert" else world.root / "models" / "code"), tmp_path,
            "not finite")  # fmt: skip
    merge = write_yaml(tmp_path / "merge.yml", {
        "merge_method": "linear", "dtype": "float32", "models": [{"model": str(bad), "parameters": {"weight": 1.0}}],
    })  # fmt: skip
    is_mistake(ran("merge", merge, tmp_path / "merge"), "not finite", where)
    assert not (tmp_path / "merge").exists()


def test_a_merge_that_overflows_in_float16(world: World, tmp_path: Path) -> None:
    big = edited(world.base, tmp_path / "big", lambda tensors: tensors["model.norm.weight"].fill_(60000))
    merge = write_yaml(tmp_path / "merge.yml", {
        "merge_method": "task_arithmetic", "base_model": str(world.base), "dtype": "float16",
        "models": [{"model": str(big), "parameters": {"weight": 2.0}}],
    })  # fmt: skip
    is_mistake(ran("merge", merge, tmp_path / "merge"), "not finite", "model.norm.weight", "bfloat16")


def test_states_that_overflow_in_float16(world: World, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"].mul_(1e7)

    bad = edited(world.root / "models" / "code", tmp_path / "bad", edit)
    refused(with_models(world, world.merged, bad, dtype="float16"), tmp_path, "not finite", "bfloat16")


@pytest.mark.parametrize("changes", [{}, {"correction": {"sites": "final"}}, {"preset": "paper", "fit": {"steps": 5}}],
                         ids=["default", "final", "paper"])  # fmt: skip
@pytest.mark.parametrize("case", ["constant feature", "few tokens", "no entropy", "the same model"])
def test_degenerate_numbers(world: World, tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    """Handled: a finite correction that lowers the held-out KL, or none and a warning."""
    merged, expert = world.merged, world.root / "models" / "code"
    run = with_models(world, merged, expert, budget=1, **changes)
    if case == "constant feature":

        def constant(tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensor[0] = 0
                if name == "model.embed_tokens.weight":
                    tensor[:, 0] = 1

        run["merged"] = str(edited(merged, tmp_path / "merged", constant))
        run["domains"]["code"]["expert"] = str(edited(expert, tmp_path / "expert", constant))
    if case == "few tokens":
        two = write_lines(tmp_path / "p.jsonl", [{"prompt": "a", "response": "b"}] * 2)
        run["domains"]["code"]["prompts"] = str(two)
        run["correction"] = {**run.get("correction", {}), "rank": 30}
    if case == "no entropy":
        sure = edited(expert, tmp_path / "sure", lambda tensors: tensors["lm_head.weight"].mul_(3e4))
        run["domains"]["code"]["expert"] = str(sure)
    if case == "the same model":
        run["domains"]["code"]["expert"] = str(merged)
    entry = calibrated(run, tmp_path)["domains"]["code"]
    held = entry["held_out"]
    assert not entry["shipped"] or held is None or held["repaired"]["kl"] < held["merged"]["kl"]
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "out" / "corrections.safetensors").values())


# ------------------------------------------------------------------------------------------------------ flipped bytes


def flip(path: Path, at: float = 0.7) -> Iterator[None]:
    whole = path.read_bytes()
    place = int(len(whole) * at)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    yield
    path.write_bytes(whole)


def test_a_flipped_byte_anywhere_is_named(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    """In every file that a repair reads of what was written before."""
    merged = Path(shutil.copytree(world.merged, tmp_path / "merged"))
    run = write_yaml(tmp_path / "darts.yml", world.run("maths", merged=str(merged)))
    out = tmp_path / "out"
    assert ran("calibrate", run, "--out", out).code == 0
    read = [p for kind in ("features", "heads") for p in (fresh_cache / kind).rglob("*.safetensors")]
    read += [merged / "config.json", *merged.glob("*.safetensors")]
    named = 0
    for path in read:
        for _ in flip(path):
            done = ran("calibrate", run, "--out", tmp_path / "again")
            if done.code:
                is_mistake(done, path.name, "checksum")
                named += 1
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
    unread = {"final.safetensors"}  # of the expert's, nothing is read where corrections are in depth
    assert named >= len(read) - len(unread) - 2
    for path in (out / "darts_config.json", out / "corrections.safetensors", out / "router.safetensors"):
        for _ in flip(path):
            is_mistake(ran("info", out), path.name, "checksum")
    adapters = tmp_path / "adapters"
    exported = ran("export", out, "--format", "lora", "--out", adapters, "--force")
    assert exported.code == 0, exported.err
    adapter = adapters / "maths"
    again = world.run("code", merged=f"{merged}+{adapter}", **QUICK)
    calibrated(again, tmp_path)
    shutil.rmtree(tmp_path / "out")
    for _ in flip(adapter / "adapter_model.safetensors"):
        refused(again, tmp_path, "adapter_model.safetensors", "checksum")


# ------------------------------------------------------------------------------------------------------------- memory


def test_a_real_limit_on_memory(tmp_path: Path) -> None:
    """In a process that may take 200 MB more, a pass that takes 1 MB a token is run by halves, and ends alike."""
    from mergedarts.features import final_states
    from tests.tiny import prompt_set, tiny

    model, prompts = tiny("llama"), prompt_set((60, 60, 50, 50, 40, 40, 40))

    def states() -> torch.Tensor:
        out = torch.zeros(prompts.tokens, model.config.hidden_size)

        def take(batch: list[int], state: torch.Tensor) -> None:
            for row, i in enumerate(batch):
                start = int(prompts.offsets[i])
                out[start : start + prompts.length(i)] = state[row, : prompts.length(i)]

        final_states(model, prompts, take, "x")
        return out

    want = states()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            limit = psutil.Process().memory_info().vms + (200 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            sizes: list[int] = []

            def hungry(module: Any, args: Any, kwargs: Any) -> None:
                taken = torch.zeros(kwargs["input_ids"].numel() << 20, dtype=torch.uint8)
                sizes.append(len(taken) >> 20)

            model.register_forward_pre_hook(hungry, with_kwargs=True)
            torch.testing.assert_close(states(), want, atol=1e-5, rtol=1e-4)
            assert sizes
            assert max(sizes) < 200
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_expert_that_changed_since_the_repair(world: World, tmp_path: Path) -> None:
    """What is measured against another expert than the one that was fitted to says nothing."""
    expert = Path(shutil.copytree(world.root / "models" / "code", tmp_path / "expert"))
    calibrated(with_models(world, world.merged, expert, **QUICK), tmp_path)
    assert ran("diagnose", tmp_path / "out", "--no-layers", "--json").code == 0
    for path in expert.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    for command in (("diagnose", tmp_path / "out", "--json"),
                    ("export", tmp_path / "out", "--format", "lora", "--out", tmp_path / "lora")):  # fmt: skip
        is_mistake(ran(*command), str(expert), "another expert")
