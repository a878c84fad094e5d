"""Run files and prompts that a user can get wrong: one sentence, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import World, is_mistake, listing, ran, refused, started, write_yaml

pytestmark = pytest.mark.slow

Edit = Callable[[dict[str, Any]], Any]


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
