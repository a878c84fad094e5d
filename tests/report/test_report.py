"""The report's folder and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mergedarts import report
from mergedarts.errors import UserError
from mergedarts.report import check_writable, page, write_report


class Page(HTMLParser):
    """Collects tags, their attributes and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._quiet = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._quiet = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._quiet = False

    def handle_data(self, data):
        self.text += "" if self._quiet else data


def test_files(drift, drawn, written):
    assert sorted(p.name for p in written.iterdir()) == ["drift.json", "figures", "report.html"]
    names = {p.name for p in (written / "figures").iterdir()}
    keys = {p.key for p in drawn}
    assert names == {f"{key}.{kind}" for key in keys for kind in ("png", "svg")}
    assert json.loads((written / "drift.json").read_text()) == json.loads(json.dumps(drift.to_json()))


def test_the_page_is_whole_in_itself(drift, drawn, written):
    html = (written / "report.html").read_text()
    found = Page(html)
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    ids = [a["id"] for _, a in found.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found.tags
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    for answer in drift.answers.values():
        assert answer.sentence in found.text
    figures = [t for t, _ in found.tags if t == "figure"]
    assert len(figures) == len([t for t, _ in found.tags if t == "details"]) == 7
    for picture in drawn:
        assert picture.caption in found.text
    assert all(a.get("aria-label") for t, a in found.tags if t == "svg")


def test_texts_cannot_act(drift):
    """Markup, escapes and hidden characters in names and tokens are shown, not obeyed."""
    evil = "</td><script>alert(1)</script>\x1b]0;x\x07\u202e"
    domain = drift.domains["code"]
    bad = []
    for item in domain.disagreements:
        top = {model: [replace(c, text=evil) for c in candidates] for model, candidates in item.top.items()}
        bad.append(replace(item, before=evil, token=evil, after=evil, top=top))
    changed = replace(drift, merged=evil, domains={"code": replace(domain, expert=evil, disagreements=bad)})
    html = page(changed, {"code": []})
    found = Page(html)
    assert sum(t == "script" for t, _ in found.tags) == 1
    assert "alert(1)" in found.text
    assert "\\x1b]0;x\\x07\\u202e" in found.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e]", html)


def test_a_report_replaces_a_report_and_nothing_else(drift, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "pictures", lambda name, domain: [])
    write_report(drift, tmp_path / "out")
    write_report(drift, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is not a result of mergedarts"):
        write_report(drift, tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["mine.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mergedarts\[report\]'"):
        check_writable(tmp_path / "out")
