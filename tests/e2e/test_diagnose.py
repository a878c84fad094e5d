"""`mergedarts diagnose` from run files, repaired models and bare options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import DOMAINS, Ran, World, is_mistake, make_model, ran, save, write_config, write_lines, write_yaml

pytestmark = pytest.mark.slow


@pytest.fixture
def run_file(world: World, tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "darts.yml", world.run("code", fit={"holdout": 0.5}))


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("a model ran again")

    import mergedarts.features

    for name in ("collect", "continuations"):
        monkeypatch.setattr(mergedarts.features, name, run)


def test_a_run_file(world: World, run_file: Path, tmp_path: Path, fresh_cache: Path, monkeypatch: Any) -> None:
    out = tmp_path / "report"
    done = ran("diagnose", run_file, "--out", out)
    assert done.code == 0, done.err
    assert "Does the drift grow with position?" in done.out
    assert "Do high-entropy positions matter more?" in done.out
    assert f"report written to {out / 'report.html'}" in done.out
    data = json.loads((out / "drift.json").read_text())
    domain = data["domains"]["code"]
    assert domain["sequences"] == 6
    assert len(domain["models"]["merged"]["axes"]["layer"]) == 3
    assert domain["systematic"]["fitted_sequences"] == 6
    assert list(domain["models"]) == ["merged"]
    assert str(world.root) not in (out / "drift.json").read_text() + (out / "report.html").read_text()
    # The store has it all: nothing runs for the final site, and the numbers are the same.
    never(monkeypatch)
    again = ran("diagnose", run_file, "--no-layers", "--json")
    assert again.code == 0, again.err
    del domain["models"]["merged"]["axes"]["layer"]
    assert again.json == data


def test_a_repaired_model(world: World, repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    """The means of KL are those that the calibration wrote down, and so is the gap closed."""
    folder, made = repaired
    out = tmp_path / "report"
    done = ran("diagnose", folder, "--out", out, "--json")
    assert done.code == 0, done.err
    assert json.loads((out / "drift.json").read_text()) == done.json
    for name in DOMAINS:
        held, found = made.json["domains"][name]["held_out"], done.json["domains"][name]
        for model in ("merged", "repaired"):
            means = found["models"][model]["overall"]["measures"]
            assert means["kl"]["value"] == pytest.approx(held[model]["kl"], rel=1e-3)
            assert means["agreement"]["value"] == pytest.approx(held[model]["agreement"])
            assert found["tokens"] == held[model]["tokens"]
            assert len(found["models"][model]["axes"]["layer"]) == 3
        assert found["closed"]["kl"]["value"] == pytest.approx(held["share_closed"], rel=1e-3)
        first = found["disagreements"][0]
        assert set(first["top"]) == {"expert", "merged", "repaired"}
        assert set(first["kl"]) == {"merged", "repaired"}


def test_by_layer_of_a_repair_ends_in_its_final_states(world: World, repaired: tuple[Path, Ran]) -> None:
    """With and without layers, the same drift of the repaired model: two ways to run it."""
    a, b = (ran("diagnose", repaired[0], flag, "--json").json for flag in ("--layers", "--no-layers"))
    for name in DOMAINS:
        one, other = (d["domains"][name]["models"]["repaired"]["overall"]["measures"] for d in (a, b))
        assert one["drift"]["value"] == pytest.approx(other["drift"]["value"], rel=1e-3)
        assert "layer" not in b["domains"][name]["models"]["repaired"]["axes"]


def test_without_a_run_file(world: World, run_file: Path) -> None:
    bare = ran(
        "diagnose", "--merged", world.merged, "--expert", f"code={world.expert('code')}", "--prompts",
        f"code={world.prompts('code')}", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert bare.code == 0, bare.err
    assert bare.json["domains"]["code"]["sequences"] == 2
    assert bare.json["answers"]["position"]["answer"] == "unknown"
    assert "2 sequences are too few to tell" in bare.json["answers"]["position"]["sentence"]


def test_other_examples(world: World, repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    """Measured on a file of its own; with it, the calibration prompts may be gone."""
    other = write_lines(tmp_path / "more.jsonl", [{"prompt": f"write g{i}", "response": f"g = {i}"} for i in range(9)])
    done = ran("diagnose", repaired[0], "--held-out", f"code={other}", "--examples", "7", "--no-layers", "--json")
    assert done.code == 0, done.err
    found = done.json["domains"]
    assert (found["code"]["sequences"], found["code"]["systematic"]["fitted_sequences"]) == (7, 10)
    assert found["chat"]["sequences"] == 2
    folder = Path(shutil.copytree(repaired[0], tmp_path / "moved"))
    config = json.loads((folder / "darts_config.json").read_text())
    config["domains"]["code"]["source"]["prompts"] = str(tmp_path / "gone.jsonl")
    write_config(folder, json.dumps(config))
    is_mistake(ran("diagnose", folder, "--json"), "code", "gone.jsonl", "--prompts code=FILE", "--held-out code=FILE")
    done = ran("diagnose", folder, "--held-out", f"code={other}", "--no-layers", "--json")
    assert done.code == 0, done.err
    assert done.json["domains"]["code"]["sequences"] == 9
    assert done.json["domains"]["code"]["systematic"] is None
    given = ran("diagnose", folder, "--prompts", f"code={world.prompts('code')}", "--no-layers", "--json")
    assert given.code == 0, given.err
    assert given.json["domains"]["code"]["sequences"] == 2


def test_a_folder_of_before_prompts_were_recorded(world: World, repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(repaired[0], tmp_path / "old"))
    config = json.loads((folder / "darts_config.json").read_text())
    for entry in config["domains"].values():
        del entry["source"]
    write_config(folder, json.dumps(config))
    is_mistake(ran("diagnose", folder), "are not recorded in", "--prompts code=FILE")
    given = [part for d in DOMAINS for part in ("--prompts", f"{d}={world.prompts(d)}")]
    # Two of the domains were written by their experts at another length than the default: that is seen.
    is_mistake(ran("diagnose", folder, *given), "'maths' are not those that")


def test_one_prompt(world: World, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "one.jsonl", [{"prompt": "write a", "response": "a long answer of some words"}])
    done = ran(
        "diagnose", "--merged", world.merged, "--expert", f"x={world.expert('code')}", "--prompts", f"x={prompts}",
        "--dtype", "float32", "--out", tmp_path / "report", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    domain = done.json["domains"]["x"]
    assert domain["sequences"] == 1
    assert domain["systematic"] is None
    assert domain["models"]["merged"]["overall"]["measures"]["kl"]["low"] is None
    assert "1 sequence is too few" in done.json["answers"]["position"]["sentence"]


def test_a_domain_without_prompts(world: World, tmp_path: Path) -> None:
    """`form: svd` is fitted without prompts; then there must be others to measure on."""
    run = world.run("code") | {"correction": {"form": "svd", "rank": 2}}
    del run["domains"]["code"]["prompts"]
    path = write_yaml(tmp_path / "darts.yml", run)
    is_mistake(ran("diagnose", path), "'code' has no prompts", "--held-out code=FILE")
    made = ran("calibrate", path, "--out", tmp_path / "repaired")
    assert made.code == 0, made.err
    is_mistake(ran("diagnose", tmp_path / "repaired"), "are not recorded", "--held-out code=FILE")
    for source in (path, tmp_path / "repaired"):
        done = ran("diagnose", source, "--held-out", f"code={world.prompts('code')}", "--json")
        assert done.code == 0, done.err
        assert done.json["domains"]["code"]["sequences"] == 12
        assert done.json["domains"]["code"]["systematic"] is None
    assert done.json["domains"]["code"]["closed"]["kl"]["value"] > 0.05


def test_an_expert_that_is_the_merged_model(world: World, tmp_path: Path) -> None:
    done = ran(
        "diagnose", "--merged", world.merged, "--expert", f"code={world.merged}", "--prompts",
        f"code={world.prompts('code')}", "--dtype", "float32", "--out", tmp_path / "report", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    domain = done.json["domains"]["code"]
    means = {k: v["value"] for k, v in domain["models"]["merged"]["overall"]["measures"].items()}
    assert means == {"drift": 0, "relative": 0, "cosine": 1, "kl": pytest.approx(0, abs=1e-9), "agreement": 1}
    assert all(p["measures"]["drift"]["value"] < 1e-5 for p in domain["models"]["merged"]["axes"]["layer"])


def test_chats_of_eight_thousand_tokens(world: World, tmp_path: Path) -> None:
    from .conftest import make_tokenizer

    model = save(make_model(max_position_embeddings=8192), make_tokenizer(), tmp_path / "expert")
    long = [
        {"role": role, "content": f"{role} says {i} " + "sea sky sun rain " * 18}
        for i in range(44)
        for role in ("user", "assistant")
    ]
    short = {"messages": [{"role": "user", "content": "sea"}, {"role": "assistant", "content": "sky and sun"}]}
    prompts = write_lines(tmp_path / "chats.jsonl", [{"messages": long}, short])
    run = world.run() | {
        "merged": str(save(make_model(1, max_position_embeddings=8192), make_tokenizer(), tmp_path / "merged")),
        "domains": {"chat": {"expert": str(model), "prompts": str(prompts)}}, "max_tokens": 8192, "fit": {"holdout": 0},
    }  # fmt: skip
    done = ran("diagnose", write_yaml(tmp_path / "darts.yml", run), "--json")
    assert done.code == 0, done.err
    axes = done.json["domains"]["chat"]["models"]["merged"]["axes"]
    assert axes["position"][-1]["low"] <= 8190 < axes["position"][-1]["high"]
    assert axes["turn"][-1]["label"] == "9-16"
    assert sum(p["tokens"] for p in axes["turn"]) == done.json["domains"]["chat"]["tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["Name a run file or a repaired model"]),
        (["--merged", "m"], ["Name a run file"]),
        (["--merged", "m", "--expert", "code"], ["--expert code", "NAME=VALUE"]),
        (["--merged", "m", "--expert", "code=x"], ["'code' has no prompts", "--prompts code="]),
        (["--merged", "m", "--expert", "a=x", "--expert", "a=y"], ["given twice for 'a'"]),
        (["RUN", "--merged", "m"], ["leave --merged"]),
        (["RUN", "--held-out", "maths=x.jsonl"], ["no domain 'maths'", "code"]),
        (["RUN", "--held-out", "code=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["RUN", "--held-out", "code=PROMPTS"], ["among the calibration prompts"]),
        (["RUN", "--out", "OCCUPIED"], ["is not a result of mergedarts"]),
        (["nowhere.yml"], ["nowhere.yml does not exist"]),
        (["OCCUPIED"], ["is not a repaired model"]),
    ],
)
def test_mistakes(world: World, run_file: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("keep")
    named = {"RUN": str(run_file), "OCCUPIED": str(occupied)}
    given = [named.get(o, o).replace("PROMPTS", str(world.prompts("code"))) for o in options]
    is_mistake(ran("diagnose", *given, cwd=tmp_path), *words)
    assert (occupied / "mine.txt").read_text() == "keep"


def test_other_models_than_those_of_the_calibration(world: World, repaired: tuple[Path, Ran]) -> None:
    is_mistake(ran("diagnose", repaired[0], "--merged", world.base), "made for another model")
    is_mistake(
        ran("diagnose", repaired[0], "--expert", f"code={world.expert('chat')}"), "another expert", "--expert code="
    )
    is_mistake(ran("diagnose", repaired[0], "--prompts", f"code={world.prompts('maths')}"), "are not those that")
    is_mistake(ran("diagnose", repaired[0], "--prompts", "poems=x"), "no domain 'poems'")
