"""Tables and the plot of made-up comparisons: every figure is where it belongs, in every format."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as Tree
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from mergedarts.errors import UserError
from mergedarts.evaluation import report
from mergedarts.evaluation.compare import Evaluation, Row
from mergedarts.evaluation.statistics import compare, holm, holm_p


@pytest.fixture(scope="module")
def evaluation():
    rng = np.random.default_rng(0)
    quality = rng.random(80)
    made = [
        ("gsm8k", "math", "exact_match", "strict-match", True, [quality < c for c in (0.3, 0.5, 0.6)]),
        ("humaneval", "code", "pass@1", "none", True, [quality < c for c in (0.2, 0.2, 0.2)]),
        ("nll|x", "code", "loss", "none", False, [3 + quality, 2.5 + quality, 2.2 + quality]),
    ]
    compared = holm([compare(*scores) for *_, scores in made])
    rows = [Row(t, d, m, f, h, c) for (t, d, m, f, h, _), c in zip(made, compared, strict=True)]
    seeds = compare(quality, [quality + 0.1, quality + 0.3], quality + 0.5)
    return Evaluation(
        [*rows, Row("seeds", "math", "f1", "none", True, seeds)],
        ["x: y is no mean"],
        [{"task": "gsm8k", "example": 0, "model": "merged", "answers": [["\x1b[2J"]], "scores": {}}],
        {"gsm8k": {"merged": {"exact_match,strict-match": 0.3}}},
        {"mergedarts": "0"},
    )


def shown(evaluation, width):
    console = Console(width=width, record=True)
    with console.capture() as capture:
        console.print(report.table(evaluation))
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_holds_every_row(evaluation, width):
    text = shown(evaluation, width)
    for word in ("gsm8k", "exact_match", "no gap", "2 seeds", "0.275 → 0.4875", "expert 0.5625", "[54%, 91%]"):
        assert word in text, text
    assert all(len(line) <= width for line in text.splitlines())


def test_markdown(evaluation):
    text = report.markdown(evaluation)
    head, line, *rows = [r for r in text.splitlines() if r.startswith("|")]
    assert head.count("|") == line.count("|") == len(report.COLUMNS) + 1
    assert len(rows) == 4
    row = evaluation.rows[0].comparison
    assert f"| gsm8k | exact_match (strict-match) | 80 | 1 | {row.merged:.4g} | {row.repaired:.4g} |" in rows[0]
    assert f"{row.share.value:.0%} [{row.share.low:.0%}, {row.share.high:.0%}]" in rows[0]
    assert "| no gap |" in rows[1]
    assert r"nll\|x" in rows[2]
    assert "Left out: x: y is no mean" in text
    assert "and seeds" in text


def test_csv_has_every_number_unrounded(evaluation):
    lines = list(csv.DictReader(report.as_csv(evaluation).splitlines()))
    for line, row in zip(lines, evaluation.rows, strict=True):
        c = row.comparison
        assert (line["task"], line["filter"]) == (row.task, row.filter)
        assert float(line["difference_low"]) == c.difference.low
        assert float(line["gap"]) == c.gap.value
        assert float(line["p"]) == c.test.p
        assert line["share_high"] == ("" if c.share is None else str(c.share.high))


def test_the_folder(evaluation, tmp_path):
    report.write(evaluation, tmp_path / "out")
    whole = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert whole["rows"][0]["comparison"]["share"]["value"] == evaluation.rows[0].comparison.share.value
    assert whole["rows"][1]["comparison"]["share"] is None
    assert whole["harness"]["gsm8k"]["merged"]["exact_match,strict-match"] == 0.3
    assert json.loads((tmp_path / "out" / "answers.jsonl").read_text())["answers"] == [["\x1b[2J"]]
    Tree.parse(tmp_path / "out" / "forest.svg")
    with pytest.raises(UserError, match="is not a result"):
        report.write(evaluation, tmp_path)


def test_the_plot_draws_each_estimate_at_its_value(evaluation):
    figure = report.forest(evaluation)
    axes = figure.axes
    assert [axis.get_title(loc="left") for axis in axes] == ["exact_match", "pass@1", "loss, lower is better", "f1"]
    for axis, row in zip(axes, evaluation.rows, strict=True):
        c = row.comparison
        points = [container.lines[0].get_xdata()[0] for container in axis.containers]
        assert points == [c.difference.value, c.gap.value]
        (bars,) = axis.containers[0].lines[2]
        assert bars.get_segments()[0][:, 0] == pytest.approx([c.difference.low, c.difference.high])
        assert axis.get_yticklabels()[0].get_text().startswith(row.task)


def test_a_further_row_corrects_all_of_them_anew(evaluation):
    longer = evaluation.plus(replace(evaluation.rows[0], task="again"))
    p = [row.comparison.test.p for row in longer.rows]
    assert [row.comparison.test.holm for row in longer.rows] == pytest.approx(holm_p(p))
    assert len(longer.rows) == 5


def test_an_endless_interval_is_null_in_json(evaluation):
    first = evaluation.rows[0]
    endless = replace(first.comparison.share, high=float("inf"))
    row = replace(first, comparison=replace(first.comparison, share=endless))
    whole = replace(evaluation, rows=[row]).as_json()
    assert json.loads(json.dumps(whole, allow_nan=False))["rows"][0]["comparison"]["share"]["high"] is None


def test_nothing_to_compare(tmp_path):
    empty = Evaluation([], ["t: m is no mean"], [], {}, {})
    report.write(empty, tmp_path / "out")
    assert not (tmp_path / "out" / "forest.png").exists()
    assert "t: m is no mean" in (tmp_path / "out" / "evaluation.md").read_text()
