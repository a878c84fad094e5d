"""A repaired model in use: `info`, `generate` and `mergedarts.load`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergedarts.checksums import write_sums

from .conftest import (
    DOMAINS,
    Ran,
    World,
    is_mistake,
    listing,
    make_model,
    ran,
    started,
    write_config,
    write_lines,
    write_yaml,
)

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------------- info


def test_info_says_what_the_model_is(world: World, repaired: tuple[Path, Ran]) -> None:
    out, done = repaired
    shown = ran("info", out)
    assert shown.code == 0, shown.err
    assert shown.err == ""
    for word in (str(world.merged), *DOMAINS, "budget 50", "seed 0", world.expert("code")):
        assert word in shown.out.replace("\n", ""), word
    assert f"{done.json['parameters']['added']:,}" in shown.out
    assert "Traceback" not in shown.out


def test_info_as_json(repaired: tuple[Path, Ran]) -> None:
    shown = ran("info", repaired[0], "--json")
    assert shown.code == 0
    assert shown.err == ""
    assert shown.json["parameters"] == repaired[1].json["parameters"]
    assert set(shown.json["sites"]) == set(DOMAINS)
    assert shown.out.count("\n") == 1


def test_info_mistakes(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    is_mistake(ran("info", tmp_path / "nowhere"), "nowhere", "calibrate")
    is_mistake(ran("info", tmp_path), str(tmp_path))
    spoiled = Path(shutil.copytree(repaired[0], tmp_path / "spoiled"))
    config = spoiled / "darts_config.json"
    good = config.read_text()
    for text in ("", "[]", "{", '{"format": 1}', "null", "\x80"):
        write_config(spoiled, text)
        is_mistake(ran("info", spoiled), "darts_config.json")
    write_config(spoiled, json.dumps(json.loads(good) | {"format": 99}))
    is_mistake(ran("info", spoiled), "99")
    for key in ("merged", "domains", "sites", "parameters", "settings"):
        for value in (None, 3, [], {}):
            write_config(spoiled, json.dumps(json.loads(good) | {key: value}))
            is_mistake(ran("info", spoiled))
    write_config(spoiled, good)
    weights = spoiled / "corrections.safetensors"
    whole = weights.read_bytes()
    for data in (b"", whole[:-20], b"\0" * 64, b"garbage" * 40):
        weights.write_bytes(data)
        is_mistake(ran("info", spoiled), "corrections.safetensors", "checksum", "calibrate")
        write_sums(spoiled)  # a stranger's folder may say of itself what it likes
        is_mistake(ran("info", spoiled), "corrections.safetensors", "calibrate")
    weights.unlink()
    is_mistake(ran("info", spoiled), "corrections.safetensors")


def test_tensors_of_other_shapes_are_said(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    """`load_corrections` promises a sentence for another shape."""
    from safetensors.torch import save_file

    spoiled = Path(shutil.copytree(repaired[0], tmp_path / "spoiled"))
    tensors = load_file(spoiled / "corrections.safetensors")
    name = next(k for k in tensors if k.endswith("up.weight"))
    save_file(tensors | {name: torch.zeros(5, 3)}, spoiled / "corrections.safetensors")
    write_sums(spoiled)
    is_mistake(ran("generate", spoiled, "--domain", name.split(".")[0], "--prompt", "hi", "--max-new-tokens", "2"))


# --------------------------------------------------------------------------------------------------------- generate


def test_generate_in_a_process_of_its_own(world: World, repaired: tuple[Path, Ran]) -> None:
    done = started(
        world.cache, "generate", repaired[0], "--domain", "code", "--max-new-tokens", 8, "--json", stdin="write f(x)"
    )
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.json["domain"] == "code"
    assert done.json["prompt"] == "write f(x)"
    assert set(done.json) >= {"domain", "prompt", "text"}
    inside = ran(
        "generate", repaired[0], "--domain", "code", "--max-new-tokens", "8", "--json", "--prompt", "write f(x)"
    )
    assert inside.json["text"] == done.json["text"]


def test_domains_differ_and_none_is_the_merged_model(world: World, repaired: tuple[Path, Ran]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = {}
    for domain in (*DOMAINS, "none"):
        done = ran(
            "generate", repaired[0], "--domain", domain, "--prompt", "what is 3", "--max-new-tokens", "24", "--json"
        )
        assert done.code == 0, done.err
        texts[domain] = done.json["text"]
    assert len(set(texts.values())) > 1
    model = AutoModelForCausalLM.from_pretrained(world.merged, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(world.merged)
    turns = [{"role": "user", "content": "what is 3"}]
    ids = tokenizer(
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True), return_tensors="pt"
    )
    written = model.generate(**{k: ids[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == texts["none"]


def test_generate_mistakes(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    out = repaired[0]
    is_mistake(ran("generate", out, "--domain", "law", "--prompt", "x"), "'law'", "code", "none")
    is_mistake(ran("generate", out, "--domain", "code", "--prompt", "  "), "prompt")
    is_mistake(ran("generate", out, "--domain", "code", stdin=""), "prompt", "stdin")
    is_mistake(ran("generate", tmp_path, "--domain", "code", "--prompt", "x"), str(tmp_path))
    is_mistake(ran("generate", out, "--domain", "code", "--prompt", "x", "--device", "toaster"), "toaster")
    is_mistake(ran("generate", out, "--domain", "code", "--prompt", "x", "--merged", "/nowhere"), "/nowhere")
    assert ran("generate", out, "--domain", "code", "--prompt", "x", "--max-new-tokens", "0").code == 2
    assert ran("generate", out, "--prompt", "x").code == 2
    assert list(tmp_path.iterdir()) == []


def test_no_control_characters_reach_the_terminal(repaired: tuple[Path, Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    import mergedarts.generation

    evil = "\x1b[31mred\x1b[0m \x07 \x9b2J \u202etxt\r\x00 [bold]markup[/bold] end"
    monkeypatch.setattr(mergedarts.generation, "answer", lambda *a, **k: evil)
    done = ran("generate", repaired[0], "--domain", "code", "--prompt", "\x1b[2J", "--max-new-tokens", "2")
    assert done.code == 0, done.err
    assert all(c.isprintable() or c in "\n\t" for c in done.out), repr(done.out)
    assert "[bold]markup[/bold] end" in done.out
    as_json = ran("generate", repaired[0], "--domain", "code", "--prompt", "\x1b[2J", "--json")
    assert "\x1b" not in as_json.out
    assert as_json.json["text"] == evil


@pytest.mark.parametrize("prompt", ["\x1b[31m\x07", "🙂", "<|im_end|>", "a" * 4_000, "-x", "\ud800"])
def test_odd_prompts(repaired: tuple[Path, Ran], prompt: str) -> None:
    done = ran("generate", repaired[0], "--domain", "maths", f"--prompt={prompt}", "--max-new-tokens", "3")
    assert done.code in (0, 2)
    if done.code:
        is_mistake(done)
    assert all(c.isprintable() or c in "\n\t" for c in done.out), repr(done.out)


def test_another_merged_model_is_refused(world: World, repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    """The merged model is changed after calibrating: the corrections no longer belong to it."""
    other = Path(shutil.copytree(world.merged, tmp_path / "other"))
    moved = ran(
        "generate", repaired[0], "--domain", "code", "--prompt", "x", "--max-new-tokens", "2", "--merged", other
    )
    assert moved.code == 0, moved.err
    run = write_yaml(tmp_path / "darts.yml", world.run("code", merged="other"))
    assert ran("calibrate", run, "--out", tmp_path / "out").code == 0
    make_model(seed=9).save_pretrained(other)
    for leftover in other.glob("model-*"):
        leftover.unlink()
    (other / "model.safetensors.index.json").unlink(missing_ok=True)
    (other / "SHA256SUMS").unlink()
    is_mistake(ran("generate", tmp_path / "out", "--domain", "code", "--prompt", "x"), str(other), "another model")
    shutil.rmtree(other)
    is_mistake(ran("generate", tmp_path / "out", "--domain", "code", "--prompt", "x"), str(other), "gone")


# ------------------------------------------------------------------------------------------------------------- load


def test_load_gives_model_tokenizer_and_handle(world: World, repaired: tuple[Path, Ran]) -> None:
    import mergedarts

    model, tokenizer, handle = mergedarts.load(repaired[0])
    assert handle.domains == list(DOMAINS)
    assert handle.domain is None
    saved = load_file(repaired[0] / "corrections.safetensors")
    kept = {
        f"{d}.{name}.{part}.weight" if name != "final" else f"{d}.{part}.weight": getattr(site, part)
        for d, correction in handle.corrections.items()
        for name, site in correction.items()
        for part in ("down", "up")
    }
    assert kept
    for name, tensor in kept.items():
        assert torch.equal(saved[name], tensor), name
    texts = ["write f(x)", "what is 2", "a poem"]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        bare = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
        alone = []
        for domain in DOMAINS:
            handle.domain = domain
            alone.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
        handle.domain = list(DOMAINS)
        together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        for row in range(3):
            real = batch["attention_mask"][row].bool()
            torch.testing.assert_close(together[row][real], alone[row][row][real], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(together[row][real], bare[row][real])
        handle.detach()
        after = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(bare, after)


def test_load_mistakes(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    import mergedarts

    with pytest.raises(mergedarts.UserError, match="law"):
        mergedarts.load(repaired[0], domain="law")
    with pytest.raises(mergedarts.UserError):
        mergedarts.load(tmp_path)
    with pytest.raises(mergedarts.UserError, match="float9"):
        mergedarts.load(repaired[0], dtype="float9")
    model, _, handle = mergedarts.load(repaired[0], domain="code")
    with pytest.raises(mergedarts.UserError, match="law"):
        handle.domain = ["code", "law"]
    handle.domain = ["code", None]
    with pytest.raises(mergedarts.UserError, match="3 rows"):
        model(input_ids=torch.ones(3, 4, dtype=torch.long))


def test_use_leaves_the_folders_as_they_were(world: World, repaired: tuple[Path, Ran]) -> None:
    before = listing(repaired[0]), listing(world.merged)
    ran("info", repaired[0])
    ran("generate", repaired[0], "--domain", "code", "--prompt", "x", "--max-new-tokens", "2")
    assert (listing(repaired[0]), listing(world.merged)) == before


def test_the_held_out_figures_are_what_the_loaded_model_does(world: World, tmp_path: Path) -> None:
    """KL and agreement of the report, computed again by plain forward passes of the loaded models."""
    import mergedarts
    from mergedarts.models import ModelRef, load_model
    from mergedarts.prompts import split

    run = write_yaml(tmp_path / "darts.yml", world.run("code"))
    done = ran("calibrate", run, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    held = done.json["domains"]["code"]["held_out"]
    model, tokenizer, handle = mergedarts.load(tmp_path / "out")
    expert = load_model(ModelRef.parse(world.expert("code")), torch.float32, torch.device("cpu"))
    rows = [json.loads(line) for line in world.prompts("code").read_text().splitlines()]
    sums = {"merged": [0.0, 0.0], "repaired": [0.0, 0.0]}
    count = 0
    for i in split(len(rows), 0.2, 0)[1]:
        turns = [{"role": "user", "content": rows[i]["prompt"]}]
        start = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before = tokenizer(start, add_special_tokens=False)["input_ids"]
        after = tokenizer(rows[i]["response"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([before + after])
        at = slice(len(before) - 1, len(before) + len(after) - 1)
        count += len(after)
        with torch.no_grad():
            p = expert(input_ids=ids).logits[0, at].log_softmax(-1)
            for name, domain in (("merged", None), ("repaired", "code")):
                handle.domain = domain
                q = model(input_ids=ids).logits[0, at].log_softmax(-1)
                sums[name][0] += float((p.exp() * (p - q)).sum())
                sums[name][1] += float((p.argmax(-1) == q.argmax(-1)).sum())
    for name, (kl, agree) in sums.items():
        assert held[name]["tokens"] == count
        assert held[name]["kl"] == pytest.approx(kl / count, rel=2e-3)
        assert held[name]["agreement"] == pytest.approx(agree / count)


def test_a_domain_may_have_any_allowed_name(world: World, tmp_path: Path) -> None:
    names = ["a", "A", "9-lives", "x_y-z", "d" * 64, "true", "1e3"]
    prompts = write_lines(tmp_path / "p.txt", ["hello there", "and again", "once more"])
    domain = {"expert": world.expert("code"), "prompts": str(prompts), "rollout": 4}
    run = world.run("code", preset="surgery", fit={"steps": 1}, budget=1) | {"domains": dict.fromkeys(names, domain)}
    path = tmp_path / "darts.yml"
    path.write_text(json.dumps(run))  # JSON is YAML, and quotes names that YAML reads as other types
    done = ran("calibrate", path, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert list(done.json["domains"]) == names
    assert ran("info", tmp_path / "out").code == 0


def test_auto_chooses_by_the_prompt(world: World, repaired: tuple[Path, Ran]) -> None:
    """The router of the default recipe: what it says of itself, and that `auto` is the domain it names."""
    import mergedarts

    routing = repaired[1].json["router"]
    held = routing["held_out"]
    assert {name: sum(row.values()) for name, row in held["chosen"].items()} == {"code": 2, "maths": 2, "chat": 2}
    right = sum(held["chosen"][name][name] for name in DOMAINS)
    assert held["accuracy"] == pytest.approx(right / held["sequences"])
    assert routing["second_pass"] == (routing["depth"] > 1)
    for name in DOMAINS:
        for domain, entry in repaired[1].json["domains"].items():
            if entry["held_out"] and name == domain:
                assert routing["kl"][name]["unsure"] == pytest.approx(entry["held_out"]["merged"]["kl"])
                if entry["shipped"]:
                    assert routing["kl"][name][name] == pytest.approx(entry["held_out"]["repaired"]["kl"])
    card = (repaired[0] / "README.md").read_text()
    assert "## Router" in card
    assert "| prompts of | code | maths | chat | unsure |" in card
    shown = ran("info", repaired[0])
    assert "router" in shown.out
    assert "prompts of" in shown.out

    prompt = "what is 5 times 8?"
    auto = ran("generate", repaired[0], "--domain", "auto", "--prompt", prompt, "--max-new-tokens", "6", "--json")
    assert auto.code == 0, auto.err
    named = ran("generate", repaired[0], "--domain", auto.json["domain"], "--prompt", prompt, "--max-new-tokens", "6",
                "--json")  # fmt: skip
    assert named.json == auto.json

    model, tokenizer, handle = mergedarts.load(repaired[0], domain="auto")
    texts = ["write f3(x)", "what is 4 times 7?", "a poem about sea", "zzzz qqqq 0000 ~~~~ |||| zzzz"]
    rows = [tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"]
            for t in texts]  # fmt: skip
    with torch.no_grad():
        alone = []
        for row in rows:
            model(input_ids=torch.tensor([row]))
            alone += handle.chosen
        batch = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert handle.chosen == alone
    assert alone[3] is None


def test_no_router(world: World, tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "darts.yml", world.run("code"))
    done = ran("calibrate", run, "--out", tmp_path / "out", "--no-router", "--json")
    assert done.code == 0, done.err
    assert done.json["router"] is None
    assert not (tmp_path / "out" / "router.safetensors").exists()
    is_mistake(ran("generate", tmp_path / "out", "--domain", "auto", "--prompt", "x"), "router")
    assert "a domain has to be named" in ran("info", tmp_path / "out").out


def test_a_broken_router_is_said(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(repaired[0], tmp_path / "copy"))
    (folder / "router.safetensors").unlink()
    is_mistake(ran("info", folder), "router.safetensors")
