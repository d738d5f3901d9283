"""What measuring gives: moments of a norm's input, the gap between its two sources, values to look at.

Not for measuring itself, and no judgement: a rule decides what is too much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normalcy.moments import Moments

_NAMED = 5


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one norm was given, over all batches.

    Attributes:
        actual: moments of its input, one entry per channel, pooled over batches and calls.
        examples: moments of each example's mean; the places of one example are no independent values.
        calls: how many calls were pooled.
    """

    actual: Moments
    examples: Moments
    calls: int

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.actual + other.actual, self.examples + other.examples, self.calls + other.calls)

    @property
    def standard_error(self) -> float:
        """How far the mean is off by chance, in standard deviations: √(var of examples/N/var) over channels.

        Between 1/√(values), where places are as different as examples, and 1/√N, where they are alike.
        """
        var, between = self.actual.var(), self.examples.var(1)
        share = torch.where(var > 0, between / var, 0.0).nan_to_num(nan=1.0).clamp(max=1.0)
        return float((share / self.examples.count.clamp(min=1)).mean().sqrt())


@dataclass(frozen=True, slots=True)
class Skipped:
    """A batch that was left out, because a norm would compute a statistic from one value in it.

    Attributes:
        batch: its number; the first one is 1.
        why: which norm, and the shape that it got.
    """

    batch: int
    why: str


class Measurements(dict[str, Measured]):
    """What each norm was given, by its path, and the batches that are not in it.

    Attributes:
        skipped: batches in which a norm would compute a statistic from one value, in their order.
        batches: how many batches there were, with those.
    """

    def __init__(self, norms: Mapping[str, Measured], skipped: Sequence[Skipped], batches: int) -> None:
        super().__init__(norms)
        self.skipped, self.batches = tuple(skipped), batches

    def left_out(self) -> str:
        """A sentence on the batches that were skipped; "" where there are none.

        Example:
            >>> Measurements({}, [Skipped(4, "bn gets one value per channel: shape (1, 8)")], 4).left_out()
            'left out of 4 batches: number 4, since bn gets one value per channel: shape (1, 8)'
        """
        if not self.skipped:
            return ""
        numbers = ", ".join(str(each.batch) for each in self.skipped[:_NAMED])
        more = f" and {len(self.skipped) - _NAMED} more" if len(self.skipped) > _NAMED else ""
        number = "number" if len(self.skipped) == 1 else "numbers"
        total = f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
        return f"left out of {total}: {number} {numbers}{more}, since {self.skipped[0].why}"


@dataclass(frozen=True, slots=True)
class Gap:
    """How far evaluation is from training on the same input, for one norm, of the normalized value.

    In standard deviations of the data, from the moments alone and therefore without a second pass:

        gap² = var·(1/√(stored_var + eps) − 1/√(var + eps))² + (mean − stored_mean)²/(stored_var + eps)

    Attributes:
        rms: over all channels.
        worst: of the channel where it is largest.
        channel: which channel that is.
        mean_shift: the largest |mean − stored_mean| in standard deviations of the data.
        var_ratio: stored variance over actual variance in the worst channel.
    """

    rms: float
    worst: float
    channel: int
    mean_shift: float
    var_ratio: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one channel, before γ and β: as they came in, and normalized with either source."""

    channel: int
    before: tuple[float, ...]
    stored: tuple[float, ...]
    batch: tuple[float, ...]

    def shape(self) -> dict[str, tuple[float | None, float | None]]:
        """Skewness and kurtosis of each; equal up to rounding, as normalizing keeps the shape."""
        return {name: _shape(getattr(self, name)) for name in ("before", "stored", "batch")}


def gap(actual: Moments, stored_mean: Tensor, stored_var: Tensor, eps: float) -> Gap:
    """The train/eval gap of a norm with these stored statistics on data with these moments.

    Example:
        >>> data = Moments.of(torch.tensor([[8.0], [10.0], [12.0]]), dim=0)
        >>> round(gap(data, torch.tensor([10.0]), data.var(), 1e-5).rms, 6)
        0.0
        >>> round(gap(data, torch.tensor([0.0]), torch.tensor([1.0]), 0.0).mean_shift, 3)
        6.124
    """
    mean, var = actual.mean, actual.var()
    stored_mean, stored_var = stored_mean.double(), stored_var.double()
    ours, theirs = (stored_var + eps).rsqrt(), (var + eps).rsqrt()
    squared = var * (ours - theirs).square() + ((mean - stored_mean) * ours).square()
    squared = squared.nan_to_num(nan=torch.inf)
    channel = int(squared.argmax())
    shift = (mean - stored_mean).abs() * theirs
    return Gap(
        rms=float(squared.mean().sqrt()),
        worst=float(squared[channel].sqrt()),
        channel=channel,
        mean_shift=float(shift.nan_to_num(nan=torch.inf).max()),
        var_ratio=float(stored_var[channel] / var[channel]),
    )


def _shape(values: tuple[float, ...]) -> tuple[float | None, float | None]:
    """E[d³]/var^1.5 and E[d⁴]/var²; None where the values do not vary or are not finite."""
    x = torch.tensor(values, dtype=torch.float64)
    moments = Moments.of(x)
    d, var = x - moments.mean, float(moments.var())
    if not var > 0 or not math.isfinite(var):
        return None, None
    return float((d**3).mean()) / var**1.5, float((d**4).mean()) / var**2
