"""The charts of every page, drawn with Altair and inlined as plain SVG without a script.

Not for figures on paper or in a notebook: colours here follow the page's light and dark styles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard

from markupsafe import Markup

from normalcy.pages.numbers import measure, number
from normalcy.pages.svg import INK, MUTED, QUIET, altair, inline, printable

_BINS = 48
_HEIGHT, _LINE = 62, 26  # pixels of a histogram, and of the line of text above it


@dataclass(frozen=True, slots=True)
class Mark:
    """One value to draw: where it stands in the checkup, its colour, and what a pointer over it says."""

    value: object
    path: str
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled line of a bar or dot chart, with its marks below one another."""

    label: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """The weight of the initial state over updates, as points (updates, weight)."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """The values of one histogram; `gaussian` draws the bell of the same mean and variance over it."""

    label: str
    values: Sequence[object]
    colour: str
    gaussian: bool = False


def bars(rows: Sequence[Row], axis: str, says: str) -> Markup:
    """Draw rows of horizontal bars from zero, each with its label above and its number at the end."""
    values = [v for row in rows for mark in row.marks if (v := measure(mark.value)) is not None]
    top = max((v for v in values if math.isfinite(v)), default=0.0) or 1.0
    return _rows(rows, axis, says, (0.0, 1.2 * top), dots=False)


def dots(rows: Sequence[Row], axis: str, says: str, reference: float | None = None) -> Markup:
    """Draw rows of dots on a scale that need not begin at zero; `reference` is a dashed line through all."""
    values = [v for row in rows for mark in row.marks if (v := measure(mark.value)) is not None]
    finite = [v for v in (*values, reference) if _finite(v)] or [0.0]
    room = 0.08 * (max(finite) - min(finite)) or 0.1 * abs(finite[0]) or 1.0
    return _rows(
        rows, axis, says, (min(finite) - room, max(finite) + 2.5 * room), dots=True, reference=reference
    )


def warmup(curves: Sequence[Curve], points: Sequence[tuple[float, Mark]], says: str) -> Markup:
    """Draw how the weight of the initial state falls with the updates, and where layers stand on it."""
    alt = altair()
    end = max((x for curve in curves for x, _ in curve.points), default=1.0)
    x = alt.X("x:Q", title="updates", scale=alt.Scale(domain=[0, end], nice=False))
    y = alt.Y("y:Q", title="weight left on the initial state", scale=alt.Scale(domain=[0, 1]))
    lines = [{"x": px, "y": py, "curve": str(i)} for i, curve in enumerate(curves) for px, py in curve.points]
    names = [
        {"x": curve.points[len(curve.points) // 4][0], "y": curve.points[len(curve.points) // 4][1]}
        | {"text": printable(curve.label)}
        for curve in curves
        if len(curves) > 1 and curve.points
    ]
    places: list[dict[str, Any]] = []
    for px, mark in sorted(points, key=lambda point: point[0]):
        at = measure(mark.value)
        crowded = any(abs(place["y"] - (at or 0)) < 0.08 and place["text"] for place in places)
        places.append(
            {"x": min(px, end), "y": at, "colour": mark.colour, "text": "" if crowded else number(mark.value)}
            | {"says": _says(mark), "dx": -6 if px > 0.85 * end else 6}
        )
    line = alt.Chart(_data(alt, lines)).mark_line(color=MUTED, strokeWidth=2)
    line = line.encode(x=x, y=y, detail="curve:N")
    name = alt.Chart(_data(alt, names)).mark_text(color=MUTED, align="left", dx=6, dy=-4, fontSize=12)
    place = alt.Chart(_data(alt, places)).encode(x=x, y=y, description="says:N")
    dot = place.mark_circle(size=110, opacity=1).encode(color=alt.Color("colour:N", scale=None))
    left = alt.datum.dx < 0
    style = {"color": INK, "fontSize": 13, "fontWeight": "bold", "dy": -9}
    tags = [
        place.transform_filter((alt.datum.text != "") & side)
        .mark_text(align=align, dx=dx, **style)
        .encode(text="text:N")
        for side, align, dx in ((left, "right", -6), (~left, "left", 6))
    ]
    return inline(alt.layer(line, name.encode(x=x, y=y, text="text:N"), dot, *tags), 250, says)


def histograms(panels: Sequence[Panel], axis: str, says: str) -> Markup:
    """Draw histograms below one another on one common axis, so that a shift and a stretch can be seen.

    Values beyond the drawn range (which leaves out less than 0.2 % on either side) are counted in the
    first and the last bar; values that are not finite are not drawn.
    """
    alt = altair()
    rows, low, high = _panels(panels)
    x = alt.X("x:Q", title=axis, scale=alt.Scale(domain=[low, high], nice=False, zero=False))
    y = alt.Y("y:Q", scale=None, axis=None)
    area = alt.Chart(_data(alt, rows["steps"])).mark_area(interpolate="step", fillOpacity=0.85)
    area = area.encode(x=x, y=y, y2="y2:Q", color=alt.Color("colour:N", scale=None), detail="panel:N")
    bell = alt.Chart(_data(alt, rows["bells"])).mark_line(color=INK, strokeWidth=1.5, strokeDash=[2, 3])
    bell = bell.encode(x=x, y=y, detail="panel:N")
    floor = alt.Chart(_data(alt, rows["floors"])).mark_rule(color=QUIET).encode(x=x, x2="x2:Q", y=y)
    label = alt.Chart(_data(alt, rows["labels"])).mark_text(color=INK, align="left", fontSize=13)
    layers = [area, bell, floor, label.encode(x=x, y=y, text="text:N")]
    if low < 0 < high:
        layers.insert(0, alt.Chart(_data(alt, [{"x": 0}])).mark_rule(color=QUIET).encode(x=x))
    return inline(alt.layer(*layers), len(panels) * (_HEIGHT + _LINE), says)


def _panels(panels: Sequence[Panel]) -> tuple[dict[str, list[dict[str, Any]]], float, float]:
    finite = [[v for v in map(measure, panel.values) if _finite(v)] for panel in panels]
    low, high = _extent([v for values in finite for v in values])
    width = (high - low) / _BINS
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "labels": [], "bells": [], "floors": []}
    for i, (panel, values) in enumerate(zip(panels, finite, strict=True)):
        floor = (i + 1) * (_HEIGHT + _LINE) - 4
        counts = _count(values, low, high)
        tallest = max(counts) or 1
        for k, count in enumerate(counts):
            top = floor - _HEIGHT * count / tallest
            rows["steps"].append(
                {"x": low + (k + 0.5) * width, "y": top, "y2": floor, "colour": panel.colour, "panel": i}
            )
        rows["labels"].append({"x": low, "y": floor - _HEIGHT - 11, "text": printable(panel.label)})
        rows["floors"].append({"x": low, "x2": high, "y": floor})
        for x, share in _bell(values, low, high) if panel.gaussian and len(values) > 1 else ():
            rows["bells"].append(
                {"x": x, "y": floor - min(_HEIGHT * share / tallest, _HEIGHT + 4), "panel": i}
            )
    return rows, low, high


def _rows(
    rows: Sequence[Row],
    axis: str,
    says: str,
    domain: tuple[float, float],
    *,
    dots: bool,
    reference: float | None = None,
) -> Markup:
    alt = altair()
    labels, marks, y = [], [], 0.0
    for row in rows:
        labels.append({"x": domain[0], "y": y + 11, "text": printable(row.label)})
        y += 20
        for mark in row.marks:
            value = measure(mark.value)
            endless = value == math.inf and not dots
            at = value if _finite(value) else domain[0] + (domain[1] - domain[0]) / 1.2 * endless
            marks.append(
                {"x": at, "x0": domain[0], "y": y, "y2": y + 12, "middle": y + 6, "colour": mark.colour}
                | {"text": number(mark.value), "says": _says(mark), "solid": _finite(value) or endless}
            )
            y += 15
        y += 8
    scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    x, start = alt.X("x:Q", title=axis, scale=scale), alt.X("x0:Q", title=axis, scale=scale)
    pixel = alt.Y("y:Q", scale=None, axis=None)
    middle = alt.Y("middle:Q", scale=None, axis=None)
    base = alt.Chart(_data(alt, marks)).encode(description="says:N")
    colour = alt.Color("colour:N", scale=None)
    solid = alt.Chart(_data(alt, [mark for mark in marks if mark["solid"]])).encode(
        description="says:N", color=colour
    )
    if dots:
        track = solid.mark_rule(strokeWidth=2, opacity=0.35).encode(x=start, x2="x:Q", y=middle)
        shapes = [track, solid.mark_circle(size=120, opacity=1).encode(x=x, y=middle)]
    else:
        shapes = [solid.mark_rect(cornerRadius=2).encode(x=x, x2="x0:Q", y=pixel, y2="y2:Q")]
    text = base.mark_text(color=INK, align="left", dx=9, fontSize=13, fontWeight="bold")
    label = alt.Chart(_data(alt, labels)).mark_text(color=INK, align="left", fontSize=13)
    layers = [*shapes, text.encode(x=x, y=middle, text="text:N"), label.encode(x=x, y=pixel, text="text:N")]
    if reference is not None and math.isfinite(reference):
        line = alt.Chart(_data(alt, [{"x": reference}])).mark_rule(color=QUIET, strokeDash=[4, 4])
        layers.insert(0, line.encode(x=x))
    return inline(alt.layer(*layers), y, says)


def _data(alt: ModuleType, rows: list[dict[str, Any]]) -> Any:
    return alt.Data(values=rows)


def _says(mark: Mark) -> str:
    return f"@{mark.path} {printable(mark.title, 200)}"


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _extent(values: list[float]) -> tuple[float, float]:
    if not values:
        return -1.0, 1.0
    ranked = sorted(values)
    last = len(ranked) - 1
    low, high = ranked[round(0.002 * last)], ranked[round(0.998 * last)]
    room = 0.04 * (high - low) or 0.1 * abs(low) or 1.0
    return low - room, high + room


def _count(values: Iterable[float], low: float, high: float) -> list[int]:
    counts = [0] * _BINS
    for value in values:
        counts[min(max(int((value - low) / (high - low) * _BINS), 0), _BINS - 1)] += 1
    return counts


def _bell(values: list[float], low: float, high: float) -> list[tuple[float, float]]:
    mean = math.fsum(values) / len(values)
    var = math.fsum((v - mean) ** 2 for v in values) / len(values)
    if var <= 0:
        return []
    scale = len(values) * (high - low) / _BINS / math.sqrt(2 * math.pi * var)
    xs = [low + (high - low) * k / 80 for k in range(81)]
    return [(x, scale * math.exp(-((x - mean) ** 2) / (2 * var))) for x in xs]
