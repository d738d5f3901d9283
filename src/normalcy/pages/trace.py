"""The page of one trace: the values before and after, which cells share a statistic, and every step.

Not for computing anything: it reads a finished trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup

from normalcy.errors import ArgumentError
from normalcy.pages.numbers import number, path
from normalcy.pages.page import MOST_EMBEDDED, embedded, render, shown
from normalcy.pages.strips import Strip, picture
from normalcy.pages.svg import AFTER, BATCH, BEFORE

DRAWN, ROWS, COLUMNS = 4, 16, 12
"""How many statistics are drawn, and how many rows and columns of a table are shown."""

_HUES = 6
_CARRIED = 12  # numbers of a list that are written out in a step


@dataclass(frozen=True, slots=True)
class Drawing:
    """One statistic: its number, the addresses of what is said of it, and its pictures."""

    index: int
    pictures: tuple[tuple[str, Markup, str | None, str | None], ...]


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
    which is embedded as JSON (of large arrays the beginning).

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
    steps = enumerate(trace["steps"])
    places = {key: (i, value) for i, step in steps for key, value in step["values"].items()}
    if "x" not in places:
        raise ArgumentError("the trace has no values to draw", "values before and after", "give some values")
    view = _View(places)
    whole = len(json.dumps(trace)) <= MOST_EMBEDDED
    data, _ = embedded(trace if whole else {**trace, "steps": [_cut(step, 0) for step in trace["steps"]]})
    norm = f"{trace['norm'][:1].upper()}{trace['norm'][1:]} norm"
    statistics = view.statistics()
    return render(
        "trace.html",
        title=f"Trace of {norm.lower()}",
        norm=norm,
        view=view,
        shown=partial(shown, trace),
        drawings=[view.drawing(k) for k in view.drawn(statistics)],
        statistics=statistics[:ROWS],
        columns=_COLUMNS if "count" in places else (("values", "n"), *_COLUMNS[1:]),
        left=max(len(statistics) - ROWS, 0),
        sames=view.sames(statistics),
        steps=[_step(i, step) for i, step in enumerate(trace["steps"])],
        data=data,
        whole=whole,
    )


class _View:
    """The arrays of a trace, cell by cell."""

    def __init__(self, places: Mapping[str, tuple[int, Any]]) -> None:
        self.places = places
        self.x = dict(_cells(places["x"][1]))
        shares = places["shares"][1] if "shares" in places else None
        self.shares = dict(_cells(shares)) if shares is not None else dict.fromkeys(self.x, 0)
        self.shape = _extents(places["x"][1])

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

    def statistics(self) -> list[int]:
        """The statistics that there are, by their number."""
        return sorted({share for share in self.shares.values() if share is not None})

    def drawn(self, statistics: Sequence[int]) -> list[int]:
        """The statistics to draw: the first with a spread."""
        spread = [k for k in statistics if self.value("skewness_of_x", (k,)) is not None]
        return (spread or list(statistics))[:DRAWN]

    def sames(self, statistics: Sequence[int]) -> int | None:
        """The statistic whose skewness and kurtosis the head of the page tells."""
        drawn = self.drawn(statistics)
        return drawn[0] if drawn and self.value("skewness", (drawn[0],)) is not None else None

    def drawing(self, k: int) -> Drawing:
        """Draw the values of one statistic before, normalized, and after γ and β."""
        cells = [at for at, share in self.shares.items() if share == k]
        rows = [("x", "before", BEFORE, "skewness_of_x", "kurtosis_of_x")]
        rows += [("xhat", "normalized: x̂", AFTER, "skewness", "kurtosis")]
        rows += [("y", "after γ and β: y", BATCH, "", "")]
        pictures = []
        for key, words, colour, skewness, kurtosis in rows:
            if self.value(key) is None:
                continue
            values = [float(self.value(key, at)) for at in cells]
            strip = Strip(
                values,
                [self.address(key, at) or "" for at in cells],
                [f"{key if key != 'xhat' else 'x̂'}[{', '.join(map(str, at))}]" for at in cells],
                colour,
                {"x": "x", "xhat": "x̂", "y": "y"}[key],
            )
            says = f"{len(values)} values {words}, from {number(min(values))} to {number(max(values))}"
            drawn = picture(strip, says)
            pictures.append((words, drawn, self.address(skewness, (k,)), self.address(kurtosis, (k,))))
        return Drawing(k, tuple(pictures))

    def rows(self) -> list[tuple[str, list[Cell]]]:
        """The array as a table: a row for each place on all axes but the last."""
        rows: dict[tuple[int, ...], list[Cell]] = {}
        for at, share in self.shares.items():
            row = rows.setdefault(at[:-1], [])
            if len(row) < COLUMNS:
                row.append(Cell(self.address("x", at) or "", share, (share or 0) % _HUES))
        shown_rows = list(rows.items())[:ROWS]
        return [(f"x[{', '.join(map(str, at))}]" if at else "x", row) for at, row in shown_rows]

    def cut(self) -> str:
        """Say what of the array the table leaves out."""
        *outer, inner = self.shape
        rows = 1
        for n in outer:
            rows *= n
        said = [f"{ROWS} of {rows:,} rows"] if rows > ROWS else []
        said += [f"{COLUMNS} of {inner:,} columns"] if inner > COLUMNS else []
        return " and ".join(said)


def _cells(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if not isinstance(value, list):
        yield at, value
        return
    for i, item in enumerate(value):
        yield from _cells(item, (*at, i))


def _extents(value: Any) -> list[int]:
    return [len(value), *_extents(value[0])] if isinstance(value, list) else []


def _step(i: int, step: Mapping[str, Any]) -> dict[str, Any]:
    """The step with the addresses of the numbers that are few enough to be written out."""
    numbers: list[tuple[str, list[str]]] = []

    def add(name: str, value: Any, *keys: str | int) -> None:
        here = ("steps", i, "values", *keys)
        if isinstance(value, Mapping):
            for inner, item in value.items():
                add(f"{inner}{_WEIGHING.get(keys[-1], '')}", item, *keys, inner)
        elif isinstance(value, list):
            if len(value) <= _CARRIED and not any(isinstance(item, (list, Mapping)) for item in value):
                numbers.append((name, [path(*here, k) for k in range(len(value))]))
            elif all(isinstance(item, Mapping) for item in value) and len(value) <= _CARRIED:
                for k, item in enumerate(value):
                    for inner, number_ in item.items():
                        add(f"{inner} after {k + 1}", number_, *keys, k, inner)
        else:
            numbers.append((name, [path(*here)]))

    for key, value in step["values"].items():
        add(key, value, key)
    written = [(_WORDS.get(name, name.replace("_", " ")), addresses) for name, addresses in numbers]
    return {**step, "numbers": written, "formulas": step["formula"].split("\n")}


def _cut(value: Any, depth: int) -> Any:
    """The beginning of every list, so that a large array can be embedded."""
    if isinstance(value, Mapping):
        return {key: _cut(item, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item, depth + 1) for item in value[: ROWS if depth == 0 else COLUMNS]]
    return value


_COLUMNS = (
    *(("values", "count"), ("mean", "mean"), ("variance", "var"), ("1/√(var + eps)", "rstd")),
    *(("var/(var + eps)", "normalized_variance"), ("skewness of x", "skewness_of_x")),
    *(("skewness of x̂", "skewness"), ("kurtosis of x", "kurtosis_of_x"), ("kurtosis of x̂", "kurtosis")),
    *(("distinct in x", "distinct_in_x"), ("distinct in x̂", "distinct")),
)
_WEIGHING: Mapping[object, str] = {
    "weight_of_new": ", m weighing the new value",
    "weight_of_old": ", m weighing the old value",
}
_WORDS = {
    "xhat": "x̂",
    "gamma": "γ",
    "beta": "β",
    "dgamma": "dγ",
    "dbeta": "dβ",
    "S1": "S₁",
    "S2": "S₂",
    "y_inference": "y",
    "count": "values of each",
    "normalized_variance": "var/(var + eps)",
    "skewness": "skewness of x̂",
    "kurtosis": "kurtosis of x̂",
    "distinct": "distinct in x̂",
}
