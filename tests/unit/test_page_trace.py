"""What a trace's page holds: the trace's own numbers, what was left out, and its texts escaped."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalcy import pages
from normalcy.pages import arrays
from normalcy.trace import Trace, trace, warm_up

RNG = np.random.default_rng(17)
CUBE = RNG.gamma(2.0, 1.5, (3, 4, 5)) - 50
DEEP = RNG.normal(-70, 2, (8, 8, 8, 8, 8, 7))
"""As many values as a trace takes, almost, and no axis too long for a table."""


def record(made: Trace, norm: str = "batch") -> dict[str, Any]:
    steps = [
        {"name": s.name, "formula": s.formula, "values": s.values, "why": list(s.why)} for s in made.steps
    ]
    read: dict[str, Any] = json.loads(json.dumps({"norm": norm, "steps": steps}))
    return read


@cache
def sample(name: str) -> dict[str, Any]:
    match name:
        case "feature":
            made = trace(
                [2.5, 4, 6, 1009], gamma=3, dy=[1, -2, 3, 1], running=(4, 6), momentum=0.1, explain=True
            )
            return record(made + warm_up([10, 12, 8], explain=True))
        case "one":
            return record(trace([5.5], explain=True, dy=[2.0], momentum=0.3, correction=0))
        case "constant":
            return record(trace([-7.5, -7.5, -7.5], explain=True, dy=[1, 2, 3]))
        case "undefined":
            return record(trace([7.5, 7.5], eps=0, running=(10, 16), explain=True))
        case "undefined array":
            return record(trace([[7.5, 1.0], [7.5, 1.0]], eps=0, running=(10, 16)))
        case "masked":
            made = trace(CUBE, norm="instance", mask=RNG.random(CUBE.shape) < 0.4, explain=True, dy=CUBE)
            return record(made, "instance")
        case "nothing counts":
            return record(trace(CUBE[:, :2, 0], mask=[[True, False]], explain=True))
        case "rms":
            return record(trace(CUBE, norm="rms", gamma=[1, -2, 0.5, 3, 1], dy=CUBE, explain=True), "rms")
        case "late":
            late = np.vstack([np.full((40, 5000), 7.5), RNG.normal(-70, 2, (6, 5000))])
            return record(trace(late, norm="layer"), "layer")
        case "rows":
            return record(trace(RNG.normal(-70, 2, (2, 100, 500)), norm="instance"), "instance")
        case "deep":
            return record(trace(DEEP, norm="layer", dy=DEEP), "layer")
        case "long":
            x = RNG.normal(-70, 2, 250_000)
            return record(trace(x, dy=x) + warm_up(x[:3000].tolist()))
    raise AssertionError(name)


SMALL = ["feature", "one", "constant", "undefined", "undefined array", "masked", "nothing counts", "rms"]
LARGE = ["late", "rows", "deep", "long"]


@cache
def rendered(name: str) -> str:
    return pages.render_trace(sample(name))


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    assert found
    read: dict[str, Any] = json.loads(found[1])
    return read


def numbers(page: str) -> list[tuple[str, str]]:
    found = re.findall(r'data-json="([^"]*)"[^>]*>([^<]*)<', page)
    return [(html.unescape(address), html.unescape(text)) for address, text in found]


def text(page: str) -> str:
    """What a person reads, in one line."""
    body = re.sub(r"<(style|script|svg).*?</\1>", "", page.partition("<body>")[2], flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", body)).split())


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_every_number_on_the_page_is_found_in_the_trace_and_in_what_is_embedded(name: str) -> None:
    page = rendered(name)
    inside, shown = embedded(page), numbers(page)
    assert len(shown) > 15
    assert (inside == sample(name)) == (name in SMALL)
    for address, written in shown:
        value = pages.lookup(sample(name), address)
        assert pages.lookup(inside, address) == value
        assert written == pages.number(value)


@pytest.mark.parametrize("name", LARGE)
def test_a_page_of_as_many_values_as_a_trace_takes_stays_small(name: str) -> None:
    assert len(json.dumps(sample(name))) > 3_000_000
    assert len(rendered(name).encode()) < 500_000


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_of_every_value_of_every_step_something_is_shown_and_what_is_left_out_is_said(name: str) -> None:
    page = rendered(name)
    shown = {address for address, _ in numbers(page)}
    for i, step in enumerate(sample(name)["steps"]):
        for key, value in step["values"].items():
            if key == "shares" and value is not None:  # the small numbers of the first table
                assert "<sub>" in page
                continue
            here = f"steps.{i}.values.{key}"
            assert any(address == here or address.startswith(f"{here}.") for address in shown), here
            flat = [at for at, item in arrays.cells(value) if not isinstance(item, dict)]
            wanted = {".".join(map(str, (here, *at))) for at in flat}
            missing = len(wanted - shown)
            masked = sum(item is None for _, item in arrays.cells(value)) if key == "x" else 0
            assert missing <= masked or re.search(r"and [\d,]+ more|Shown are [\d,]+ of", page), here


@pytest.mark.parametrize("name", ["feature", "masked", "rms"])
def test_every_gradient_and_result_of_a_small_array_is_written_out(name: str) -> None:
    shown = {address for address, _ in numbers(rendered(name))}
    for i, step in enumerate(sample(name)["steps"]):
        for key in {"xhat", "y", "g", "dx", "dgamma", "dbeta", "y_inference"} & step["values"].keys():
            for at, value in arrays.cells(step["values"][key]):
                if value is not None:
                    assert ".".join(map(str, ("steps", i, "values", key, *at))) in shown


def test_beside_each_picture_stand_the_four_moments_and_what_changed_them() -> None:
    found = re.findall(r"<figcaption>(.*?)</figcaption>", rendered("feature"), re.DOTALL)
    assert [re.findall(r"<dt>(.*?)</dt>", caption) for caption in found] == [
        ["mean", "variance", "skewness", "kurtosis"],
        ["variance = var/(var + eps)", "skewness", "kurtosis"],
        ["γ", "β"],
    ]


def test_rms_norm_is_told_by_its_mean_square_and_has_no_mean_and_no_beta() -> None:
    found = re.findall(r"<figcaption>(.*?)</figcaption>", rendered("rms"), re.DOTALL)
    assert [re.findall(r"<dt>(.*?)</dt>", caption) for caption in found[:2]] == [
        ["mean square", "skewness", "kurtosis"],
        ["mean square = var/(var + eps)", "skewness", "kurtosis"],
    ]
    assert "after γ: y" in text(rendered("rms"))
    assert "after γ and β" not in text(rendered("rms"))


def test_each_channel_of_batch_norm_is_drawn_with_its_own_gamma_and_beta() -> None:
    page = pages.render_trace(record(trace(CUBE, gamma=[3, -4, 0.5, 7], beta=[-1, 2, 6, 9])))
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    told = [re.findall(r"<dd>(.*?)</dd>", caption) for caption in captions[2::3]]
    assert [[re.sub("<.*?>", "", dd) for dd in row] for row in told] == [
        ["3", "−1"],
        ["−4", "2"],
        ["0.5", "6"],
        ["7", "9"],
    ]


def test_the_head_says_that_the_shape_stayed_and_how_far_the_variance_is_from_one() -> None:
    said = text(pages.render_trace(record(trace([-9.0, -7.0, -1.0], eps=1.0))))
    assert "Place and scale changed, the shape did not: skewness" in said
    assert "The variance went from 11.56 to 0.9204: var/(var + eps), less than 1 because of eps." in said
    without = text(pages.render_trace(record(trace([-9.0, -7.0, -1.0], eps=0))))
    assert "to 1: var/(var + eps)." in without
    assert "less than 1" not in without


def test_the_head_does_not_say_that_a_shape_stayed_which_did_not() -> None:
    bent = json.loads(json.dumps(sample("feature")))
    (values,) = (step["values"] for step in bent["steps"] if "skewness" in step["values"])
    assert "the shape did not:" in text(pages.render_trace(bent))
    values["skewness"] *= 1 + 1e-4
    assert "the shape did not but for the digits that rounding took:" in text(pages.render_trace(bent))
    # an offset that nothing subtracts stays in x̂, whose last digits it takes
    far = trace([[1e9, 1e9 + 1e-6, 1e9 + 3e-6, 1e9 + 7e-6]], norm="rms")
    assert "the shape did not but for the digits" in text(pages.render_trace(record(far, "rms")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", "1 value ·"),
        ("one", "The values had no spread, so they have no shape."),
        ("constant", "The values had no spread, so they have no shape."),
        ("undefined", "all of a statistic are equal and eps is 0"),
        ("undefined array", "all of a statistic are equal and eps is 0"),
        ("long", "250,000 values"),
        ("long", "and 249,976 more"),
        ("late", "(statistic 40)"),
        ("deep", "Drawn are 4 of 32,768 statistics."),
        ("deep", "32,752 more statistics are not shown."),
        ("rows", "Shown are 16 of 200 rows and 12 of 500 columns."),
        ("masked", "masked"),
        ("feature", "after each update"),
    ],
)
def test_what_is_special_about_the_values_is_said(name: str, said: str) -> None:
    page = re.sub(r"</span>\s*<span>", " · ", rendered(name))
    assert said in text(page)


def test_no_text_of_a_trace_becomes_markup() -> None:
    evil = '<img src=x onerror="alert(1)"></script><b>&amp;'
    hostile: dict[str, Any] = {
        "norm": evil,
        "steps": [
            {
                "name": evil,
                "formula": evil,
                "values": {"x": [1.5, 2.5], evil: [3.5], "note": evil},
                "why": [evil],
            },
            {"name": "n", "formula": "f", "values": {"xhat": [[evil]], "deep": [{evil: 1.0}]}, "why": []},
        ],
    }
    hostile["steps"][1]["values"]["xhat"] = None
    page = pages.render_trace(hostile)
    assert page.count("onerror=") >= 5
    assert "<img" not in page
    assert "<b>&amp;" not in page
    assert page.count("<script") == page.count("</script") == 1
    assert embedded(page) == hostile
    assert all(pages.number(pages.lookup(hostile, address)) == shown for address, shown in numbers(page))


@pytest.mark.parametrize("name", SMALL)
def test_whatever_of_a_trace_may_be_null_may_be_null_but_the_values(name: str) -> None:
    def nulled(value: Any) -> Any:
        return [nulled(item) for item in value] if isinstance(value, list) else None

    whole = sample(name)
    keys = {key for step in whole["steps"] for key in step["values"]} - {"x", "shares", "after", "update"}
    assert len(keys) > 10
    for all_at_once in (nulled, lambda _: None):
        empty = json.loads(json.dumps(whole))
        for step in empty["steps"]:
            step["values"] |= {key: all_at_once(step["values"][key]) for key in keys & step["values"].keys()}
        assert "Step by step" in pages.render_trace(empty)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_the_page_asks_for_nothing_from_outside(name: str) -> None:
    page = rendered(name)
    assert not re.search(r"(src|href|action|data)=[\"'](?!data:,|#)", page)
    assert not re.search(r"url\(|@import|https?:", page)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_the_rows_of_a_table_are_the_first_ones_of_the_array(shape: list[int]) -> None:
    every = list(np.ndindex(*shape[:-1]))
    assert arrays.first_rows(shape) == every[: arrays.ROWS]
    assert bool(arrays.left_out(shape)) == (len(every) > arrays.ROWS)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_what_is_kept_of_an_array_is_found_at_its_old_address(shape: list[int], data: st.DataObject) -> None:
    values = {"a.b": (np.arange(np.prod(shape)) - 50.5).reshape(shape).tolist(), "n": 7}
    places = [at for at, _ in arrays.cells(values["a.b"])]
    kept = data.draw(st.lists(st.sampled_from(places), unique=True))
    addresses = [".".join(("a~1b", *map(str, at))) for at in kept]
    left = json.loads(json.dumps(arrays.only(values, addresses)))
    assert left["n"] == 7
    assert all(pages.lookup(left, address) == pages.lookup(values, address) for address in addresses)
    assert len(re.findall(r"\.5", json.dumps(left))) == len(kept)
