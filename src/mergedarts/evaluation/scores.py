"""Scores of a written answer against a reference, and how the testbed's tasks use them.

Knows texts alone. The `score_*` functions are what the task files in `testbed/tasks` name.
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_FENCE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", re.DOTALL)


def final_number(text: str) -> float | None:
    """The number after the last `####`, or the last number where there is no such mark; None without any."""
    _, mark, after = text.rpartition("####")
    found = _NUMBER.findall(after if mark else text)
    return float((found[0] if mark else found[-1]).replace(",", "")) if found else None


def exact_answer(answer: str, reference: str) -> float:
    """1 where both end in the same number (GSM8K's convention), else 0."""
    ours, theirs = final_number(answer), final_number(reference)
    return float(ours is not None and ours == theirs)


def code_of(text: str) -> str:
    """The first fenced block of an answer, or all of it where there is none."""
    found = _FENCE.search(text)
    return found[1] if found else text


def edit_similarity(answer: str, reference: str) -> float:
    """1 - Levenshtein distance over the longer length, on tokens (words and single signs) of the code in both."""
    from nltk.metrics.distance import edit_distance

    ours, theirs = _TOKEN.findall(code_of(answer)), _TOKEN.findall(code_of(reference))
    longer = max(len(ours), len(theirs))
    return 1.0 - edit_distance(ours, theirs) / longer if longer else 1.0


def rouge_l(answer: str, reference: str) -> float:
    """F-measure of the longest common subsequence of stemmed words (Lin 2004), by the package `rouge-score`."""
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"], use_stemmer=True).score(reference, answer)["rougeL"].fmeasure)


def score_math(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    return {"exact_answer": exact_answer(answers[0], doc["response"])}


def score_code(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    return {"edit_similarity": edit_similarity(answers[0], doc["response"])}


def score_instruct(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    return {"rouge_l": rouge_l(answers[0], doc["response"])}
