"""Which numbers of a checkup become which chart, and what each chart says in words.

Not for drawing itself: `charts` draws whatever it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from normalcy.pages.charts import Curve, Mark, Panel, Row, bars, dots, histograms
from normalcy.pages.charts import warmup as draw_warmup
from normalcy.pages.numbers import lookup, measure, number, path
from normalcy.pages.svg import AFTER, BATCH, BEFORE, QUIET

DRAWN = 12
_CURVES = 4


@dataclass(frozen=True, slots=True)
class Site:
    """One norm layer as examined before and, where there was a repair, after; with both addresses."""

    where: str
    before: Mapping[str, Any]
    after: Mapping[str, Any] | None
    path: str
    after_path: str

    @property
    def has_gap(self) -> bool:
        """Whether a train/eval gap was measured, before or after."""
        return self.before["gap"] is not None or bool(self.after and self.after["gap"] is not None)

    @property
    def order(self) -> float:
        """Minus the gap, so that sorting puts the worst first and what was not measured last."""
        gap = measure(self.before["gap"]["rms"]) if self.before["gap"] else None
        return math.inf if gap is None else -math.inf if math.isnan(gap) else -gap


def sites(checkup: Mapping[str, Any]) -> list[Site]:
    """Pair the sites of both examinations by place, the largest gap first."""
    after = checkup["after"]["sites"] if checkup["after"] else []
    at = {site["where"]: i for i, site in enumerate(after)}
    paired = []
    for i, site in enumerate(checkup["before"]["sites"]):
        k = at.get(site["where"])
        other = None if k is None else after[k]
        paired.append(
            Site(
                site["where"],
                site,
                other,
                path("before", "sites", i),
                "" if k is None else path("after", "sites", k),
            )
        )
    return sorted(paired, key=lambda site: site.order)


def losses(checkup: Mapping[str, Any]) -> Markup | None:
    """Draw the baselines and the losses, with a line through all at the bigram table's."""
    wanted = [("A uniform guess", "baselines.uniform", QUIET), ("A bigram table", "baselines.bigram", QUIET)]
    for when, stored, colour in (
        ("before", "before the repair", BEFORE),
        ("after", "after the repair", AFTER),
    ):
        told = f", {stored}" if checkup["after"] else ""
        wanted.append((f"Stored statistics{told}", f"{when}.loss.eval", colour))
    wanted.append(("Each batch's own statistics", "before.loss.batch", BATCH))
    rows = [
        Row(label, (Mark(value, address, colour, f"{label}: {number(value)}"),))
        for label, address, colour in wanted
        if (value := _maybe(checkup, address)) is not None
    ]
    if not rows:
        return None
    bigram = measure(_maybe(checkup, "baselines.bigram"))
    told = "; ".join(f"{row.label} {number(row.marks[0].value)}" for row in rows)
    return dots(rows, "loss", f"Losses: {told}.", bigram)


def gaps(worst: Sequence[Site]) -> Markup | None:
    """Draw the train/eval gap of the given layers, before and after."""
    rows = []
    for site in worst:
        exams = ((site.before, site.path, BEFORE, "before"), (site.after, site.after_path, AFTER, "after"))
        marks = tuple(
            Mark(
                exam["gap"]["rms"],
                f"{address}.gap.rms",
                colour,
                f"{site.where}, {when}: {number(exam['gap']['rms'])}",
            )
            for exam, address, colour, when in exams
            if exam is not None and exam["gap"] is not None
        )
        rows.append(Row(site.where, marks))
    if not rows:
        return None
    told = "; ".join(mark.title for row in rows for mark in row.marks)
    return bars(rows, "gap, in standard deviations of the data", f"Train/eval gap by layer. {told}.")


def warmup(listed: Sequence[Site]) -> Markup | None:
    """Draw the curves (1−m)^k that the layers follow, and the layers on them."""
    curves: dict[str, Curve] = {}
    points: dict[tuple[str, str], tuple[float, Mark]] = {}
    for site in listed:
        exam = site.before
        at, left = measure(exam["updates"]), measure(exam["weight_left"])
        if not exam["warmup"] or at is None or left is None or not math.isfinite(at + left):
            continue
        label = f"momentum {number(exam['momentum'])}"
        if label not in curves and len(curves) == _CURVES:
            continue
        curves[label] = Curve(
            label, tuple((float(p["updates"]), float(p["weight_left"])) for p in exam["warmup"])
        )
        told = f"{site.where}: {number(exam['updates'])} updates, {number(exam['weight_left'])} left"
        mark = Mark(exam["weight_left"], f"{site.path}.weight_left", BEFORE, told)
        if len(points) < DRAWN:
            points.setdefault((label, number(exam["weight_left"])), (at, mark))
    if not curves:
        return None
    told = "; ".join(mark.title for _, mark in points.values())
    return draw_warmup(
        list(curves.values()), list(points.values()), f"Weight left on the initial state. {told}."
    )


def activations(site: Site) -> tuple[Markup, Markup]:
    """Draw one channel before the norm, and after it with each source of statistics on a common axis."""
    sample = site.before["sample"]
    incoming = Panel("going into the norm", sample["before"], QUIET)
    repaired = site.after is not None
    panels = [
        Panel(f"stored statistics{', before the repair' if repaired else ''}", sample["stored"], BEFORE)
    ]
    later = site.after["sample"] if site.after else None
    if later is not None:
        other = "" if later["channel"] == sample["channel"] else f" (channel {number(later['channel'])})"
        panels.append(Panel(f"stored statistics, after the repair{other}", later["stored"], AFTER))
    panels.append(Panel("each batch's own statistics", sample["batch"], BATCH, gaussian=True))
    told = f"channel {number(sample['channel'])} of {site.where}"
    listed = "; ".join(panel.label for panel in panels)
    return (
        histograms([incoming], "value", f"Histogram of {told} going into the norm."),
        histograms(
            panels,
            "normalized value",
            f"Histograms of {told} after the norm, on one axis: {listed}.",
        ),
    )


def _maybe(checkup: Mapping[str, Any], address: str) -> object:
    """Give what lies at an address, or None where something on the way to it is null."""
    keys = address.split(".")
    for depth in range(1, len(keys) + 1):
        found = lookup(checkup, ".".join(keys[:depth]))
        if found is None:
            return None
    return found
