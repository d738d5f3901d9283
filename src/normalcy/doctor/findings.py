"""What an examination results in, as values.

No rule and no rendering here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from normalcy.measure import Gap, Sample
from normalcy.neighbours import Neighbours
from normalcy.report import Item

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
"""From mild to severe."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        code: a slug, stable between versions.
        title: the fault in a few words.
        severity: "error": results are wrong now; "warning": they probably will be; "note".
        where: the module's path, or what else it is about.
        evidence: names and numbers that were read or measured.
        cause: how it comes about.
        remedy: what to do.
    """

    code: str
    title: str
    severity: Severity
    where: str
    evidence: dict[str, float | int | str]
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Loss:
    """The same data's loss with stored statistics, and with each batch's own."""

    eval: float
    batch: float


@dataclass(frozen=True, slots=True)
class Examined:
    """One norm as it was found.

    Attributes:
        where: the module's path, or "PATH: batch_norm" for a functional one.
        kind: "batch", "layer", "group", "instance" or "rms".
        cls: its class, or its function.
        channels: how many values γ and β have; None where that is not known.
        mode: "train" or "eval"; None for a functional one.
        momentum: the weight of the new value; None: cumulative, or no running statistics.
        eps: None for a functional one.
        updates: how many batches its running statistics took in; None: not counted.
        weight_left: what the initial state still weighs in them, (1 − momentum)^updates.
        calls: how often it ran in one forward pass; None: no pass was recorded.
        values: the fewest values that shared one statistic; None: no pass was recorded.
        gap: the train/eval gap; None where nothing was measured.
        sample: values of its worst channel; None where nothing was measured.
        neighbours: how much one example's x̂ varies with its neighbours; None where nothing was measured.
    """

    where: str
    kind: str
    cls: str
    channels: int | None
    mode: str | None
    momentum: float | None
    eps: float | None
    updates: int | None
    weight_left: float | None
    calls: int | None
    values: int | None
    gap: Gap | None = None
    sample: Sample | None = None
    neighbours: Neighbours | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of `examine`.

    Attributes:
        findings: most severe first.
        sites: every known norm.
        unrecognized: what looks like a normalizer and is none that is known.
        not_seen: what the recorded pass did not reach, or could not look into.
        loss: where a loss was given.
        notes: what could not be examined, and why.
    """

    findings: tuple[Finding, ...]
    sites: tuple[Examined, ...]
    unrecognized: tuple[Item, ...] = ()
    not_seen: tuple[Item, ...] = ()
    loss: Loss | None = None
    notes: tuple[str, ...] = field(default=())

    def worst(self) -> Severity | None:
        """The severity of the most severe finding; None where there is none."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default=None)

    def having(self, *codes: str) -> tuple[Finding, ...]:
        """The findings with one of these codes."""
        return tuple(finding for finding in self.findings if finding.code in codes)

    def __getitem__(self, where: str) -> Examined:
        """The norm at this place."""
        found: dict[str, Any] = {site.where: site for site in self.sites}
        examined: Examined = found[where]
        return examined
