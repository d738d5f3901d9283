"""The main job: examine, repair, examine again, fold, prove; as one value that can be printed or drawn.

Composed from `doctor` and `surgery`. It prints nothing and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from normalcy import case as cases
from normalcy import example
from normalcy.case import Case
from normalcy.doctor import Examination, Examined, examine
from normalcy.errors import NormalcyError, ProofError
from normalcy.measure import Progress
from normalcy.report import Item, Report
from normalcy.statistics import warm_count, weight_left
from normalcy.surgery import debias, fold, recalibrate, strip_dead_bias

STATISTICS = (
    "initial-statistics",
    "unwarmed-statistics",
    "stale-statistics",
    "non-finite-statistics",
    "negative-variance",
)
"""The findings that recalibration cures."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What was done and refused: pairs of the operation's name and the place with its reason.

    `failed` is true where something was refused because its proof failed.
    """

    done: tuple[tuple[str, Item], ...]
    refused: tuple[tuple[str, Item], ...]
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Checkup:
    """The whole of one main job.

    Attributes:
        target: what was examined, in words.
        case: the model (repaired in place, where `repair` is set) and what came with it.
        before: the first examination.
        repair: what was repaired; None where that was not asked for.
        after: the examination after it.
        folded: the folding and its proof; None where it was not asked for or there are no data.
        baselines: losses to compare with, by name.
        notes: what could not be done, and why.
        parameters: how many the model had when it was examined.
        unproved: nothing could be proved about the model, because it does not even agree with itself.
    """

    target: str
    case: Case
    before: Examination
    repair: Repair | None = None
    after: Examination | None = None
    folded: Report | None = None
    baselines: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    parameters: int = 0
    unproved: bool = False

    @property
    def proved(self) -> bool | None:
        """False if any proof failed (what failed was taken back), True if one held, else None."""
        if self.unproved or (self.folded and self.folded.failed) or (self.repair and self.repair.failed):
            return False
        return True if self.folded and self.folded.done else None

    def worst(self) -> str | None:
        """The severity of the most severe finding that remains."""
        return (self.after or self.before).worst()

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON; numbers that are not finite as words."""
        model = self.case.model
        found: dict[str, Any] = _plain(
            {
                "normalcy": _own_version(),
                "torch": torch.__version__,
                "target": self.target,
                "model": {
                    "class": type(model).__name__,
                    "parameters": self.parameters,
                    "norms": len(self.before.sites),
                },
                "baselines": self.baselines,
                "before": _examination(self.before),
                "repair": _repair(self.repair),
                "after": _examination(self.after) if self.after else None,
                "fold": self._fold(),
                "proved": self.proved,
                "notes": list(self.notes),
            }
        )
        return found

    def _fold(self) -> dict[str, Any] | None:
        report = self.folded
        if report is None:
            return None
        error, bound = report.error, report.bound
        return {
            "done": _items(report.done),
            "refused": _items(report.refused),
            "error": error,
            "bound": bound,
            "ratio": error / bound if error is not None and bound else None,
            "model_error": getattr(report, "model_error", None),
            "model_bound": getattr(report, "model_bound", None),
            "proved": False if report.failed else True if report.done else None,
            "notes": report.notes,
        }


def run(
    case: Case,
    *,
    target: str,
    fix: bool = False,
    folding: bool = True,
    judge_on: Any = None,
    baselines: dict[str, float] | None = None,
    progress: Progress | None = None,
) -> Checkup:
    """Examine a case; repair and examine again if `fix`; fold a copy and prove it equal if `folding`.

    With `fix` the model of the case is changed in place: statistics that are found wrong are recalibrated
    where there are data and debiased where there are none, never both; dead biases are stripped.

    Args:
        case: what to examine.
        target: what it is called in the report.
        fix: repair what can be repaired.
        folding: fold and prove; needs data.
        judge_on: data to measure the loss on, where they are others than the case's.
        baselines: losses to compare with.
        progress: `progress(what, done, of)`.
    """
    data = cases.replayable(cases.data_of(case))

    def look(channels: dict[str, int] | None = None) -> Examination:
        return examine(
            case.model,
            data,
            loss=case.loss,
            call=case.call,
            optimizer=case.optimizer,
            judge_on=judge_on,
            channels=channels,
            progress=progress,
        )

    parameters = sum(p.numel() for p in case.model.parameters())
    before = look()
    repair = _fix(case, data, before, progress) if fix else None
    shown = {site.where: site.sample.channel for site in before.sites if site.sample}
    after = look(shown) if fix else None  # the same channels, so that the pictures compare
    folded, notes, unproved = _folded(case, data) if folding else (None, (), False)
    return Checkup(target, case, before, repair, after, folded, baselines, notes, parameters, unproved)


