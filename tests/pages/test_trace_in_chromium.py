"""The page of a trace as a person opens it: from a file, in a browser, on a wide or a narrow screen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from normalcy import pages
from normalcy.errors import ArgumentError
from normalcy.trace import Trace, trace, warm_up

RNG = np.random.default_rng(4)
MANY = RNG.gamma(1.5, 2.0, (300, 3)) + 100 * np.arange(3)
CUBE = RNG.gamma(2.0, 1.5, (2, 4, 3)) - 50
OPTIONS: dict[str, Any] = {"dy": CUBE, "explain": True}
TRACES: dict[str, Callable[[], Trace]] = {
    "feature": lambda: (
        trace([2.5, 4, 6, 1009], gamma=3, dy=[1, -2, 3, 1], running=(4, 6), momentum=0.1, explain=True)
        + warm_up([10, 12, 8], explain=True)
    ),
    "batch": lambda: trace(CUBE, gamma=[1, -2, 0.5, 3], mask=RNG.random(CUBE.shape) < 0.8, **OPTIONS),
    "group": lambda: trace(CUBE, norm="group", groups=2, **OPTIONS),
    "instance": lambda: trace(CUBE, norm="instance", **OPTIONS),
    "layer": lambda: trace(CUBE, norm="layer", axes=(1, 2), gamma=[1, 2, 3, -4], **OPTIONS),
    "rms": lambda: trace(CUBE, norm="rms", axes=1, **OPTIONS),
    "many": lambda: trace(MANY, explain=True),
    "large": lambda: trace(np.tile(CUBE, (150, 2, 6)), dy=np.tile(CUBE, (150, 2, 6)), norm="instance"),
    "constant": lambda: trace([7.5, 7.5, 7.5], explain=True),
    "ties": lambda: trace([7.5] * 20 + [9.25], explain=True),
    "late": lambda: trace(
        np.vstack([np.full((40, 900), 7.5), np.tile(CUBE.ravel(), (6, 38))[:, :900]]), norm="layer"
    ),
    "deep": lambda: trace(
        np.resize(CUBE, (4, 4, 4, 4, 4, 8)), norm="layer", dy=np.resize(CUBE, (4, 4, 4, 4, 4, 8))
    ),
    "undefined": lambda: trace([7.5, 7.5], eps=0, running=(10, 16), explain=True),
}

SHORTENED = {"large", "late", "deep"}
KNOWN = {"batch", "group", "instance", "layer", "rms"}


@cache
def record(name: str) -> dict[str, Any]:
    steps = [
        {"name": s.name, "formula": s.formula, "values": s.values, "why": list(s.why)}
        for s in TRACES[name]().steps
    ]
    return json.loads(json.dumps({"norm": name if name in KNOWN else "batch", "steps": steps}))


@cache
def written(name: str, folder: Path) -> Path:
    file = folder / f"trace-{name}.html"
    file.write_text(pages.render_trace(record(name)), encoding="utf-8")
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
    tab.on("request", lambda request: asked.append(request.url))
    try:
        tab.goto(file.as_uri())
        yield tab
    finally:
        context.close()
    assert not wrong
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


@pytest.mark.parametrize("name", TRACES)
def test_the_numbers_a_person_sees_are_those_of_the_embedded_json(
    name: str, browser: Browser, folder: Path
) -> None:
    with opened(browser, written(name, folder)) as tab:
        embedded = json.loads(tab.locator("#trace").text_content() or "")
        cells = tab.locator("[data-json]").evaluate_all(
            "all => all.map(e => [e.dataset.json, e.textContent])"
        )
        footer = tab.locator("footer").inner_text()
    assert (embedded == record(name)) == (name not in SHORTENED) == ("The whole trace" in footer)
    assert len(cells) > 10
    for address, text in cells:
        value = pages.lookup(embedded, address)
        assert value == pages.lookup(record(name), address)
        assert text == pages.number(value)


def test_cells_of_one_statistic_have_one_number_and_those_masked_have_none(
    browser: Browser, folder: Path
) -> None:
    (values,) = (step["values"] for step in record("batch")["steps"] if "shares" in step["values"])
    shares = np.array(values["shares"])
    assert {None, 0, 1, 2, 3} == set(shares.ravel().tolist())
    with opened(browser, written("batch", folder)) as tab:
        rows = tab.locator("table.values tr").evaluate_all(
            "rows => rows.map(r => [...r.querySelectorAll('td')].map(d => "
            "d.className === 'masked' ? null : Number(d.querySelector('sub').textContent)))"
        )
        colours = tab.locator("table.values td:not(.masked)").evaluate_all(
            "all => all.map(d => [d.querySelector('sub').textContent, getComputedStyle(d).backgroundColor])"
        )
    assert rows == shares.reshape(-1, shares.shape[-1]).tolist()
    assert len({share for share, _ in colours}) == 4
    assert len({(share, colour) for share, colour in colours}) == len({colour for _, colour in colours}) == 4


@pytest.mark.parametrize("name", ["feature", "batch", "many", "constant", "ties"])
def test_every_statistic_is_drawn_before_and_after_with_its_shape(
    name: str, browser: Browser, folder: Path
) -> None:
    values = {key: value for step in record(name)["steps"] for key, value in step["values"].items()}
    kurtosis = values["kurtosis"] if isinstance(values["kurtosis"], list) else [values["kurtosis"]]
    with opened(browser, written(name, folder)) as tab:
        figures = tab.locator(".drawing").evaluate_all(
            "all => all.map(e => [...e.querySelectorAll('figure')]"
            ".map(f => f.innerText.split(/\\s+/).join(' ')))"
        )
        dots = tab.locator(".drawing svg.chart title").count()
    assert len(figures) == len(kurtosis)
    for (before, after, scaled), right in zip(figures, kurtosis, strict=True):
        for text in (before, after):
            assert (f"kurtosis {pages.number(right)}" in text) == (right is not None)
        assert "after γ and β" in scaled
    counted = sum(v is not None for v in np.ravel(np.array(values.get("shares", values["x"]), dtype=object)))
    assert dots == (0 if name in {"many", "ties"} else 3 * counted)  # what would stack too high is counted


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("width", [400, 1100])
def test_nothing_is_wider_than_the_screen(name: str, width: int, browser: Browser, folder: Path) -> None:
    with opened(browser, written(name, folder), viewport={"width": width, "height": 800}) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_it_is_whole_without_scripts_and_says_every_reason(browser: Browser, folder: Path) -> None:
    with opened(browser, written("feature", folder), java_script_enabled=False) as tab:
        text = " ".join((tab.locator("main").text_content() or "").split())
    reasons = [sentence for step in record("feature")["steps"] for sentence in step["why"]]
    assert len(reasons) > 12
    assert all(" ".join(sentence.split()) in text for sentence in reasons)


@pytest.mark.parametrize("name", ["batch", "many"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_both_schemes(
    name: str, scheme: str, browser: Browser, folder: Path
) -> None:
    with opened(browser, written(name, folder), color_scheme=scheme) as tab:
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        inks = tab.evaluate(
            "() => [...document.querySelectorAll('h1, p, li, dt, dd, figcaption, code')]"
            ".map(e => getComputedStyle(e).color)"
        )
        cells = tab.evaluate(
            """() => [...document.querySelectorAll('.values td:not(.masked)')].flatMap(td => {
              const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
              const solid = colour => {
                canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                return 'rgb(' + [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).join(', ') + ')';
              };
              const ground = solid(getComputedStyle(td).backgroundColor);
              return [td, td.querySelector('sub')].map(e => [solid(getComputedStyle(e).color), ground]);
            })"""
        )
    assert (luminance(ground) < 0.05) == (scheme == "dark")
    assert len(inks) > 40
    assert len(cells) > 20
    for ink, paper in {*((ink, ground) for ink in inks), *map(tuple, cells)}:
        assert contrast(ink, paper) >= 4.5, (ink, paper)  # what WCAG 2 asks of text at level AA


def test_no_text_of_a_chart_is_cut_off(browser: Browser, folder: Path) -> None:
    for name in ("feature", "many", "layer"):
        with opened(browser, written(name, folder), viewport={"width": 1100, "height": 800}) as tab:
            cut = tab.evaluate(
                """() => [...document.querySelectorAll('svg.chart')].flatMap(chart => {
                  const frame = chart.getBoundingClientRect();
                  return [...chart.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1 ||
                      box.top < frame.top - 3 || box.bottom > frame.bottom + 3;
                  }).map(text => text.textContent);
                })"""
            )
        assert cut == []


@pytest.mark.parametrize("name", ["feature", "batch", "layer", "many"])
def test_no_number_is_broken_across_two_lines_on_a_narrow_screen(
    name: str, browser: Browser, folder: Path
) -> None:
    with opened(browser, written(name, folder), viewport={"width": 400, "height": 800}) as tab:
        lines = tab.locator("dd [data-json], td").evaluate_all(
            "all => all.map(e => { const r = document.createRange(); r.selectNodeContents(e);"
            " const bottoms = [...r.getClientRects()].map(b => b.bottom);"
            " return [e.textContent, Math.max(...bottoms) - Math.min(...bottoms)]; })"
        )
    assert len(lines) > 20
    # a line is 22 pixels high or more, and a subscript hangs by less
    assert [text for text, apart in lines if (apart or 0) > 12] == []


def test_pictures_of_one_statistic_stand_beneath_one_another_on_axes_of_one_width(
    browser: Browser, folder: Path
) -> None:
    with opened(browser, written("layer", folder), viewport={"width": 1100, "height": 800}) as tab:
        boxes = tab.locator(".drawing").evaluate_all(
            "all => all.map(e => [...e.querySelectorAll('svg.chart')].map(c => {"
            " const b = c.getBoundingClientRect(); return [b.left, b.width, b.top, b.bottom]; }))"
        )
    assert len(boxes) == 2
    for before, after, scaled in boxes:
        assert before[:2] == after[:2] == scaled[:2]
        assert before[3] <= after[2] < after[3] <= scaled[2]


def test_on_paper_the_ground_is_white_and_folded_tables_are_printed(browser: Browser, folder: Path) -> None:
    with opened(browser, written("many", folder), color_scheme="dark") as tab:
        folded = tab.locator("details.more:not([open]) table").first
        seen = "part => part.checkVisibility({contentVisibilityProperty: true})"
        before = folded.evaluate(seen)
        tab.emulate_media(media="print")
        after = folded.evaluate(seen)
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground, before, after) == ("rgb(255, 255, 255)", False, True)


def test_a_trace_without_values_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no values to draw"):
        pages.render_trace({"norm": "batch", "steps": []})


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
