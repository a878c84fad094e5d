"""The page in a real browser (headless Chromium): from disk, alone, light and dark, narrow, printed, sorted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """Chromium of the system, or the one playwright installed."""
    with sync_api.sync_playwright() as play:
        found = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
        if found is None and not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium here: install one, or run 'playwright install chromium'")
        opened = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url(written):
    return (written / "report.html").as_uri()


def visit(browser, url, **options):
    """The page, and what it said and asked for."""
    page = browser.new_context(**options).new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    return page, said, asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_from_disk_without_a_word(browser, url, scheme):
    page, said, asked = visit(browser, url, color_scheme=scheme)
    assert said == []
    assert [a for a in asked if not a.startswith("data:")] == [url]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    # The figures' text takes the page's ink.
    inks = page.evaluate("[...document.querySelectorAll('svg.figure text')].map(t => getComputedStyle(t).fill)")
    assert len(inks) > 30
    assert set(inks) == {{"light": "rgb(27, 31, 36)", "dark": "rgb(230, 232, 235)"}[scheme]}


def test_fits_a_phone(browser, url):
    page, _, _ = visit(browser, url, viewport={"width": 390, "height": 844})
    for details in page.locator("details").all():
        details.evaluate("d => d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("Math.max(...[...document.querySelectorAll('.box')].map(b => b.scrollWidth)) > 390")
    assert page.evaluate("Math.min(...[...document.querySelectorAll('svg.figure')].map(s => s.clientWidth))") > 300


def test_sorts_by_number_and_says_so(browser, url):
    page, _, _ = visit(browser, url)
    table = page.locator("section table.sortable").last
    heading = table.locator("th", has_text="entropy").first
    entropies = "t => [...t.tBodies[0].rows].map(r => Number(r.cells[3].dataset.value))"
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    values = table.evaluate(entropies)
    assert values == sorted(values)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").click()
    assert table.evaluate(entropies) == sorted(values, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    table.locator("th button", has_text="position").click()
    assert heading.get_attribute("aria-sort") == "none"


def test_prints(browser, url):
    page, _, _ = visit(browser, url, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("details").first.is_hidden()
    assert page.pdf(format="A4").startswith(b"%PDF")
