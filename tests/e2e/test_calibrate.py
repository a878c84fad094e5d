"""`mergedarts calibrate` from run file to folder."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .conftest import (
    DOMAINS,
    Ran,
    World,
    calibrate,
    changed,
    is_mistake,
    listing,
    make_model,
    ran,
    save,
    write_lines,
    write_yaml,
)

pytestmark = pytest.mark.slow


def features(cache: Path) -> dict[str, Any]:
    return {k: v for k, v in listing(cache).items() if "features" in k and k.endswith(".safetensors")}


def test_the_default_repairs_every_domain(world: World, repaired: tuple[Path, Ran]) -> None:
    out, done = repaired
    assert done.err == "" or all(line.startswith("warning: ") for line in done.err.splitlines()), done.err
    config = done.json
    on_disk = json.loads((out / "darts_config.json").read_text())
    assert config == {k: v for k, v in on_disk.items() if k in config}
    files = ["README.md", "SHA256SUMS", "corrections.safetensors", "darts_config.json", "router.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == files
    assert list(config["domains"]) == list(DOMAINS)
    for name, entry in config["domains"].items():
        assert entry["shipped"], (name, entry)
        held = entry["held_out"]
        assert held["repaired"]["kl"] < 0.7 * held["merged"]["kl"], (name, held)
        assert held["merged"]["sequences"] == entry["sequences"]["held_out"] > 0
    tensors = load_file(out / "corrections.safetensors")
    assert sum(t.numel() for t in tensors.values()) == config["parameters"]["added"]
    assert config["parameters"]["share"] <= 0.5


@pytest.mark.parametrize(("preset", "table"), [("paper", True), ("surgery", False)])
def test_presets_of_the_paper(world: World, tmp_path: Path, preset: str, table: bool) -> None:
    run = world.run(*DOMAINS, preset=preset, fit={"steps": 60, "lr": 0.01}, budget=1)
    run["correction"] = {"positions": 64} if table else {}
    out, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err
    tensors = load_file(out / "corrections.safetensors")
    shipped = [d for d in DOMAINS if done.json["domains"][d]["shipped"]]
    assert shipped
    expected: dict[str, tuple[int, ...]] = {}
    for d in shipped:
        expected |= {f"{d}.down.weight": (16, 32), f"{d}.up.weight": (32, 16)}
        expected |= {f"{d}.position_bias": (64, 32)} if table else {}
    assert {k: tuple(v.shape) for k, v in tensors.items()} == expected
    settings = done.json["settings"]
    assert (settings["preset"], settings["fit"]["method"], settings["fit"]["seed"]) == (preset, "adam", 0)


def test_preset_on_the_command_line_wins(world: World, tmp_path: Path) -> None:
    _, done = calibrate(world.run(fit={"steps": 2}), tmp_path, "--preset", "surgery", "--budget", "100%")
    assert done.code == 0, done.err
    assert done.json["settings"]["preset"] == "surgery"
    assert done.json["settings"]["fit"]["loss"] == "l1"
    assert done.json["settings"]["budget"] == 1.0


def test_merge_form_merges_once_and_equals_merged_form(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    run = world.run("code") | {"merge": "../models/merge.yml"}
    del run["merged"]
    path = write_yaml(world.root / "runs" / "merge-form.yml", run)
    done = ran("calibrate", path, "--out", tmp_path / "out", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    merges = list((fresh_cache / "merged").iterdir())
    assert len(merges) == 1
    before = listing(merges[0])
    again = ran("calibrate", path, "--out", tmp_path / "again", "--json", cwd=tmp_path)
    assert again.code == 0, again.err
    assert listing(merges[0]) == before
    _, plain = calibrate(world.run("code"), tmp_path)
    a, b = done.json["domains"]["code"]["held_out"], plain.json["domains"]["code"]["held_out"]
    assert a == b


def test_experts_by_name_and_paths_relative_to_the_run_file(world: World, tmp_path: Path) -> None:
    run = world.run(*DOMAINS, merged="../models/merged")
    for domain, name in zip(DOMAINS, ("code", "maths-lora", "chat"), strict=True):
        run["domains"][domain] |= {"expert": name, "prompts": f"../prompts/{world.prompts(domain).name}"}
    path = write_yaml(world.root / "runs" / "by-name.yml", run)
    done = ran("calibrate", path, "--out", "here", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {d: e["expert"] for d, e in done.json["domains"].items()} == {d: world.expert(d) for d in DOMAINS}
    assert (tmp_path / "here" / "darts_config.json").is_file()


def test_a_second_run_and_a_second_fit_do_not_run_the_llm(
    world: World, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.run("code", "maths")
    _, first = calibrate(run, tmp_path)
    assert first.code == 0, first.err
    tensors = load_file(tmp_path / "out" / "corrections.safetensors")
    # The final site reads states of the merged model that a fit in depth does not: they are made once.
    assert calibrate(run | {"preset": "surgery", "fit": {"steps": 2}}, tmp_path)[1].code == 0
    before = features(fresh_cache)
    assert any("rollout-16" in name for name in before)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the LLM ran again")

    import mergedarts.features
    from mergedarts.fit.fisher import FisherPass

    for name in ("collect", "continuations", "entropies"):
        monkeypatch.setattr(mergedarts.features, name, never)
    monkeypatch.setattr(FisherPass, "run", never)
    _, second = calibrate(run, tmp_path)
    assert second.code == 0, second.err
    assert features(fresh_cache) == before
    again = load_file(tmp_path / "out" / "corrections.safetensors")
    assert all(torch.equal(tensors[k], again[k]) for k in tensors)
    assert tensors.keys() == again.keys()
    # Another fit of the same features: the model runs at no time, since the final site needs its states alone.
    _, surgery = calibrate(run | {"preset": "surgery", "fit": {"steps": 3}}, tmp_path)
    assert surgery.code == 0, surgery.err
    assert features(fresh_cache) == before


def test_changed_prompts_or_weights_are_other_features(world: World, tmp_path: Path, fresh_cache: Path) -> None:
    assert calibrate(world.run("code"), tmp_path)[1].code == 0
    before = set(features(fresh_cache))
    run = world.run("code")
    run["domains"]["code"]["samples"] = 11
    assert calibrate(run, tmp_path)[1].code == 0
    more = set(features(fresh_cache))
    assert more > before
    clone = tmp_path / "clone"
    shutil.copytree(world.expert("code"), clone)
    run["domains"]["code"]["expert"] = str(clone)
    assert calibrate(run, tmp_path)[1].code == 0
    assert set(features(fresh_cache)) == more, "the same weights in another folder are the same model"


def test_no_rollout_and_plain_text(world: World, tmp_path: Path) -> None:
    run = world.run("maths", "chat")
    for domain in run["domains"].values():
        domain["rollout"] = 0
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err
    with_rollouts = calibrate(world.run("maths", "chat"), tmp_path)[1].json
    for name in run["domains"]:
        assert done.json["domains"][name]["tokens"] < with_rollouts["domains"][name]["tokens"]


def test_all_forms_of_examples(world: World, tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "p.jsonl",
        [
            {"prompt": "one", "response": "two"},
            "a bare string",
            "",
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            {"messages": [{"role": r, "content": r} for r in ("user", "assistant", "user", "assistant")]},
            {"prompt": "naïve café 北京 🙂 \u0000 \x1b[31m", "response": ""},
            {"prompt": "<|im_end|> in the prompt", "response": "<|im_start|>x"},
            {"prompt": "extra keys", "response": None, "id": 3},
        ],
    )
    prompts.write_text(prompts.read_text().replace("a bare string", '"a bare string"'))
    run = world.run("code")
    run["domains"]["code"]["prompts"] = str(prompts)
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err
    counts = done.json["domains"]["code"]["sequences"]
    assert counts["fit"] + counts["held_out"] == 7


def test_windows_text(world: World, tmp_path: Path) -> None:
    """A byte-order mark and CRLF line ends are no mistake."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "hello there"}\r\n' * 4)
    run = world.run("code")
    run["domains"]["code"]["prompts"] = str(path)
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err


