"""The page of one trace: the values before and after, which cells share a statistic, and every step.

Not for computing anything: it reads a finished trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from normalcy.errors import ArgumentError
from normalcy.pages.arrays import (
    COLUMNS,
    ROWS,
    Listed,
    Table,
    cells,
    extents,
    first_rows,
    label,
    laid_out,
    left_out,
    only,
)
from normalcy.pages.numbers import number, path
from normalcy.pages.page import MOST_EMBEDDED, embedded, render, shown
from normalcy.pages.strips import MOST, Strip, picture
from normalcy.pages.svg import AFTER, BATCH, BEFORE
from normalcy.trace.record import WORDS

DRAWN = 4
"""How many statistics are drawn."""

_HUES = 6
_ROUNDING = 1e-6  # relative: far above what float64 does to a shape, far below what a person sees


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, what it shows, and what is said beside it: words and the address of the number."""

    key: str
    words: str
    chart: Markup
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One statistic, by its number, before and after."""

    index: int
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of the array: its address, and which statistic it shares (None where it is masked)."""

    address: str
    share: int | None
    hue: int


def render_trace(trace: Mapping[str, Any]) -> str:
    """Render a trace as one page that needs no network, no script and no other file.

    Args:
        trace: `norm`, and `steps`: for each its `name`, `formula`, `values` and `why`, as `normalcy.trace`
            makes them, in plain lists and numbers.

    Every number outside the sentences stands in an element whose `data-json` is its address in the trace,
    which is embedded as JSON: the whole of it up to a million characters, beyond that the numbers shown,
    with a mapping from index to number in the place of each list.

    Raises:
        ArgumentError: no values were traced.
        MissingExtraError: Altair or vl-convert is not installed; `pages.require()` says so beforehand.

    Example:
        >>> from normalcy import pages
        >>> def step(name, **values):
        ...     return {"name": name, "formula": "", "values": values, "why": []}
        >>> steps = [step("mean", x=[1.0, 3.0], mean=2.0), step("normalize", xhat=[-1.0, 1.0])]
        >>> "Batch norm" in pages.render_trace({"norm": "batch", "steps": steps})
        True
    """
    places = {
        key: (i, value) for i, step in enumerate(trace["steps"]) for key, value in step["values"].items()
    }
    if "x" not in places:
        raise ArgumentError("the trace has no values to draw", "values before and after", "give some values")
    view = _View(places, trace["norm"])
    whole = len(json.dumps(trace)) <= MOST_EMBEDDED
    addresses: set[str] = set()

    def show(address: str, tag: str = "span") -> Markup:
        addresses.add(address)
        return shown(trace, address, tag)

    def data() -> Markup:
        """Embed the trace; the last thing of the page, when it is known what was shown."""
        return embedded(trace if whole else _shortened(trace, addresses))[0]

    norm = "RMS" if view.rms else f"{trace['norm'][:1].upper()}{trace['norm'][1:]}"
    drawn, statistics = view.drawn(), view.statistics
    return render(
        "trace.html",
        title=f"Trace of {trace['norm']} norm",
        norm=f"{norm} norm",
        view=view,
        shown=show,
        number=number,
        drawings=[view.drawing(k) for k in drawn],
        statistics=statistics[:ROWS],
        total=len(statistics),
        columns=view.columns(),
        told=drawn[0] if view.has_shape(drawn[0]) else None,
        steps=[_step(i, step) for i, step in enumerate(trace["steps"])],
        data=data,
        whole=whole,
    )


def _shortened(trace: Mapping[str, Any], addresses: set[str]) -> dict[str, Any]:
    """The trace with no numbers but those at the addresses."""
    steps = []
    for i, step in enumerate(trace["steps"]):
        here = path("steps", i, "values", "")
        inside = [address.removeprefix(here) for address in addresses if address.startswith(here)]
        steps.append({**step, "values": only(step["values"], inside)})
    return {**trace, "steps": steps}


