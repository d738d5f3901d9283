"""Which PyTorch facilities are tested, on which layers, and with what result if all is right.

`@facility` makes a test of them: one function for each, parametrized over its subjects. The closing table in
docs/pytorch.md has a row for each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from firstday.subjects import Subject

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Facility:
    """One row: what it is called, who takes part, who refuses with a sentence, and what to know."""

    test: str
    title: str
    subjects: tuple[Subject, ...]
    refuses: frozenset[str]
    note: str
    place: tuple[str, int]
    heading: str

    def expected(self, subject: Subject) -> str:
        """ "yes", or "refuses" where a refusal with a sentence is what is right."""
        return "refuses" if subject.name in self.refuses else "yes"


FACILITIES: dict[str, Facility] = {}


def facility(
    title: str,
    subjects: Iterable[Subject],
    *,
    refuses: Callable[[Subject], bool] = lambda _: False,
    note: str = "",
) -> Callable[[FunctionType], Any]:
    """Register the test as a row of the table, and run it for each of `subjects`."""
    taken = tuple(subjects)

    def register(test: FunctionType) -> Any:
        name = test.__name__
        refused = frozenset(s.name for s in taken if refuses(s))
        assert title not in {f.title for f in FACILITIES.values() if f.test != name}, title
        heading = str(test.__globals__["__doc__"]).partition("\n")[0].strip()
        place = (Path(test.__code__.co_filename).name, test.__code__.co_firstlineno)
        FACILITIES[name] = Facility(name, title, taken, refused, note, place, heading)
        return pytest.mark.parametrize("subject", taken, ids=str)(test)

    return register


def facilities() -> list[Facility]:
    """All of them, in the order of the files and of the tests in them."""
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"firstday.{path.stem}")
    return sorted(FACILITIES.values(), key=lambda row: row.place)


def only(subjects: Iterable[Subject], **wanted: Any) -> tuple[Subject, ...]:
    """Those whose attributes are as `wanted`."""
    return tuple(s for s in subjects if all(getattr(s, name) == value for name, value in wanted.items()))
