"""What is read out of the harness's logged samples, and the device it is given."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval")

from mergedarts.errors import UserError
from mergedarts.evaluation import harness
from mergedarts.evaluation.harness import Settings, Tasks
from mergedarts.evaluation.lm import usable


def logged(doc, by, **metrics):
    return {"doc_id": doc, "filter": by, "resps": [[f"answer {doc}"]], "metrics": list(metrics)} | metrics


def test_scores_by_example_metric_and_filter():
    found = {
        "results": {"em,strict": 0.5, "em,flexible": 1.0, "ppl,strict": 7.3, "f1,strict": 0.25, "f1,flexible": 0.9},
        "higher_is_better": {"em": True, "ppl": False, "f1": True},
        "samples": [
            logged(1, "strict", em=True, ppl=(-3.0, 2), f1=0.5), logged(0, "strict", em=0, ppl=(-1.0, 1), f1=0.0),
            logged(1, "flexible", em=1.0, f1=0.5), logged(0, "flexible", em=1.0, f1=0.0),
        ],
    }  # fmt: skip
    scores = harness._scores(found)
    assert scores.examples == [0, 1]
    assert scores.scores == {("em", "strict"): [0, 1], ("em", "flexible"): [1, 1], ("f1", "strict"): [0, 0.5]}
    # A tuple is no score of an example; 0.9 is not the mean of 0 and 0.5, so f1 is something else there.
    assert sorted(scores.left_out) == ["f1 (flexible)", "ppl (strict)"]
    assert scores.higher_is_better["em", "strict"] is True
    assert scores.answers == [[["answer 0"]], [["answer 1"]]]
    assert scores.aggregate["ppl", "strict"] == 7.3


def test_the_harness_s_default_device_falls_back():
    import torch

    expected = "cuda:0" if torch.cuda.is_available() else "auto"
    assert usable("cuda:0") == expected
    assert usable("cpu") == "cpu"


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mergedarts\[eval\]'"):
        Tasks(["gsm8k"], Settings())


def test_a_task_that_is_not_there(tmp_path, monkeypatch):
    """The sentence names the user's own tasks; the harness's are left out of this index, which takes long to make."""
    import lm_eval.tasks

    real = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: real(**(given | {"include_defaults": False})))
    (tmp_path / "mine.yaml").write_text("task: mine\ndataset_path: json\n")
    with pytest.raises(UserError, match=r"no task 'absent'.*mine"):
        Tasks(["absent"], Settings((tmp_path,)))
    with pytest.raises(UserError, match=r"no task 'absent'.*--include-path adds your own"):
        Tasks(["absent"], Settings())
    with pytest.raises(UserError, match="nowhere"):
        Tasks(["absent"], Settings((tmp_path / "nowhere",)))


def test_a_task_that_runs_code_by_its_own_means_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("def passed(references, predictions):\n    return 1.0\n")
    (tmp_path / "data.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "own.yaml").write_text(
        f"task: own\nunsafe_code: true\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{q}}'\n"
        "generation_kwargs: {until: ['x']}\n"
        "metric_list: [{metric: !function own.passed, aggregation: mean, higher_is_better: true}]\n"
    )
    with pytest.raises(UserError, match="allow-code-execution"):
        Tasks(["own"], Settings((tmp_path,)))
    with pytest.raises(UserError, match="means of its own"):
        Tasks(["own"], Settings((tmp_path,), allow_code=True))


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_the_harness_s_own_code_tasks_judge_in_the_sandbox(name, tmp_path):
    """The harness's files with data on disk: what passes, what is wrong, and what leaves by exit(0)."""
    import json
    from pathlib import Path

    import lm_eval

    own = Path(lm_eval.__file__).parent / "tasks" / name / f"{name}.yaml"
    document = {
        "prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one",
        "text": "Write one.", "code": "", "test_list": ["assert one() == 1", "assert one() != 2", "assert one() > 0"],
    }  # fmt: skip
    (tmp_path / "data.jsonl").write_text(json.dumps(document) + "\n")
    (tmp_path / "local.yaml").write_text(
        f"include: {own}\ntask: local\ndataset_path: json\ndataset_name: null\nnum_fewshot: 0\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
    )
    settings = Settings((tmp_path,), allow_code=True)
    with pytest.raises(UserError, match="allow-code-execution"):
        Tasks(["local"], Settings((tmp_path,)))
    task = Tasks(["local"], settings).load("local")
    passed = []
    for body in ("    return 1", "    return 2", "    exit(0)"):
        program = document["prompt"] + body
        answer = [program] if name == "humaneval" else program
        (value,) = task.process_results(document, [answer]).values()
        passed.append(value)
    assert passed == [1.0, 0.0, 0.0]