def test_an_own_folder_is_replaced_and_a_foreign_one_is_not(world: World, tmp_path: Path) -> None:
    run = world.run("code", preset="surgery", fit={"steps": 2}, budget=1)
    out, _ = calibrate(run, tmp_path)
    (out / "stale").write_text("x")
    assert calibrate(run, tmp_path)[1].code == 0
    assert not (out / "stale").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    before = listing(tmp_path)
    for target in (foreign, foreign / "thesis.txt"):
        is_mistake(ran("calibrate", tmp_path / "darts.yml", "--out", target), str(target))
    assert listing(tmp_path) == before


def test_five_prompts(world: World, tmp_path: Path) -> None:
    run = world.run(*DOMAINS)
    for domain in run["domains"].values():
        domain["samples"] = 5
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err
    assert done.json["domains"]["code"]["sequences"] == {"fit": 4, "held_out": 1}


@pytest.mark.parametrize("preset", ["default", "paper", "surgery"])
def test_one_prompt(world: World, tmp_path: Path, preset: str) -> None:
    run = world.run("code", preset=preset, budget=1, fit={"steps": 3})
    run["domains"]["code"]["samples"] = 1
    out, done = calibrate(run, tmp_path)
    is_mistake(done, "holdout")
    assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]
    _, done = calibrate(run | {"fit": {"holdout": 0, "steps": 3}}, tmp_path)
    assert done.code == 0, done.err
    assert done.json["domains"]["code"]["held_out"] is None
    for command in (["info", out], ["info", out, "--json"]):
        assert ran(*command).code == 0


