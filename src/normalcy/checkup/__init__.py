"""The main job: examine, repair, examine again, fold, prove; as one value that can be printed or drawn.

Composed from `doctor` and `surgery`. It prints nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normalcy import __version__, example
from normalcy import case as cases
from normalcy.case import Case
from normalcy.checkup import spelling
from normalcy.checkup.spelling import Repair
from normalcy.doctor import Examination, examine
from normalcy.errors import NormalcyError, ProofError
from normalcy.measure import Progress
from normalcy.report import Item, Report
from normalcy.surgery import debias, fold, recalibrate, strip_dead_bias

__all__ = ["STATISTICS", "Checkup", "Repair", "embedded", "run"]

STATISTICS = (
    "initial-statistics",
    "unwarmed-statistics",
    "stale-statistics",
    "non-finite-statistics",
    "negative-variance",
)
"""The findings that recalibration cures."""


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
        stripped: a zero tensor for each bias that the repair took out, under its name.
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
    stripped: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def proved(self) -> bool | None:
        """False if any proof failed (what failed was taken back), True if one held, else None."""
        if self.unproved or (self.folded and self.folded.failed) or (self.repair and self.repair.failed):
            return False
        return True if self.folded and self.folded.done else None

    def state(self) -> dict[str, torch.Tensor]:
        """The repaired model's state dict, with a zero for each bias that was stripped.

        A zero bias is no bias, so that this loads into the model as it was built before.
        """
        return {**self.case.model.state_dict(), **self.stripped}

    def worst(self) -> str | None:
        """The severity of the most severe finding that remains."""
        return (self.after or self.before).worst()

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON; numbers that are not finite as words."""
        model = self.case.model
        found: dict[str, Any] = spelling.plain(
            {
                "normalcy": __version__,
                "torch": torch.__version__,
                "target": self.target,
                "model": {
                    "class": type(model).__name__,
                    "parameters": self.parameters,
                    "norms": len(self.before.sites),
                },
                "baselines": self.baselines,
                "before": spelling.examination(self.before),
                "repair": spelling.repair(self.repair),
                "after": spelling.examination(self.after) if self.after else None,
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
            "done": spelling.items(report.done),
            "refused": spelling.items(report.refused),
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

    With `fix` the model of the case is changed in place: norms left in training mode evaluate like their
    model; statistics that are found wrong are recalibrated where there are data and debiased where there are
    none, never both; dead biases are stripped.

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

    parameters, held = sum(p.numel() for p in case.model.parameters()), case.model.state_dict()
    before = look()
    repair = _fix(case, data, before, progress) if fix else None
    shown = {site.where: site.sample.channel for site in before.sites if site.sample}
    after = look(shown) if fix else None  # the same channels, so that the pictures compare
    folded, notes, unproved = _folded(case, data) if folding else (None, (), False)
    left = case.model.state_dict().keys()
    stripped = {name: torch.zeros_like(value) for name, value in held.items() if name not in left}
    notes = (*(repair.notes if repair else ()), *notes)
    return Checkup(
        target, case, before, repair, after, folded, baselines, notes, parameters, unproved, stripped
    )


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
    notes: list[str] = []
    failed = False

    def take(what: str, report: Report) -> None:
        nonlocal failed
        done.extend((what, item) for item in report.done)
        refused.extend((what, item) for item in report.refused)
        notes.extend(f"{what.replace('_', ' ')}: {note}" for note in report.notes)
        failed = failed or bool(report.failed)

    def attempt(what: str, repair: Callable[[], Report]) -> None:
        try:
            take(what, repair())
        except NormalcyError as error:
            refused.append((what, Item("the whole model", str(error))))

    def strip() -> Report:
        batch = next(iter(cases.batches(data)))
        return strip_dead_bias(case.model, batch, optimizer=case.optimizer, call=case.call, inplace=True)

    if before.having("wrong-mode"):
        take("set_mode", _modes(case.model, before))
    if before.having(*STATISTICS):
        if data is not None:
            attempt("recalibrate", lambda: recalibrate(case.model, data, call=case.call, progress=progress))
        else:
            attempt("debias", lambda: debias(case.model))
    if before.having("dead-bias"):
        attempt("strip_dead_bias", strip)
    return Repair(tuple(done), tuple(refused), failed, tuple(notes))


def _modes(model: nn.Module, before: Examination) -> Report:
    """Norms that train in a model that evaluates are made to evaluate; the other way round may be meant."""
    report = Report(model)
    for finding in before.having("wrong-mode"):
        norm = model.get_submodule(finding.where)
        if model.training:
            why = "it may be frozen on purpose; if it is not, call model.train()"
            report.refused.append(Item(finding.where, why))
            continue
        norm.eval()
        why = "in evaluation mode now, like the model; a saved state dict holds no modes"
        report.done.append(Item(finding.where, why))
    return report


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