class _View:
    """The arrays of a trace, cell by cell."""

    def __init__(self, places: Mapping[str, tuple[int, Any]], norm: str) -> None:
        self.places, self.norm, self.rms = places, norm, norm == "rms"
        x = places["x"][1]
        self.shape = extents(x)
        self.size = math.prod(self.shape)
        shares = cells(places["shares"][1]) if "shares" in places else ((at, 0) for at, _ in cells(x))
        self.members: dict[int, list[tuple[int, ...]]] = {}
        for at, share in shares:
            if share is not None:
                self.members.setdefault(share, []).append(at)
        self.statistics = sorted(self.members)

    def address(self, key: str, at: Sequence[int] = ()) -> str | None:
        """Where a number stands, or None where there is none."""
        if key not in self.places or self.places[key][1] is None:
            return None
        step, value = self.places[key]
        return path("steps", step, "values", key, *(at if isinstance(value, list) else ()))

    def value(self, key: str, at: Sequence[int] = ()) -> Any:
        """A number, or None where there is none."""
        found: Any = self.places[key][1] if key in self.places else None
        for index in at if isinstance(found, list) else ():
            found = found[index]
        return found

    def drawn(self) -> list[int]:
        """The statistics to draw: the first with a spread."""
        spread = (k for k in self.statistics if self.value("skewness_of_x", (k,)) is not None)
        first = [k for k, _ in zip(spread, range(DRAWN), strict=False)]
        return first or self.statistics[:DRAWN]

    def has_shape(self, k: int) -> bool:
        """Whether skewness and kurtosis of a statistic are defined, before and after."""
        return all(self.value(key, (k,)) is not None for pair in _SHAPES for key in pair)

    def is_kept(self, k: int) -> bool:
        """Whether they are the same before and after, but for rounding."""
        return all(
            math.isclose(self.value(old, (k,)), self.value(new, (k,)), rel_tol=_ROUNDING, abs_tol=_ROUNDING)
            for old, new in _SHAPES
        )

    def columns(self) -> list[tuple[str, str]]:
        """The columns of the table of statistics."""
        counted = "count" if "count" in self.places else "n"
        spread = "mean square" if self.rms else "variance"
        centre = [] if self.rms else [("mean", "mean")]
        return [("values", counted), *centre, (spread, "var"), *_COLUMNS]

    def drawing(self, k: int) -> Drawing:
        """Draw the values of one statistic before, normalized, and after γ and β."""
        spread = "mean square" if self.rms else "variance"
        rows = (
            ("x", "before: x", BEFORE, (("mean", "mean"), (spread, "var"), *_OF_X)),
            (
                "xhat",
                "normalized: x̂",
                AFTER,
                ((f"{spread} = var/(var + eps)", "normalized_variance"), *_OF_XHAT),
            ),
            ("y", "after γ: y" if self.rms else "after γ and β: y", BATCH, (("γ", "gamma"), ("β", "beta"))),
        )
        pictures = []
        for key, words, colour, facts in rows:
            members = [at for at in self.members[k] if self.value(key, at) is not None]
            if not members:
                continue
            said = [
                (name, address)
                for name, fact in facts
                if not (self.rms and fact == "mean")
                and (key != "y" or self.norm == "batch" or not isinstance(self.value(fact), list))
                and (address := self.address(fact, (k,)))
            ]
            pictures.append(Picture(key, words, self._chart(key, words, colour, members), tuple(said)))
        return Drawing(k, tuple(pictures))

    def _chart(self, key: str, words: str, colour: str, members: Sequence[tuple[int, ...]]) -> Markup:
        values = [float(self.value(key, at)) for at in members]
        name = "x̂" if key == "xhat" else key
        dots = members if len(members) <= MOST else []
        strip = Strip(
            values,
            [self.address(key, at) or "" for at in dots],
            [label(name, at) for at in dots],
            colour,
            name,
        )
        return picture(
            strip, f"{len(values):,} values {words}, from {number(min(values))} to {number(max(values))}"
        )

    def rows(self) -> Iterator[tuple[str, list[Cell]]]:
        """The array as a table: a row for each place on all axes but the last."""
        for at in first_rows(self.shape):
            row = []
            for i in range(min(self.shape[-1], COLUMNS)):
                here = (*at, i)
                share = self.value("shares", here) if "shares" in self.places else 0
                row.append(Cell(self.address("x", here) or "", share, (share or 0) % _HUES))
            yield label("x", at), row

    def cut(self) -> str:
        """Say what of the array the table leaves out."""
        return left_out(self.shape)


def _step(i: int, step: Mapping[str, Any]) -> dict[str, Any]:
    """The step with its numbers laid out; arrays of x and of shares stand in a table of their own."""
    found: list[Listed | Table] = []

    def add(name: str, value: Any, *keys: str) -> None:
        if isinstance(value, Mapping):
            for inner, item in value.items():
                add(f"{_WORDS.get(inner, inner)}{_WEIGHING.get(keys[-1], '')}", item, *keys, inner)
            return
        if name in {"x", "shares"} and len(extents(value)) > 1:
            return
        words = _WORDS.get(name, name).replace("_", " ")
        found.append(laid_out(words, value, ("steps", i, "values", *keys)))

    for key, value in step["values"].items():
        add(key, value, key)
    return {
        **step,
        "numbers": [item for item in found if isinstance(item, Listed)],
        "tables": [item for item in found if isinstance(item, Table)],
        "formulas": step["formula"].split("\n"),
    }


_SHAPES = (("skewness_of_x", "skewness"), ("kurtosis_of_x", "kurtosis"))
_OF_X = (("skewness", "skewness_of_x"), ("kurtosis", "kurtosis_of_x"))
_OF_XHAT = (("skewness", "skewness"), ("kurtosis", "kurtosis"))
_COLUMNS = (
    *(("rstd", "rstd"), ("var/(var + eps)", "normalized_variance")),
    *(("skewness of x", "skewness_of_x"), ("skewness of x̂", "skewness")),
    *(("kurtosis of x", "kurtosis_of_x"), ("kurtosis of x̂", "kurtosis")),
    *(("distinct in x", "distinct_in_x"), ("distinct in x̂", "distinct")),
)
_WEIGHING = {
    "weight_of_new": ", m weighing the new value",
    "weight_of_old": ", m weighing the old value",
}
_WORDS = WORDS | {
    "normalized_variance": "var/(var + eps)",
    "after": "after each update",
}