def plain_model(world: World, name: str, share: float) -> str:
    """The base or a changed one with a tokenizer that has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world.base)
    tokenizer.chat_template = None
    folder = world.root / "models" / name
    if not folder.exists():
        save(changed(make_model(), 1, share), tokenizer, folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    return str(folder)


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_prompts_of_one_token(world: World, tmp_path: Path, preset: str) -> None:
    prompts = write_lines(tmp_path / "p.txt", list("abcdefgh"))
    run = world.run("code", preset=preset, budget=1, fit={"steps": 3})
    run["merged"] = plain_model(world, "plain-merged", 0.05)
    run["domains"]["code"] = {
        "expert": plain_model(world, "plain-expert", 0.25), "prompts": str(prompts), "rollout": 0,
    }  # fmt: skip
    _, done = calibrate(run, tmp_path)
    is_mistake(done, "'code'", "rollout")
    run["domains"]["code"]["rollout"] = 1
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err
    prompts.write_text("a\nb\nc d\ne\nf\ng h i\n")
    run["domains"]["code"]["rollout"] = 0
    _, done = calibrate(run, tmp_path)
    assert done.code == 0, done.err


def test_padded_vocabulary_is_no_mistake(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for rows in (320, 288):
        model = AutoModelForCausalLM.from_pretrained(world.expert("code"), dtype=torch.float32)
        model.resize_token_embeddings(rows, mean_resizing=False)
        folder = save(model, AutoTokenizer.from_pretrained(world.base), tmp_path / f"rows-{rows}")
        run = world.run("code")
        run["domains"]["code"]["expert"] = str(folder)
        _, done = calibrate(run, tmp_path)
        assert done.code == 0, done.err
        assert done.json["domains"]["code"]["held_out"]["repaired"]["kl"] > 0


def test_a_vocabulary_trimmed_below_what_the_prompts_use(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world.expert("code"), dtype=torch.float32)
    model.resize_token_embeddings(200, mean_resizing=False)
    folder = save(model, AutoTokenizer.from_pretrained(world.base), tmp_path / "trimmed")
    run = world.run("code")
    run["domains"]["code"]["expert"] = str(folder)
    out, done = calibrate(run, tmp_path)
    is_mistake(done, str(folder))
    assert not out.exists()


def test_an_expert_with_another_head_has_a_floor(repaired: tuple[Path, Ran]) -> None:
    domains = repaired[1].json["domains"]
    assert domains["chat"]["held_out"]["head_floor_kl"] > 1e-4
    # The merged head is the base's plus 0.4 of the chat expert's change, so every other expert has a floor as well.
    assert all(d["held_out"]["head_floor_kl"] >= 0 for d in domains.values())


# ------------------------------------------------------------------------------------------------------ do no harm


def harmless(world: World, **changes: Any) -> dict[str, Any]:
    run = world.run("code", **changes)
    run["domains"]["code"]["expert"] = str(world.merged)
    return run


@pytest.mark.parametrize("preset", ["default", "paper", "surgery"])
def test_an_expert_that_is_the_merged_model_ships_uncorrected(world: World, tmp_path: Path, preset: str) -> None:
    out, done = calibrate(harmless(world, preset=preset, budget=1, fit={"steps": 5}), tmp_path)
    assert done.code == 0, done.err
    assert "warning: domain 'code'" in done.err
    assert "ships uncorrected" in done.err
    entry = done.json["domains"]["code"]
    assert (entry["shipped"], entry["parameters"], done.json["parameters"]["added"]) == (False, 0, 0)
    shown = ran("info", out)
    assert shown.code == 0, shown.err
    assert "uncorrected" in shown.out
    told = ran("generate", out, "--domain", "code", "--prompt", "hi", "--max-new-tokens", "4", "--json")
    assert told.code == 0, told.err
    none = ran("generate", out, "--domain", "none", "--prompt", "hi", "--max-new-tokens", "4", "--json")
    assert told.json["text"] == none.json["text"]


def test_an_improvement_within_rounding_is_none(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with an expert that is the merged model, in float32: KL 0 before and -3.1e-9 after, and it was shipped."""
    from mergedarts.heldout import HeldOut

    def noise(self: HeldOut, _: object) -> Any:
        merged = self.merged()
        return dataclasses.replace(merged, kl=merged.kl - 3.1e-9)

    monkeypatch.setattr(HeldOut, "corrected", noise)
    _, done = calibrate(harmless(world), tmp_path)
    assert done.code == 0, done.err
    assert not done.json["domains"]["code"]["shipped"], done.json["domains"]["code"]["held_out"]


def test_strict_makes_it_an_error(world: World, tmp_path: Path) -> None:
    _, done = calibrate(harmless(world), tmp_path, "--strict")
    is_mistake(done, "'code'", "strict")
    assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]
    _, done = calibrate(harmless(world, strict=True), tmp_path)
    is_mistake(done, "'code'", "strict")
    assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]


@pytest.mark.parametrize("budget", [1e-9, 0.001])
def test_a_budget_below_one_rank_is_said(world: World, tmp_path: Path, budget: float) -> None:
    """Not the words of a fit that failed to help: the budget is named, so that the user knows what to change."""
    _, done = calibrate(world.run("code", budget=budget), tmp_path)
    if done.code:
        is_mistake(done, "budget")
        assert [p.name for p in tmp_path.iterdir()] == ["darts.yml"]
    else:
        assert re.search(r"warning: .*budget", done.err), done.err
