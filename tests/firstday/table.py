"""The closing table of docs/pytorch.md, written from the outcomes of the tests in this folder.

Not imported by the tests that it runs. `python -m firstday.table`, in `tests`, runs them and
writes the page; `--dry` prints it instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pytest
from firstday.facilities import HERE, Facility, facilities
from firstday.subjects import ALL, FAMILIES, PLAIN, Subject

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
COLUMNS = (*FAMILIES, "with a mask")
ABSENT = "·"

HEAD = """# What works with which PyTorch facility

One row for each facility, one column for each kind of layer, and one for calls with a mask. The tables are
written by `python -m firstday.table` (in `tests`) from the outcomes of the tests in `tests/firstday`, which
compare outputs, gradients and statistics with the float64 definition, on values far from zero.

- yes: it works and is right.
- refuses: it raises a sentence that says what to do instead.
- {absent}: there is nothing to do for such a layer, it takes no such thing, or others of its kind are tested.
- A number in brackets points to a note below.

An exported program does not look at the values of a mask or of lengths; eager and compiled layers refuse what
cannot be right.

"""

LAYERS = """
## The layers

Each is tested as it stands here, and once more with a mask.

| layer | input | far from zero by (standard deviations) |
|---|---|---|
"""


class Outcomes:
    """A pytest plugin that keeps, by test and subject, whether everything passed."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = yield
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "subject" in parameters and (report.when == "call" or not report.passed):
            key = (item.function.__name__, parameters["subject"].name)  # type: ignore[attr-defined]
            self.found[key] = self.found.get(key, True) and report.passed
        return report


def column(subject: Subject) -> str:
    """Where a subject stands in the table."""
    return "with a mask" if subject.mask else subject.family


def cell(row: Facility, subjects: list[Subject], passed: Mapping[tuple[str, str], bool]) -> str:
    """What happened to the subjects of one column: one word if to all the same."""
    words: dict[str, list[str]] = defaultdict(list)
    for subject in subjects:
        word = row.expected(subject) if passed.get((row.test, subject.name), False) else "fails"
        words[word].append(subject.name.removesuffix(" masked"))
    if len(words) <= 1:
        return next(iter(words), ABSENT)
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in words.items())


def page(passed: Mapping[tuple[str, str], bool]) -> str:
    """The whole page: a table for each file of tests, under what the file says of itself."""
    parts, notes = [HEAD.format(absent=ABSENT)], list(dict.fromkeys(r.note for r in facilities() if r.note))
    for heading, rows in groupby(facilities(), key=lambda row: row.heading):
        lines = [f"| facility | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for row in rows:
            title = f"{row.title} [{notes.index(row.note) + 1}]" if row.note else row.title
            members = ([s for s in row.subjects if column(s) == name] for name in COLUMNS)
            lines.append(f"| {title} | " + " | ".join(cell(row, some, passed) for some in members) + " |")
        parts.append(f"## {heading}\n\n" + "\n".join(lines) + "\n\n")
    parts.append("## Notes\n\n" + "".join(f"{i}. {note}\n" for i, note in enumerate(notes, 1)))
    parts.append(LAYERS + "".join(f"| {s.name} | {s.shape} | {s.offset:g} |\n" for s in PLAIN))
    return "".join(parts)


def all_right() -> dict[tuple[str, str], bool]:
    """The outcomes where every test passes: what the page has to say."""
    return {(row.test, subject.name): True for row in facilities() for subject in ALL}


def main() -> int:
    """Run the tests; write the page, whatever they say."""
    outcomes = Outcomes()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=line", str(HERE)], plugins=[outcomes])
    text = page(outcomes.found)
    if "--dry" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
