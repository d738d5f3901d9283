"""What a checkup's page holds: the JSON's numbers, its texts escaped, and no crash where it has gaps."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit import checkup_sample

from normalcy import pages
from normalcy.errors import ArgumentError, MissingExtraError
from normalcy.pages import charts, svg
from normalcy.pages.numbers import path

SAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": checkup_sample.sample,
    "nothing": checkup_sample.nothing,
    "many": lambda: checkup_sample.many(20),
    "sparse": checkup_sample.sparse,
    "hostile": checkup_sample.hostile,
}


@cache
def rendered(name: str) -> str:
    return pages.render_checkup(SAMPLES[name]())


class Reader(HTMLParser):
    """Collects what a test asks of a page: shown numbers, tags, heading levels, charts, the embedded JSON."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shown: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.json = ""
        self._inside: tuple[str, str] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if "data-json" in given:
            self._inside = (tag, given["data-json"] or "")
            self.shown.append((self._inside[1], ""))
        elif given.get("id") == "checkup":
            self._inside = (tag, "#")

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[1] == "#":
            self.json += data
            return
        self.text.append(data)
        if self._inside:
            self.shown[-1] = (self.shown[-1][0], self.shown[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[0] == tag:
            self._inside = None

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def assert_numbers_are_the_checkups(page: str, checkup: dict[str, Any]) -> set[str]:
    """Raise unless every shown number is its address's, formatted; give the addresses that are shown."""
    shown = Reader(page).shown
    for address, text in shown:
        expected = pages.number(pages.lookup(checkup, address)).encode("utf-8", "replace").decode()
        if text != expected:
            message = f"{address} is {expected!r} in the checkup and {text!r} on the page"
            raise AssertionError(message)
    return {address for address, _ in shown}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_number_on_the_page_is_the_one_in_the_json(name: str) -> None:
    addresses = assert_numbers_are_the_checkups(rendered(name), SAMPLES[name]())
    assert {"model.parameters", "model.norms"} <= addresses


def test_the_page_shows_all_that_a_person_asks_for() -> None:
    checkup = checkup_sample.sample()
    addresses = assert_numbers_are_the_checkups(rendered("sample"), checkup)
    for when in ("before", "after"):
        assert {f"{when}.loss.eval", f"{when}.loss.batch", f"{when}.findings.length"} <= addresses
        assert {f"{when}.sites.{i}.gap.rms" for i in range(2)} <= addresses
    for i, finding in enumerate(checkup["before"]["findings"]):
        assert {path("before", "findings", i, "evidence", name) for name in finding["evidence"]} <= addresses
    for i in range(2):
        for measure in ("skewness", "kurtosis"):
            for source in ("before", "stored", "batch"):
                assert f"before.sites.{i}.sample.{measure}.{source}" in addresses
    assert {"fold.error", "fold.bound", "fold.ratio", "fold.model_error", "fold.model_bound"} <= addresses
    assert {"baselines.uniform", "baselines.bigram"} <= addresses


def test_the_comparison_of_numbers_can_fail() -> None:
    checkup = checkup_sample.sample()
    page = rendered("sample")
    checkup["fold"]["error"] *= 1.01
    with pytest.raises(AssertionError, match=r"fold\.error"):
        assert_numbers_are_the_checkups(page, checkup)


@pytest.mark.parametrize("name", ["sample", "nothing", "sparse", "hostile"])
def test_the_embedded_json_is_the_whole_checkup(name: str) -> None:
    assert json.loads(Reader(rendered(name)).json) == SAMPLES[name]()


def test_three_hundred_layers_are_a_table_and_twelve_charts() -> None:
    checkup = checkup_sample.many(300)
    page = pages.render_checkup(checkup)
    reader = Reader(page)
    assert sum(1 for tag, _ in reader.tags if tag == "tr") > 300
    drawn = [
        attributes for tag, attributes in reader.tags if tag == "svg" and attributes.get("class") == "chart"
    ]
    assert len(drawn) == 3 + 2 * 12  # losses, gaps, warm-up, and two for each of the worst layers
    assert len(page) < 1_200_000
    # beyond a million characters the lists that are only drawn are not embedded; all else is
    assert len(json.dumps(checkup)) > 1_000_000
    for site in checkup["before"]["sites"]:
        site["sample"] |= {"before": [], "stored": [], "batch": []}
        site["warmup"] = []
    assert json.loads(reader.json) == checkup
    assert "without the values behind the histograms" in reader.words


@pytest.mark.parametrize("name", SAMPLES)
def test_no_text_of_the_checkup_becomes_markup(name: str) -> None:
    reader = Reader(rendered(name))
    kinds = [tag for tag, _ in reader.tags]
    assert "img" not in kinds
    assert [attributes for tag, attributes in reader.tags if tag == "script"] == [
        {"type": "application/json", "id": "checkup"}
    ]
    assert not [key for _, attributes in reader.tags for key in attributes if key.startswith("on")]
    if name == "hostile":
        assert "</script><img src=x onerror=alert(1)>" in reader.words


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_asks_for_nothing_from_outside(name: str) -> None:
    page = rendered(name)
    for tag, attributes in Reader(page).tags:
        for key in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(key) or "data:").startswith("data:"), (tag, key, attributes[key])
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("name", SAMPLES)
def test_headings_descend_one_level_at_a_time(name: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(rendered(name)).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(lower - upper <= 1 for upper, lower in itertools.pairwise(levels))


def test_every_chart_says_in_words_what_it_shows() -> None:
    checkup = checkup_sample.sample()
    reader = Reader(rendered("sample"))
    told = [
        given["aria-label"] or ""
        for tag, given in reader.tags
        if tag == "svg" and given.get("class") == "chart"
    ]
    assert len(told) == 7
    losses = next(words for words in told if words.startswith("Losses"))
    assert f"A bigram table {pages.number(checkup['baselines']['bigram'])}" in losses
    assert any(
        "net.2, before: " + pages.number(checkup["before"]["sites"][0]["gap"]["rms"]) in words
        for words in told
    )


def test_every_colour_of_a_chart_follows_the_style_sheet() -> None:
    page = rendered("sample")
    style, body = page[: page.index("</style>")], page[page.index("</style>") :]
    used = {(kind, value) for kind, value in re.findall(r'(fill|stroke)="([^"]+)"', body) if value != "none"}
    assert {value for _, value in used} <= set(svg.COLOURS)
    assert len(used) > 8
    for kind, value in used:
        assert f'.chart [{kind}="{value}"]' in style


NULLABLE = [
    "baselines", "before.loss", "after.loss", "fold", "fold.error", "fold.bound", "fold.ratio",
    "fold.model_error", "fold.model_bound", "repair", "after", "before.sites.0.momentum",
    "before.sites.0.updates", "before.sites.0.weight_left", "before.sites.0.gap",
    "before.sites.0.sample", "before.sites.0.warmup", "after.sites.0.gap",
    "after.sites.0.sample", "after.sites.1.warmup",
]  # fmt: skip


@pytest.mark.parametrize("address", NULLABLE)
def test_whatever_may_be_null_may_be_null(address: str) -> None:
    checkup = checkup_sample.sample()
    *upper, last = address.split(".")
    owner: Any = pages.lookup(checkup, ".".join(upper)) if upper else checkup
    assert owner[last] is not None
    owner[last] = None
    page = pages.render_checkup(checkup)
    assert_numbers_are_the_checkups(page, checkup)
    assert "None" not in Reader(page).words


@pytest.mark.parametrize("spelled", ["nan", "inf", "-inf"])
def test_any_number_may_be_not_finite(spelled: str) -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return spelled if isinstance(value, float) else value

    checkup = spoil(checkup_sample.sample())
    page = pages.render_checkup(checkup)
    assert_numbers_are_the_checkups(page, checkup)
    assert pages.number(spelled) in Reader(page).words


def test_a_number_that_was_not_spelled_out_is_embedded_as_json_all_the_same() -> None:
    checkup = checkup_sample.sample()
    checkup["before"]["loss"]["eval"] = math.inf
    assert json.loads(Reader(pages.render_checkup(checkup)).json)["before"]["loss"]["eval"] == "inf"


def test_a_channel_sampled_anew_after_the_repair_is_named() -> None:
    checkup = checkup_sample.sample()
    assert checkup["before"]["sites"][0]["sample"]["channel"] != 5
    checkup["after"]["sites"][0]["sample"]["channel"] = 5
    assert "after the repair (channel 5)" in pages.render_checkup(checkup)


def verdict(checkup: dict[str, Any]) -> str:
    words = Reader(pages.render_checkup(checkup)).words
    return words[words.index("Verdict") + 8 :].split(" Findings")[0].split(" Loss")[0]


def test_the_verdict_tells_the_whole_story_in_a_few_sentences() -> None:
    assert verdict(checkup_sample.sample()) == (
        "✓ 5 findings before the repair, 1 after it, the gravest a note. The evaluation loss fell from 2.613 "
        "to 2.298: worse than a bigram table (2.455) before, better than it after. "
        "What was folded for inference was proved equal."
    )


def test_the_verdict_of_a_model_without_norms_is_that_there_is_nothing_to_examine() -> None:
    assert verdict(checkup_sample.nothing()) == (
        "– There is nothing to examine: the model has no normalization layer."
    )


def test_the_verdict_never_calls_a_model_sound_that_was_not_seen() -> None:
    checkup = checkup_sample.nothing()
    checkup["before"]["unrecognized"] = [{"where": "scale", "why": "unknown"}]
    assert verdict(checkup).startswith("! No normalization layer was examined")


def test_the_verdict_of_a_sound_model_is_that_nothing_was_found() -> None:
    checkup = checkup_sample.nothing()
    checkup["before"]["sites"] = [checkup_sample.site("norm", 7, repaired=True)]
    assert verdict(checkup).startswith("✓ Nothing wrong was found")


def test_the_verdict_without_a_repair_names_the_gravest_finding() -> None:
    assert verdict(checkup_sample.many(3)).startswith(
        "✕ 3 findings, the gravest an error; nothing was repaired."
    )


def test_what_could_not_be_done_is_said() -> None:
    checkup = checkup_sample.nothing()
    assert checkup["notes"][0] in pages.render_checkup(checkup)


def test_the_verdict_says_when_the_folded_model_is_not_equal() -> None:
    checkup = checkup_sample.sample()
    checkup["proved"] = checkup["fold"]["proved"] = False
    assert verdict(checkup).startswith("✕")
    assert "could not be proved equal" in verdict(checkup)


def test_the_verdict_says_when_the_loss_rose() -> None:
    checkup = checkup_sample.sample()
    checkup["after"]["loss"]["eval"] = 2.9
    assert "rose from 2.613 to 2.9: worse than a bigram table (2.455) before, worse than it after" in verdict(
        checkup
    )


def test_findings_are_marked_cured_or_remaining_by_code_and_place() -> None:
    words = Reader(rendered("sample")).words
    assert words.count(" cured ") == 4
    assert words.count(" remains ") == 1


def test_what_only_the_second_examination_found_is_shown_with_its_own_numbers() -> None:
    checkup = checkup_sample.sample()
    late = checkup_sample.unwarmed(checkup_sample.site("net.9", 11, updates=17))
    checkup["after"]["findings"].append(late)
    page = pages.render_checkup(checkup)
    assert "Found only after the repair" in page
    assert "after.findings.1.evidence.updates" in assert_numbers_are_the_checkups(page, checkup)


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for call in (pages.require, lambda: pages.render_checkup(checkup_sample.sample())):
        with pytest.raises(
            MissingExtraError, match=r"Pip install 'normalcy\[report\]'|pip install 'normalcy\[report\]'"
        ) as told:
            call()
        assert missing in str(told.value)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "–"), (0, "0"), (-0.0, "0"), (300.0, "300"), (-12345, "−12,345"), (99999.0, "99,999"),
        (12345.6, "12,350"), (2.61049, "2.61"), (0.001, "0.001"), (0.00099999, "0.001"), (1e-5, "1×10⁻⁵"),
        (123456.0, "1.235×10⁵"), (-1.25e-7, "−1.25×10⁻⁷"), (9.9999e-8, "1×10⁻⁷"), (99999.9, "1×10⁵"),
        ("nan", "NaN"), ("-inf", "−∞"), (math.inf, "∞"), (True, "yes"), ("net.2", "net.2"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_reading(value: object, written: str) -> None:
    assert pages.number(value) == written


@given(st.floats(-1.79e308, 1.79e308))  # the last bit of the range may round beyond it
def test_a_written_number_says_the_value_to_four_digits(value: float) -> None:
    written = pages.number(value).replace("−", "-").replace(",", "")
    mantissa, _, raised = written.partition("×10")
    exponent = raised.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or "0"
    read = float(f"{mantissa}e{exponent}")
    # half a unit of the fourth digit is at most 5e-4 of the value; a subnormal adds its own spacing
    assert abs(read - value) <= 5.0001e-4 * abs(value) + 5e-324


@given(st.lists(st.text(), min_size=1, max_size=4), st.integers() | st.text())
def test_an_address_leads_back_to_its_value_whatever_the_keys(keys: list[str], value: object) -> None:
    nested: Any = value
    for key in reversed(keys):
        nested = {"other": [1.5, 2.5], key: nested}
    assert pages.lookup(nested, path(*keys)) == value


@pytest.mark.parametrize("address", ["nowhere", "before.findings.99", "before.findings.-1", "target.length"])
def test_an_address_that_leads_nowhere_is_refused(address: str) -> None:
    with pytest.raises(ArgumentError, match="nothing lies at"):
        pages.lookup(checkup_sample.sample(), address)


def test_a_histogram_counts_every_finite_value_once() -> None:
    values = [1e4 + 0.37 * k * (-1) ** k for k in range(500)]
    counts = charts._count(values, 1e4 - 100, 1e4 + 100)
    assert sum(counts) == 500
    assert counts[0] > counts[5]  # what lies beyond the axis is counted in the first bar and the last
    assert counts[-1] > counts[-6]