def embedded(seed: int = 0, progress: Progress | None = None) -> tuple[Case, dict[str, Any]]:
    """The embedded example, trained now, as a case, and the further arguments that `run` takes for it."""

    def step(done: int, of: int) -> None:
        if progress:
            progress("training the example", done, of)

    trained = example.train(seed, step)
    case = Case(trained.model, trained.batches, loss=example.loss, optimizer=trained.optimizer)
    baselines = {"uniform": trained.uniform, "bigram": trained.bigram}
    return case, {"target": "the embedded example", "judge_on": trained.held_out, "baselines": baselines}


def _fix(case: Case, data: Any, before: Examination, progress: Progress | None) -> Repair:
    done: list[tuple[str, Item]] = []
    refused: list[tuple[str, Item]] = []

    failed = False

    def take(what: str, report: Report) -> None:
        nonlocal failed
        done.extend((what, item) for item in report.done)
        refused.extend((what, item) for item in report.refused)
        failed = failed or bool(report.failed)

    def attempt(what: str, repair: Callable[[], Report]) -> None:
        try:
            take(what, repair())
        except NormalcyError as error:
            refused.append((what, Item("the whole model", str(error))))

    def strip() -> Report:
        batch = next(iter(cases.batches(data)))
        return strip_dead_bias(case.model, batch, optimizer=case.optimizer, call=case.call, inplace=True)

    if before.having(*STATISTICS):
        if data is not None:
            attempt("recalibrate", lambda: recalibrate(case.model, data, call=case.call, progress=progress))
        else:
            attempt("debias", lambda: debias(case.model))
    if before.having("dead-bias"):
        attempt("strip_dead_bias", strip)
    return Repair(tuple(done), tuple(refused), failed)


def _folded(case: Case, data: Any) -> tuple[Report | None, tuple[str, ...], bool]:
    """The report, or a sentence why there is none, and whether that is because nothing can be proved."""
    if data is None:
        return None, ("Nothing was folded: folding is proved on an example, and no data were given.",), False
    modes = [(module, module.training) for module in case.model.modules()]
    try:
        case.model.eval()
        return fold(case.model, next(iter(cases.batches(data))), call=case.call), (), False
    except NormalcyError as error:
        return None, (f"Nothing was folded: {error}",), isinstance(error, ProofError)
    finally:
        for module, mode in modes:
            module.training = mode


def _examination(found: Examination) -> dict[str, Any]:
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
        "unrecognized": _items(found.unrecognized),
        "not_seen": _items(found.not_seen),
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
        "warmup": _warmup(site),
    }


def _warmup(site: Examined, points: int = 60) -> list[dict[str, float]] | None:
    """The curve (1 − m)ᵏ, until past 1 % and past where the layer stands."""
    momentum = site.momentum
    if not momentum or momentum >= 1 or site.updates is None:
        return None
    to_one_percent = math.ceil(math.log(0.01) / math.log1p(-momentum))
    end = max(round(1.2 * to_one_percent), min(site.updates, warm_count(momentum)))
    ks = sorted({round(end * i / (points - 1)) for i in range(points)})
    return [{"updates": k, "weight_left": weight_left(momentum, k)} for k in ks]


def _repair(repair: Repair | None) -> dict[str, Any] | None:
    if repair is None:
        return None
    return {
        "done": [{"what": what, "where": item.where, "why": item.why} for what, item in repair.done],
        "refused": [{"what": what, "where": item.where, "why": item.why} for what, item in repair.refused],
    }


def _items(items: Any) -> list[dict[str, str]]:
    return [{"where": item.where, "why": item.why} for item in items]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _own_version() -> str:
    try:
        return version("normalcy")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
