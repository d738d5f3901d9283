"""docs/pytorch.md says what the tests of tests/firstday show: no facility more, none fewer, no other word."""

from __future__ import annotations

import re

from firstday.facilities import facilities
from firstday.subjects import ALL, PLAIN
from firstday.table import COLUMNS, PAGE, all_right, cell, column, page


def table() -> list[list[str]]:
    """The cells of the first table of the page, without the lines at its head."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines]


def test_the_page_is_what_the_tests_say_where_all_pass() -> None:
    """Run `python tests/firstday/table.py` after a change of facilities or layers."""
    assert PAGE.read_text(encoding="utf-8") == page(all_right())


def test_every_facility_has_its_row_in_order() -> None:
    named = [re.sub(r" \[\d+\]$", "", row[0]) for row in table() if row[0] != "facility"]
    titles = [row.title for row in facilities()]
    assert len(titles) > 40
    assert named == [*titles, "layer", *[s.name for s in PLAIN]]


def test_every_layer_and_mask_is_in_many_rows() -> None:
    """A layer that somebody forgot to test would be in few."""
    for subject in ALL:
        rows = [row for row in facilities() if subject.name in {s.name for s in row.subjects}]
        assert len(rows) > 20, subject.name
    assert {column(subject) for subject in ALL} == set(COLUMNS)


def test_a_failure_is_told() -> None:
    row = facilities()[0]
    some = [s for s in row.subjects if column(s) == "BatchNorm"]
    passed = all_right()
    assert cell(row, some, passed) == "yes"
    passed[row.test, some[1].name] = False
    assert cell(row, some, passed) == f"yes: {some[0].name}, {some[2].name}; fails: {some[1].name}"
    assert cell(row, [], passed) == "·"
