"""What a comparison of variants results in, and what may be claimed from it.

Nothing is trained here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from normalcy import __version__
from normalcy.doctor import Finding
from normalcy.doctor.findings import SEVERITIES
from normalcy.example import BATCH_SIZE
from normalcy.neighbours import Neighbours
from normalcy.variants.training import MOMENTUM, WEIGHT_DECAY, Variant

NOISY = 0.4
"""Noise of x̂ from which a finding is made: √(1.5/n) reaches it at 9 examples. Wu & He (Group Normalization,
arXiv:1803.08494, figure 1) saw batch norm's error rise on images between 16 and 8 examples a worker."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be claimed of one variant against the one without a norm.

    Attributes:
        difference: mean loss minus the other's mean loss.
        differences: the same for each seed.
        spread: the larger of the two spreads between seeds, largest minus smallest loss.
        claim: "lower" or "higher": the means differ by more than the spread and each seed says the same;
            else "within".
    """

    difference: float
    differences: tuple[float, ...]
    spread: float
    claim: str

    def as_dict(self, name: str) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "difference": _number(self.difference),
            "differences": [_number(difference) for difference in self.differences],
            "spread": _number(self.spread),
            "claim": self.claim,
            "sentence": self.sentence(name),
        }

    def sentence(self, name: str) -> str:
        """The claim in words."""
        if not math.isfinite(self.difference):
            return f"{name}: a training diverged at every rate; nothing can be compared."
        side = "below" if self.difference < 0 else "above"
        agree = len({difference > 0 for difference in self.differences}) == 1
        by = f"{name}: {abs(self.difference):.4f} {side} none on average{' and on every seed' * agree}"
        if self.claim == "within":
            few = abs(self.difference) <= self.spread
            why = f"{'but ' * agree}within the spread between seeds" if few else "but the seeds disagree"
            return f"{by}, {why} ({self.spread:.4f}): no difference can be claimed."
        does = "it helps here" if self.claim == "lower" else "it hurts here"
        return f"{by}, by more than the spread between seeds ({self.spread:.4f}): {does}."


@dataclass(frozen=True, slots=True)
class OnBatches:
    """What only batch norm has: two sources of statistics, and neighbours.

    Attributes:
        stored: mean held-out loss with the running statistics, as evaluation has it.
        batch: with each batch's own, in batches of the training's size.
        pooled: in evaluation, after the statistics were pooled over training data.
        neighbours: the noise of each norm, by path.
    """

    stored: float
    batch: float
    pooled: float
    neighbours: dict[str, Neighbours]

    @property
    def noise(self) -> float:
        """The largest noise of a layer in batches of the training's size."""
        return max((found.here.total for found in self.neighbours.values()), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "stored": _number(self.stored),
            "batch": _number(self.batch),
            "pooled": _number(self.pooled),
            "gap": _number(self.stored - self.batch),
            "noise": self.noise,
            "neighbours": [{"where": where, **one.as_dict()} for where, one in self.neighbours.items()],
        }


