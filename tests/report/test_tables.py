"""Tables hold the numbers of the diagnosis."""

from __future__ import annotations

import pytest

from mergedarts.report.tables import points_table, summary, systematic_table


def test_summary(drift):
    table = summary(drift)
    domain = drift.domains["code"]
    assert [row[1].text for row in table.rows] == ["merged", "repaired"]
    kl = table.headings.index("KL, nats")
    for row, model in zip(table.rows, ("merged", "repaired"), strict=True):
        found = domain.models[model].overall.measures["kl"]
        assert row[kl].value == found.value
        assert row[kl].text == f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"
        assert row[table.headings.index("sequences")].value == domain.sequences
    assert table.rows[1][table.headings.index("KL closed")].value == domain.closed["kl"].value
    assert all(len(row) == len(table.headings) for row in table.rows)


@pytest.mark.parametrize(
    "axis", ["position", "since_prompt", "entropy", "turn", "layer", "position_entropy", "systematic"]
)
def test_points(drift, axis):
    domain = drift.domains["code"]
    table = points_table(domain, axis)
    assert all(len(row) == len(table.headings) for row in table.rows)
    if axis == "systematic":
        want = len(domain.systematic.by_position)
    else:
        want = sum(len(m.axes[axis]) for m in domain.models.values())
        want += len(domain.models["merged"].axes["prompt_position"]) if axis == "position" else 0
    assert len(table.rows) == want
    tokens = table.headings.index("tokens")
    assert all(row[tokens].value > 0 for row in table.rows)


def test_systematic(drift):
    (row,) = systematic_table(drift).rows
    found = drift.domains["code"].systematic
    assert [c.value for c in row[1:4]] == [found.constant.value, found.linear.value, found.both.value]
