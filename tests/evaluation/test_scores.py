"""Scores of answers against hand-worked values and slow references."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("rouge_score")

from mergedarts.evaluation.scores import code_of, edit_similarity, exact_answer, final_number, rouge_l


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", 7), ("#### 1,234.50 dollars", 1234.5), ("first 3, then 12", 12), ("#### -4", -4),
        ("#### none", None), ("no number", None), ("#### 1\nagain #### 2", 2), ("costs $18.", 18),
    ],
)  # fmt: skip
def test_final_number(text, number):
    assert final_number(text) == number


def test_exact_answer():
    assert exact_answer("it is 18", "x\n#### 18") == 1
    assert exact_answer("#### 18.0", "#### 18") == 1
    assert exact_answer("it is 19", "#### 18") == 0
    assert exact_answer("dunno", "#### 18") == 0
    assert exact_answer("dunno", "dunno") == 0


def test_code_of():
    assert code_of("Sure:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
    assert code_of("```\ncut off") == "cut off"
    assert code_of("x = 1") == "x = 1"


def slow_distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(
        slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1, slow_distance(a[1:], b[1:]) + (a[0] != b[0])
    )  # fmt: skip


def test_edit_similarity():
    assert edit_similarity("```python\nreturn a + b\n```", "return a + b") == 1
    assert edit_similarity("return a - b", "return a + b") == pytest.approx(0.75)
    assert edit_similarity("", "a b") == 0
    assert edit_similarity("", "") == 1
    rng = random.Random(0)
    for _ in range(10):
        a, b = ([rng.choice("xyz") for _ in range(rng.randrange(1, 6))] for _ in range(2))
        expected = 1 - slow_distance(a, b) / max(len(a), len(b))
        assert edit_similarity(" ".join(a), " ".join(b)) == pytest.approx(expected)


def test_rouge_l():
    assert rouge_l("the cat sat", "the cat sat") == pytest.approx(1)
    # The longest common subsequence is "the sat" of 2 words: precision 2/3, recall 2/4.
    assert rouge_l("the dog sat", "the old cat sat") == pytest.approx(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5))
    assert rouge_l("", "words") == 0
