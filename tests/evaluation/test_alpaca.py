"""The formats of AlpacaEval, read and written, and how verdicts become scores."""

from __future__ import annotations

import json

import pytest

from mergedarts.errors import UserError
from mergedarts.evaluation.alpaca import (
    Instruction,
    judge_outputs,
    read_annotations,
    read_instructions,
    references,
    write_outputs,
)

ASKED = [Instruction("say a", "a"), Instruction("say b", "b"), Instruction("say c", "c")]


def test_instructions_of_alpaca_eval_and_of_the_project(tmp_path):
    own = tmp_path / "alpaca_eval.json"
    own.write_text(json.dumps([{"instruction": "x", "output": "y", "dataset": "d"}, {"instruction": "z"}]))
    assert read_instructions(own, None) == [Instruction("x", "y"), Instruction("z", None)]
    assert read_instructions(own, 1) == [Instruction("x", "y")]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "p", "response": "r"}\n{"prompt": "q"}\n')
    assert read_instructions(lines, None) == [Instruction("p", "r"), Instruction("q", None)]


@pytest.mark.parametrize("text", ["[]", '[{"prompt": "x"}]', "[3]", '{"a": 1}', "nonsense"])
def test_files_that_are_no_instructions(tmp_path, text):
    path = tmp_path / "i.json"
    path.write_text(text)
    with pytest.raises(UserError, match="i.json"):
        read_instructions(path, None)


def test_outputs_are_what_alpaca_eval_reads(tmp_path):
    written = {"repaired": ["1", "2", "3"], "merged": ["4", "5", "6"], "expert": ["7", "8", "9"]}
    places = write_outputs(tmp_path / "out.json", ASKED, written)
    assert {p.name for p in places.values()} == {"out.json", "out.merged.json", "out.expert.json"}
    rows = json.loads(places["merged"].read_text())
    assert rows[1] == {"instruction": "say b", "output": "5", "generator": "out, merged"}


def test_references_are_the_file_s_or_the_merged_model_s():
    written = {"merged": ["m1", "m2", "m3"]}
    assert references(ASKED, written) == ["a", "b", "c"]
    assert references([*ASKED[:2], Instruction("d", None)], written) == ["m1", "m2", "m3"]


def annotations(tmp_path, *values):
    rows = [
        {"instruction": asked.text, "output_1": asked.reference, "output_2": f"o{n}", "preference": value}
        for n, (asked, value) in enumerate(zip(ASKED, values, strict=True))
    ]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(rows[::-1]))
    return path


def test_verdicts_become_scores_in_the_order_of_the_instructions(tmp_path):
    path = annotations(tmp_path, 1, 2, 1.5)
    assert read_annotations(path, ASKED, ["o0", "o1", "o2"]) == [0.0, 1.0, 0.5]
    assert read_annotations(annotations(tmp_path, 1.25, 0, 2.0), ASKED, ["o0", "o1", "o2"]) == [0.25, 0.5, 1.0]


def test_verdicts_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match="no verdict.*say b"):
        read_annotations(annotations(tmp_path, 1, None, 2), ASKED, ["o0", "o1", "o2"])
    with pytest.raises(UserError, match="no verdict.*say c"):
        read_annotations(annotations(tmp_path, 1, 1, 2), ASKED, ["o0", "o1", "newer"])
    path = tmp_path / "annotations.json"
    for text in ('[{"instruction": "say a"}]', "[1]", "3"):
        path.write_text(text)
        with pytest.raises(UserError, match="annotations.json"):
            read_annotations(path, ASKED, ["o0", "o1", "o2"])


class Longest:
    """Likes the longer answer, and whatever stands first a little more."""

    name = "longest"

    def __init__(self):
        self.asked = 0

    def first_is_better(self, question):
        self.asked += 1
        first, second = (part.split("\n\n")[0] for part in question.split("Answer ")[1:3])
        return (0.9 if len(first) > len(second) else 0.1) + 0.05


def test_a_judge_sees_both_orders_and_is_asked_once(tmp_path):
    judge = Longest()
    written = {"repaired": ["longer", "", "c"], "merged": ["", "", ""], "expert": ["", "longest", ""]}
    places = write_outputs(tmp_path / "out.json", ASKED, written)
    found = judge_outputs(judge, places, ASKED, written)
    # The bias for the first place cancels: (0.95 + 1 - 0.15) / 2 and (0.15 + 1 - 0.95) / 2.
    assert read_annotations(found["repaired"], ASKED, written["repaired"]) == pytest.approx([0.9, 0.1, 0.5])
    first = judge.asked
    judge_outputs(judge, places, ASKED, written)
    assert judge.asked == first
    assert json.loads(found["expert"].read_text())[1]["output_1"] == "b"
