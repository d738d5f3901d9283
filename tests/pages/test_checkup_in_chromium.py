"""The checkup's page as a person opens it: from a file, in a browser, on a wide or a narrow screen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from unit import checkup_sample

from normalcy import pages

SAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": checkup_sample.sample,
    "nothing": checkup_sample.nothing,
    "many": lambda: checkup_sample.many(20),
    "sparse": checkup_sample.sparse,
    "hostile": checkup_sample.hostile,
}


@cache
def written(name: str, folder: Path) -> Path:
    file = folder / f"{name}.html"
    file.write_text(pages.render_checkup(SAMPLES[name]()), encoding="utf-8")
    return file


@contextmanager
def opened(browser: Browser, file: Path, **how: Any) -> Iterator[Page]:
    """Open a file and, when done with it, raise if the browser complained or asked for anything else."""
    context = browser.new_context(**how)
    tab = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(f"page: {error}"))
    tab.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    tab.on("request", lambda request: asked.append(request.url))
    try:
        tab.goto(file.as_uri())
        yield tab
    finally:
        context.close()
    assert not wrong
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_numbers_a_person_sees_are_those_of_the_embedded_json(
    name: str, browser: Browser, folder: Path
) -> None:
    with opened(browser, written(name, folder)) as tab:
        embedded = json.loads(tab.locator("#checkup").text_content() or "")
        cells = tab.locator("[data-json]").evaluate_all(
            "all => all.map(e => [e.dataset.json, e.textContent])"
        )
    assert embedded == SAMPLES[name]()
    assert len(cells) >= 2
    seen = {(address, text) for address, text in cells}
    expected = {(address, pages.number(pages.lookup(embedded, address))) for address, _ in seen}
    assert seen == {(address, text.encode("utf-8", "replace").decode()) for address, text in expected}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [400, 1100])
def test_nothing_is_wider_than_the_screen(name: str, width: int, browser: Browser, folder: Path) -> None:
    with opened(browser, written(name, folder), viewport={"width": width, "height": 800}) as tab:
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_name_adds_no_element_to_the_page(browser: Browser, folder: Path) -> None:
    with opened(browser, written("hostile", folder)) as tab:
        assert tab.locator("img").count() == 0
        assert tab.locator("script").count() == 1
        assert "onerror=alert(1)" in tab.locator("h1").inner_text()


@pytest.mark.parametrize("name", ["sample", "many", "sparse"])
def test_no_text_of_a_chart_is_cut_off(name: str, browser: Browser, folder: Path) -> None:
    with opened(browser, written(name, folder), viewport={"width": 1100, "height": 800}) as tab:
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        texts, cut = tab.evaluate(
            """() => {
              let texts = 0, cut = [];
              for (const chart of document.querySelectorAll('svg.chart')) {
                const frame = chart.getBoundingClientRect();
                for (const text of chart.querySelectorAll('text')) {
                  const box = text.getBoundingClientRect();
                  texts += 1;
                  if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
                      box.top < frame.top - 3 || box.bottom > frame.bottom + 3) cut.push(text.textContent);
                }
              }
              return [texts, cut];
            }"""
        )
    assert texts > 20
    assert cut == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_both_schemes(scheme: str, browser: Browser, folder: Path) -> None:
    with opened(browser, written("sample", folder), color_scheme=scheme) as tab:
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        inks = tab.evaluate(
            """() => {
              const texts = document.querySelectorAll('h1, p, td, dt, figcaption, .severity, .state');
              return [...texts].map(e => getComputedStyle(e).color);
            }"""
        )
        chart = tab.evaluate(
            """() => [...document.querySelectorAll('svg.chart text')].map(e => getComputedStyle(e).fill)"""
        )
    assert (luminance(ground) < 0.05) == (scheme == "dark")
    assert len(inks) > 50
    assert len(chart) > 20
    for ink in {*inks, *chart}:
        assert contrast(ink, ground) >= 4.5, ink  # what WCAG 2 asks of text at level AA


def test_the_layers_open_from_the_keyboard(browser: Browser, folder: Path) -> None:
    with opened(browser, written("many", folder)) as tab:
        closed = tab.locator("details.layer:not([open])").first
        where = closed.locator("summary code").inner_text()
        closed.locator("summary").focus()
        tab.keyboard.press("Enter")
        assert tab.locator("details.layer[open]", has_text=where).locator("svg.chart").first.is_visible()


def test_on_paper_the_ground_is_white_and_folded_parts_are_printed(browser: Browser, folder: Path) -> None:
    with opened(browser, written("many", folder), color_scheme="dark") as tab:
        closed = tab.locator("details.layer:not([open])").first.locator("table")
        seen = "part => part.checkVisibility({contentVisibilityProperty: true})"
        before = closed.evaluate(seen)
        tab.emulate_media(media="print")
        after = closed.evaluate(seen)
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert not before
    assert after


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
