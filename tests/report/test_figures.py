"""Figures: every one that has points, in three forms that say the same."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

from mergedarts.report.figures import pictures

KEYS = ["position", "since-prompt", "entropy", "position-entropy", "layer", "turn", "systematic"]


def test_every_figure(drawn):
    assert [p.key for p in drawn] == [f"code-{key}" for key in KEYS]
    for picture in drawn:
        assert picture.png.startswith(b"\x89PNG")
        assert picture.caption
        assert picture.table.rows
        ET.fromstring(picture.svg)
        ET.fromstring(picture.inline)


def test_inline_follows_the_page(drawn):
    """No colour of its own, no fonts or ids that could meet another figure's, no reference outside itself."""
    seen: set[str] = set()
    for picture in drawn:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", picture.inline), picture.key
        assert "DejaVu" not in picture.inline
        ids = set(re.findall(r'\bid="([^"]+)"', picture.inline))
        assert not ids & seen
        seen |= ids
        used = set(re.findall(r"url\(#([^)]+)\)", picture.inline))
        used |= set(re.findall(r'href="#([^"]+)"', picture.inline))
        assert used <= ids
        assert not re.search(r'(?:href|src)="(?!#)', picture.inline)


def test_plain_figures_have_a_ground_and_a_title(drawn):
    for picture in drawn:
        assert 'fill="white"' in picture.svg
        assert f"<title>code: {picture.title}</title>" in picture.svg
        assert "var(--" not in picture.svg


def test_what_was_not_measured_is_not_drawn(drift):
    domain = drift.domains["code"]
    models = {
        name: replace(m, axes={k: v for k, v in m.axes.items() if k not in ("layer", "turn")})
        for name, m in domain.models.items()
    }
    found = pictures("code", replace(domain, models=models, systematic=None))
    assert [p.key for p in found] == [f"code-{key}" for key in KEYS if key not in ("layer", "turn", "systematic")]


def test_drawn_again_it_is_the_same(drawn, written):
    for picture in drawn:
        assert (written / "figures" / f"{picture.key}.svg").read_text() == picture.svg
