"""A checkup's parts as plain values: what the JSON has, and the page draws.

No decision is taken here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from normalcy.doctor import Examination, Examined
from normalcy.report import Item
from normalcy.statistics import updates_until, warm_count, weight_left


@dataclass(frozen=True, slots=True)
class Repair:
    """What was done and refused: pairs of the operation's name and the place with its reason.

    `failed` is true where something was refused because its proof failed; `notes` are about the whole.
    """

    done: tuple[tuple[str, Item], ...]
    refused: tuple[tuple[str, Item], ...]
    failed: bool = False
    notes: tuple[str, ...] = ()


def examination(found: Examination) -> dict[str, Any]:
    """Findings, sites, and what was not examined."""
    return {
        "findings": [
            {
                "code": finding.code,
                "title": finding.title,
                "severity": finding.severity,
                "where": finding.where,
                "evidence": finding.evidence,
                "cause": finding.cause,
                "remedy": finding.remedy,
            }
            for finding in found.findings
        ],
        "sites": [_site(site) for site in found.sites],
        "unrecognized": items(found.unrecognized),
        "not_seen": items(found.not_seen),
        "loss": {"eval": found.loss.eval, "batch": found.loss.batch} if found.loss else None,
        "notes": list(found.notes),
    }


def _site(site: Examined) -> dict[str, Any]:
    gap, taken = site.gap, site.sample
    return {
        "where": site.where,
        "kind": site.kind,
        "class": site.cls,
        "channels": site.channels,
        "mode": site.mode,
        "momentum": site.momentum,
        "eps": site.eps,
        "updates": site.updates,
        "weight_left": site.weight_left,
        "calls": site.calls,
        "values": site.values,
        "gap": {"rms": gap.rms, "worst": gap.worst, "channel": gap.channel} if gap else None,
        "sample": None
        if taken is None
        else {
            "channel": taken.channel,
            "before": taken.before,
            "stored": taken.stored,
            "batch": taken.batch,
            "skewness": {name: skewness for name, (skewness, _) in taken.shape().items()},
            "kurtosis": {name: kurtosis for name, (_, kurtosis) in taken.shape().items()},
        },
        "neighbours": site.neighbours.as_dict() if site.neighbours else None,
        "warmup": _warmup(site),
    }


def _warmup(site: Examined, points: int = 60) -> list[dict[str, float]] | None:
    """The curve (1 − m)ᵏ, until past 1 % and past where the layer stands."""
    momentum = site.momentum
    to_one_percent = updates_until(0.01, momentum or 0.0)
    if not momentum or to_one_percent is None or site.updates is None:
        return None
    end = max(round(1.2 * to_one_percent), min(site.updates, warm_count(momentum)))
    ks = sorted({round(end * i / (points - 1)) for i in range(points)})
    return [{"updates": k, "weight_left": weight_left(momentum, k)} for k in ks]


def repair(made: Repair | None) -> dict[str, Any] | None:
    """What was done and what was refused."""
    if made is None:
        return None
    return {
        "done": [{"what": what, "where": item.where, "why": item.why} for what, item in made.done],
        "refused": [{"what": what, "where": item.where, "why": item.why} for what, item in made.refused],
    }


def items(given: Iterable[Item]) -> list[dict[str, str]]:
    """Places with their reasons."""
    return [{"where": item.where, "why": item.why} for item in given]


def plain(value: Any) -> Any:
    """Tuples as lists, and numbers that are not finite as words."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
