"""Single values as dots above a line, stacked where they would cover one another.

Not for many values: `charts.histograms` counts those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from normalcy.pages.charts import Panel, histograms
from normalcy.pages.numbers import number
from normalcy.pages.svg import INK, QUIET, altair, inline, printable

MOST = 60
"""How many values are drawn as dots; more are counted in a histogram, with the bell of their moments."""

_BINS, _STEP, _HIGHEST = 36, 12, 10


@dataclass(frozen=True, slots=True)
class Strip:
    """The values of one picture: each with its address in the JSON and what a person calls it."""

    values: Sequence[float]
    paths: Sequence[str]
    names: Sequence[str]
    colour: str
    axis: str


def picture(strip: Strip, says: str) -> Markup:
    """Draw values on an axis of their own: dots where they are few, a histogram where they are many."""
    stacks = _stacked(strip.values)
    tallest = max(stacks, default=0) + 1
    if len(strip.values) > MOST or tallest > _HIGHEST:
        panel = Panel(f"{len(strip.values):,} values", strip.values, strip.colour, gaussian=True)
        return histograms([panel], strip.axis, says)
    alt, floor = altair(), tallest * _STEP + 8
    low, high = _extent(strip.values)
    x = alt.X("x:Q", title=strip.axis, scale=alt.Scale(domain=[low, high], nice=False, zero=False))
    y = alt.Y("y:Q", scale=None, axis=None)
    dots = [
        {"x": value, "y": floor - (stack + 0.5) * _STEP, "colour": strip.colour}
        | {"says": f"@{path} {printable(f'{name}: {number(value)}', 200)}"}
        for value, stack, path, name in zip(strip.values, stacks, strip.paths, strip.names, strict=True)
    ]
    mean = math.fsum(strip.values) / len(strip.values)
    dot = alt.Chart(_data(alt, dots)).mark_circle(size=95, opacity=1)
    dot = dot.encode(x=x, y=y, color=alt.Color("colour:N", scale=None), description="says:N")
    line = alt.Chart(_data(alt, [{"x": low, "x2": high, "y": floor}])).mark_rule(color=QUIET)
    line = line.encode(x=x, x2="x2:Q", y=y)
    centre = alt.Chart(_data(alt, [{"x": mean, "y": 0, "y2": floor}])).mark_rule(color=INK, strokeDash=[2, 3])
    centre = centre.encode(x=x, y=y, y2="y2:Q")
    return inline(alt.layer(centre, line, dot), floor, says)


def _stacked(values: Sequence[float]) -> list[int]:
    """How many earlier values stand where each one does."""
    low, high = _extent(values)
    stacks, counts = [], dict[int, int]()
    for value in values:
        place = int((value - low) / (high - low) * _BINS)
        stacks.append(counts.get(place, 0))
        counts[place] = stacks[-1] + 1
    return stacks


def _extent(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = 0.08 * (high - low) or 0.1 * abs(low) or 1.0
    return low - room, high + room


def _data(alt: Any, rows: list[dict[str, Any]]) -> Any:
    return alt.Data(values=rows)
