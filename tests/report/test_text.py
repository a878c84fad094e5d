"""What people read of texts and numbers."""

from __future__ import annotations

import pytest

from mergedarts.report.text import number, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 中文 🎉", "plain é 中文 🎉"),
        ("a\nb\tc", "a↵b⇥c"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("x\u202ey\u200bz\x7f\r\x00", "x\\u202ey\\u200bz\\x7f\\r\\x00"),
        ("<b>&'\"", "<b>&'\""),
        ("no\u00a0break", "no\\xa0break"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown
    assert visible(text).isprintable()


def test_spaces_of_tokens():
    assert visible(" of ", spaces=True) == "␣of␣"


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [(None, "", ""), (0.123456, "", "0.1235"), (12.3456, "", "12.3"), (1e-5, "", "1e-05"), (0.0, "", "0"),
     (0.666, "share", "67%"), (-0.1, "share", "-10%"), (123456.0, "", "1.23e+05")],
)  # fmt: skip
def test_numbers(value, kind, shown):
    assert number(value, kind) == shown
