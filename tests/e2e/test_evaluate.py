"""`mergedarts evaluate`: on tiny models and local tasks, against the harness's own command and plain computation."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("lm_eval")

from mergedarts.checksums import write_sums

from .conftest import Ran, World, environment, is_mistake, listing, ran, write_config, write_lines, write_yaml

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multiple choice, a generation, a rolling likelihood and a code task, with their data on disk."""
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"what is {i} times {i + 3}?", "choices": ["one", "two", "four"], "answer": i % 3}
        for i in range(12)
    ]
    write_lines(root / "choice.jsonl", rows)
    write_lines(root / "write.jsonl", [{"question": f"write f{i}(x)", "answer": LETTERS[i]} for i in range(8)])
    problems = [
        {"prompt": "def one():\n", "test": "assert one() == 1", "body": "    return 1"},
        {"prompt": "def two():\n", "test": "assert two() == 2", "body": "    return 3"},
        {"prompt": "def three():\n", "test": "assert three() == 3", "body": "    exit(0)"},
    ]
    write_lines(root / "program.jsonl", problems)

    def task(name: str, data: str, **settings: Any) -> None:
        base = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(root / data)}}}
        write_yaml(root / f"{name}.yaml", base | {"test_split": "test"} | settings)

    task(
        "choice", "choice.jsonl", output_type="multiple_choice", doc_to_text="{{question}}",
        doc_to_choice="choices", doc_to_target="answer",
        metric_list=[
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    )  # fmt: skip
    generation = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    task(
        "write", "write.jsonl", output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        generation_kwargs=generation,
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    task(
        "rolling", "write.jsonl", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{question}}",
        metric_list=[{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    )  # fmt: skip
    (root / "judge.py").write_text(
        "import evaluate\n"
        "metric = evaluate.load('code_eval')\n"
        "def passed(references, predictions):\n"
        "    return metric.compute(references=references, predictions=predictions, k=[1])[0]['pass@1']\n"
        "def complete(answers, docs):\n"
        "    return [[doc['prompt'] + doc['body'] for _ in each] for each, doc in zip(answers, docs)]\n"
    )
    text = (root / "choice.yaml").read_text().splitlines()
    (root / "program.yaml").write_text(
        "task: program\nunsafe_code: true\noutput_type: generate_until\ndoc_to_text: '{{prompt}}'\n"
        "doc_to_target: '{{test}}'\n" + "\n".join(text[1:6]).replace("choice.jsonl", "program.jsonl") + "\n"
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 2, do_sample: false}\n'
        "metric_list:\n- metric: !function judge.passed\n  aggregation: mean\n  higher_is_better: true\n"
        "filter_list:\n- name: complete\n  filter:\n  - function: custom\n    filter_fn: !function judge.complete\n"
    )
    return root


def evaluate(repaired: tuple[Path, Ran], tasks: Path, names: str, *more: object) -> Ran:
    route = ",".join(f"{name}=code" for name in names.split(","))
    return ran("evaluate", repaired[0], "--tasks", names, "--route", route, "--include-path", tasks, *more)


def test_the_harness_s_own_command_finds_the_same(
    world: World, repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path
) -> None:
    ours = evaluate(repaired, tasks, "choice,write", "--limit", 6, "--json")
    assert ours.code == 0, ours.err
    command = [
        sys.executable, "-m", "mergedarts.evaluation", "run", "--model", "mergedarts", "--model_args",
        f"path={repaired[0]},domain=code", "--tasks", "choice,write", "--include_path", tasks, "--limit", 6,
        "--output_path", tmp_path,
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment(world.cache), timeout=300
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(next(tmp_path.rglob("results_*.json")).read_text())["results"]
    for task, metric in (("choice", "acc,none"), ("choice", "acc_norm,none"), ("write", "exact_match,none")):
        assert ours.json["harness"][task]["repaired"][metric] == pytest.approx(theirs[task][metric], abs=1e-12)
    rows = {(r["task"], r["metric"]): r["comparison"] for r in ours.json["rows"]}
    assert rows["choice", "acc"]["repaired"] == pytest.approx(theirs["choice"]["acc,none"])
    assert rows["choice", "acc"]["examples"] == 6


def test_the_harness_s_own_model_scores_merged_and_expert_alike(
    world: World, repaired: tuple[Path, Ran], tasks: Path
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    ours = evaluate(repaired, tasks, "choice,write", "--limit", 6, "--json")
    assert ours.code == 0, ours.err
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    for name, folder in (("merged", str(world.merged)), ("expert", world.expert("code"))):
        theirs = lm_eval.simple_evaluate(
            "hf", {"pretrained": folder, "dtype": "float32"}, ["choice", "write"], device="cpu", limit=6,
            task_manager=manager, bootstrap_iters=0,
        )["results"]  # fmt: skip
        for task, metric in (("choice", "acc,none"), ("choice", "acc_norm,none"), ("write", "exact_match,none")):
            assert ours.json["harness"][task][name][metric] == pytest.approx(theirs[task][metric], abs=1e-12)


def test_likelihoods_by_plain_forward_passes(
    world: World, repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path
) -> None:
    """The choice each model takes, from its logits."""
    import mergedarts
    from mergedarts.models import ModelRef, load_model

    done = evaluate(repaired, tasks, "choice", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    model, tokenizer, handle = mergedarts.load(repaired[0], domain="code", device="cpu")
    rows = [json.loads(line) for line in (tasks / "choice.jsonl").read_text().splitlines()]

    def right(some: Any) -> list[float]:
        out = []
        for row in rows:
            sums = []
            for choice in row["choices"]:
                before = tokenizer(row["question"])["input_ids"]
                whole = tokenizer(f"{row['question']} {choice}")["input_ids"]
                with torch.no_grad():
                    logits = some(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
                sums.append(sum(float(logits[t - 1, whole[t]]) for t in range(len(before), len(whole))))
            out.append(float(max(range(3), key=sums.__getitem__) == row["answer"]))
        return out

    expected = {"repaired": right(model)}
    handle.domain = None
    expected["merged"] = right(model)
    expected["expert"] = right(load_model(ModelRef.parse(world.expert("code")), torch.float32, torch.device("cpu")))
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    for name, values in expected.items():
        assert [a["scores"]["acc,none"] for a in answers if a["model"] == name] == values, name


def test_zeros_score_as_the_bare_model(repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    zero = Path(shutil.copytree(repaired[0], tmp_path / "zero"))
    tensors = load_file(zero / "corrections.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, zero / "corrections.safetensors")
    write_sums(zero)
    done = ran(
        "evaluate", zero, "--tasks", "choice,write,rolling", "--route", "choice=code,write=chat,rolling=code",
        "--include-path", tasks, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    for task, models in done.json["harness"].items():
        assert models["repaired"] == models["merged"], task
    for row in done.json["rows"]:
        c = row["comparison"]
        assert (c["difference"]["value"], c["difference"]["low"], c["difference"]["high"]) == (0, 0, 0)
        assert c["test"]["p"] == 1
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    by = {m: [a["answers"] for a in answers if a["model"] == m] for m in ("repaired", "merged")}
    assert by["repaired"] == by["merged"]
    assert any("rolling" in note and "word_perplexity" in note for note in done.json["notes"])


def test_what_is_written(repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    done = evaluate(repaired, tasks, "choice,write", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    for word in ("choice", "acc_norm", "exact_match", "McNemar", "by Holm over 3 row(s)", str(tmp_path / "out")):
        assert word in done.out, (word, done.out)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "evaluation.json", "evaluation.md", "evaluation.csv", "answers.jsonl", "forest.png", "forest.svg"
    }  # fmt: skip
    whole = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    lines = list(csv.DictReader((tmp_path / "out" / "evaluation.csv").read_text().splitlines()))
    assert len(lines) == len(whole["rows"]) == 3
    for line, row in zip(lines, whole["rows"], strict=True):
        assert line["task"] == row["task"]
        assert float(line["difference"]) == row["comparison"]["difference"]["value"]
        assert math.isclose(float(line["p_holm"]), row["comparison"]["test"]["holm"])
    assert (tmp_path / "out" / "evaluation.md").read_text().count("\n| ") == 3
    assert (tmp_path / "out" / "forest.png").read_bytes()[:4] == b"\x89PNG"
    again = evaluate(repaired, tasks, "choice", "--out", tmp_path / "out")
    assert again.code == 0, again.err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis").write_text("x")
    is_mistake(evaluate(repaired, tasks, "choice", "--out", foreign), str(foreign))


def test_a_second_run_loads_no_model(
    repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted run has done is there; what is not is run alone."""
    import mergedarts.evaluation.compare as module

    assert evaluate(repaired, tasks, "choice", "--limit", 4).code == 0
    loaded: list[str] = []
    real = module.Models._only
    monkeypatch.setattr(module.Models, "_only", lambda self, name, make: loaded.append(name) or real(self, name, make))
    first = evaluate(repaired, tasks, "choice", "--limit", 4, "--json")
    assert first.code == 0
    assert loaded == []
    assert evaluate(repaired, tasks, "choice,write", "--limit", 4).code == 0
    assert loaded == ["repaired 0", "repaired 0", "expert code"]
    loaded.clear()
    for changed in (["--limit", 5], ["--limit", 4, "--num-fewshot", 0, "--apply-chat-template"]):
        assert evaluate(repaired, tasks, "choice", *changed).code == 0
        assert len(loaded) == 3
        loaded.clear()
    data = tasks / "choice.jsonl"
    kept = data.read_text()
    try:
        data.write_text(kept.replace("one", "nine"))
        assert evaluate(repaired, tasks, "choice", "--limit", 4).code == 0
        assert len(loaded) == 3
    finally:
        data.write_text(kept)


def test_seeds_are_pooled(world: World, repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(repaired[0], tmp_path / "other"))
    tensors = load_file(other / "corrections.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in tensors.items()}, other / "corrections.safetensors")
    write_sums(other)
    done = ran(
        "evaluate", repaired[0], other, "--tasks", "choice", "--route", "choice=code", "--include-path", tasks, "--json"
    )
    assert done.code == 0, done.err
    row = done.json["rows"][0]["comparison"]
    assert (row["seeds"], row["examples"], row["test"]["name"]) == (2, 12, "sign flips")
    models = done.json["harness"]["choice"]
    assert row["repaired"] == pytest.approx((models[str(repaired[0])]["acc,none"] + models[str(other)]["acc,none"]) / 2)
    twice = ran("evaluate", repaired[0], repaired[0], "--tasks", "choice", "--include-path", tasks)
    is_mistake(twice, "once")


def test_code_runs_in_the_sandbox_and_only_when_asked(repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    before = listing(tmp_path)
    is_mistake(evaluate(repaired, tasks, "program"), "program", "--allow-code-execution")
    assert listing(tmp_path) == before
    done = evaluate(repaired, tasks, "program", "--allow-code-execution", "--json")
    assert done.code == 0, done.err
    (row,) = done.json["rows"]
    # One passes, one is wrong, one leaves by exit(0) before its tests.
    assert row["comparison"]["merged"] == pytest.approx(1 / 3)
    is_mistake(evaluate(repaired, tasks, "program"), "program", "--allow-code-execution")


def test_mistakes(world: World, repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    before = listing(tmp_path)
    out = repaired[0]
    include = ("--include-path", tasks)
    is_mistake(ran("evaluate", out, "--tasks", "choice", *include), "choice", "--route choice=DOMAIN")
    is_mistake(ran("evaluate", out, "--tasks", "choice", "--route", "choice=law", *include), "'law'", "code")
    is_mistake(ran("evaluate", out, "--tasks", "choice", "--route", "choice", *include), "'choice'", "TASK=DOMAIN")
    is_mistake(ran("evaluate", out, "--tasks", "choice", "--route", "write=code", *include), "'write'")
    is_mistake(ran("evaluate", out, "--tasks", "choice", "--route", "choice=code,choice=chat", *include), "twice")
    is_mistake(ran("evaluate", out, "--tasks", " , ", *include), "--tasks")
    alpaca = ("--alpaca-eval", tmp_path / "o.json")
    is_mistake(ran("evaluate", out, *alpaca), "--route alpaca_eval=DOMAIN")
    is_mistake(ran("evaluate", out, *alpaca, "--route", "alpaca_eval=chat"), "--instructions")
    asked = (*alpaca, "--route", "alpaca_eval=chat", "--instructions", world.prompts("chat"))
    is_mistake(ran("evaluate", out, *asked, "--annotations", "repaired=x.json"), "merged=FILE")
    is_mistake(ran("evaluate", out, *asked, "--judge", "http://127.0.0.1:1/v1"), "http://127.0.0.1:1/v1", "address")
    is_mistake(ran("evaluate", out, *asked, "--judge", "/nowhere"), "/nowhere")
    is_mistake(ran("evaluate", tmp_path, "--tasks", "choice", *include), str(tmp_path))
    is_mistake(ran("evaluate", out, "--tasks", "choice", "--include-path", tmp_path / "no"), "no", "--include-path")
    unrouted = Path(shutil.copytree(out, tmp_path / "unrouted"))
    config = json.loads((unrouted / "darts_config.json").read_text())
    write_config(unrouted, json.dumps(config | {"router": None}))
    before = listing(tmp_path)
    is_mistake(ran("evaluate", unrouted, "--tasks", "choice", "--route", "choice=code", "--router", *include), "router")
    is_mistake(evaluate(repaired, tasks, "choice", "--dtype", "float99"), "float99")
    is_mistake(evaluate(repaired, tasks, "choice", "--device", "toaster"), "toaster")
    assert ran("evaluate", out, "--tasks", "choice", "--limit", "0").code == 2
    assert listing(tmp_path) == before


def test_broken_tasks_are_said(repaired: tuple[Path, Ran], tmp_path: Path) -> None:
    write_yaml(
        tmp_path / "broken.yaml",
        {"task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/nowhere.jsonl"}}},
    )
    is_mistake(evaluate(repaired, tmp_path, "broken"), "broken", "/nowhere.jsonl")


def test_another_expert_is_refused(world: World, repaired: tuple[Path, Ran], tasks: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(repaired[0], tmp_path / "moved"))
    config = json.loads((moved / "darts_config.json").read_text())
    config["domains"]["code"]["expert_fingerprint"] = "0" * 32
    write_config(moved, json.dumps(config))
    done = ran("evaluate", moved, "--tasks", "choice", "--route", "choice=code", "--include-path", tasks, "--limit", 2)
    is_mistake(done, world.expert("code"), "'code'")


def test_the_harness_s_command_says_mistakes(
    repaired: tuple[Path, Ran], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval.__main__
    from lm_eval.api.registry import get_model

    from mergedarts.evaluation.__main__ import main

    model = {"path": str(repaired[0]), "domain": "law"}
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: get_model("mergedarts").create_from_arg_obj(model))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "error: There is no domain 'law'" in capsys.readouterr().err