@dataclass(frozen=True, slots=True)
class Result:
    """One variant over all seeds.

    Attributes:
        variant: which.
        parameters: how many it has.
        rate: the learning rate with the lowest mean loss on the validation names.
        validation: that loss for each rate.
        losses: held-out loss for each seed, at that rate, in nats per character.
        against: what may be claimed against none; None for none itself.
        on_batches: for batch norm; else None.
    """

    variant: Variant
    parameters: int
    rate: float
    validation: dict[float, float]
    losses: tuple[float, ...]
    against: Verdict | None = None
    on_batches: OnBatches | None = None

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.losses)

    @property
    def spread(self) -> float:
        """Largest minus smallest over seeds."""
        return max(self.losses) - min(self.losses)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        name = self.variant.name
        return {
            "name": name,
            "norm": self.variant.norm,
            "place": None if self.variant.norm == "none" else self.variant.place,
            "parameters": self.parameters,
            "rate": self.rate,
            "validation": [{"rate": rate, "loss": _number(loss)} for rate, loss in self.validation.items()],
            "losses": [_number(loss) for loss in self.losses],
            "mean": _number(self.mean),
            "spread": _number(self.spread),
            "against_none": self.against.as_dict(name) if self.against else None,
            "batch_norm": self.on_batches.as_dict() if self.on_batches else None,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All variants, `none` first, under one recipe.

    Attributes:
        results: in the order asked for.
        batch: examples in a batch.
        steps: training steps of each.
        seeds: of the initial weights and of the batches.
        rates: learning rates tried.
        windows: how many windows were trained on, chosen by and held out.
        baselines: losses to compare with.
        findings: where batch norm had too few values.
    """

    results: tuple[Result, ...]
    batch: int
    steps: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    windows: tuple[int, int, int]
    baselines: dict[str, float]
    findings: tuple[Finding, ...]

    @property
    def proved(self) -> None:
        """Nothing is proved here."""
        return None

    def worst(self) -> str | None:
        """The severity of the most severe finding."""
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON; numbers that are not finite as words."""
        return {
            "normalcy": __version__,
            "torch": torch.__version__,
            "target": "variants of the embedded example",
            "recipe": {
                "batch": self.batch,
                "steps": self.steps,
                "seeds": list(self.seeds),
                "rates": list(self.rates),
                "momentum": MOMENTUM,
                "weight_decay": WEIGHT_DECAY,
                "windows": dict(zip(("train", "validation", "held_out"), self.windows, strict=True)),
            },
            "baselines": self.baselines,
            "variants": [result.as_dict() for result in self.results],
            "findings": [asdict(finding) for finding in self.findings],
        }


def verdict(losses: Sequence[float], none: Sequence[float]) -> Verdict:
    """What the losses of a variant and of none, seed by seed, allow to claim.

    A difference is claimed where the means are further apart than either spread (largest minus smallest) and
    each seed has it on the same side. Of six losses drawn from one Gaussian that happens in 5 of 100.

    Example:
        >>> verdict([2.20, 2.21, 2.22], [2.30, 2.31, 2.33]).claim
        'lower'
        >>> verdict([2.20, 2.21, 2.29], [2.21, 2.22, 2.28]).claim
        'within'
    """
    each = tuple(a - b for a, b in zip(losses, none, strict=True))
    difference = fmean(losses) - fmean(none)
    spread = max(max(values) - min(values) for values in (losses, none))
    agree = all(d < 0 for d in each) or all(d > 0 for d in each)
    clear = agree and abs(difference) > spread and math.isfinite(difference)
    return Verdict(
        difference, each, spread, "within" if not clear else "lower" if difference < 0 else "higher"
    )


def too_few_values(result: Result, batch: int) -> list[Finding]:
    """A finding where neighbours make x̂ vary by more than NOISY in batches of this size."""
    found = result.on_batches
    if found is None or found.noise <= NOISY:
        return []
    many = [p.total for one in found.neighbours.values() for p in one.curve if p.batch == BATCH_SIZE]
    return [
        Finding(
            code="too-few-values",
            title="Too few values for each of batch norm's statistics",
            severity="warning",
            where=result.variant.name,
            evidence={
                "values for each statistic": batch,
                f"noise of x̂ at batch {batch}": found.noise,
                f"noise of x̂ at batch {BATCH_SIZE}": max(many),
                "held-out loss, stored statistics": found.stored,
                "held-out loss, each batch's own statistics": found.batch,
                "held-out loss, pooled statistics": found.pooled,
            },
            cause=_cause(batch),
            remedy="Use layer, group or RMS norm, whose statistics are each example's own whatever the "
            "batch; or larger batches (well above a few, the noise falls with the root of their size). "
            "Recalibration mends stored statistics, not what the weights learned from noise.",
        )
    ]


def _cause(batch: int) -> str:
    if batch == 2:
        return (
            "With two values in each channel, x̂ is −1 or 1 (up to eps): all that is left of a value is which "
            "of the two was larger, and that depends on the neighbour."
        )
    return (
        f"Mean and variance of {batch} values are themselves random: an example's x̂ in training depends on "
        "which neighbours it happens to have, and in evaluation on none."
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
