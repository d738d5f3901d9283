"""Where statistics come from, and how running ones are updated.

Running values are averages of finished means and variances, never of standard deviations, and are no
monoid: what pools is `Moments`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normalcy.conventions import TORCH, Convention
from normalcy.errors import ArgumentError
from normalcy.moments import Moments


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Running statistics as buffers, and the rule that updates them.

        running ← running + w·(new − running),   w = weight of the new value at the k-th update

    | rule | w at update k | stored variance |
    |---|---|---|
    | exponential | m | of the batch |
    | debiased | m/(1 − (1−m)ᵏ) | of the batch |
    | cumulative, by batches | 1/k | of the batch: a mean of variances |
    | cumulative, by values | n/(values so far) | pooled: the spread between batches is added |

    "Of the batch" is unbiased or biased as the convention stores it.

    Attributes:
        mean, var: buffers, changed in place; shape (channels,), any floating dtype.
        batches: how many updates there were, an integer tensor; None: not counted.
        momentum: the weight of the new value; None: cumulative.
        convention: the rest of the rule.
        values: how many values per channel were pooled; only for cumulative averages by values.

    Example:
        >>> kept = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), momentum=0.1)
        >>> kept.update(Moments.of(torch.tensor([[2.0], [4.0], [6.0], [8.0]]), dim=0))
        >>> kept.mean, kept.var, kept.batches
        (tensor([0.5000]), tensor([1.5667]), tensor(1))
    """

    mean: Tensor
    var: Tensor
    batches: Tensor | None = None
    momentum: float | None = 0.1
    convention: Convention = TORCH
    values: Tensor | None = None

    @torch.no_grad()
    def update(self, moments: Moments) -> None:
        """Take in the moments of one batch: shape (channels,), or (examples, channels) to average over.

        No values are no update: neither statistics nor counter change. Inside a backward pass nothing
        is updated either, so that activation checkpointing, which runs a forward pass twice, counts once.
        """
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - no public name
            return
        if moments.count.is_meta:
            return
        if not moments.count.numel() or not bool(moments.count.max() > 0):
            return
        if self.momentum is None and self.convention.cumulative == "values":
            self._pool(moments)
        else:
            k = self._number()
            weight = weight_of_new(self.momentum, k, debias=self.convention.debias)
            var = _over_examples(moments.var(self.convention.correction))
            _blend(self.mean, _over_examples(moments.mean), weight)
            _blend(self.var, var, weight)
        if self.batches is not None:  # last, so that a failure has counted nothing
            self.batches.add_(1)

    def _number(self) -> int:
        """Which update this is, counted from 1; 0 where the rule does not depend on it."""
        if self.momentum is not None and not self.convention.debias:
            return 0
        if self.batches is None:
            raise ArgumentError(
                "running statistics without a count of batches", "num_batches_tracked, for such an average"
            )
        return int(self.batches) + 1

    def _pool(self, moments: Moments) -> None:
        """Merge with what was pooled so far, whose M2 follows from the stored variance and the count."""
        if self.values is None:
            raise ArgumentError("pooled running statistics without a count of values", "a `values` tensor")
        seen = self.values.double()
        # before the first batch count is 0, and what the buffers hold then is nobody's variance
        freedom = (seen - self.convention.correction).clamp(min=0)
        known = seen > 0
        before = Moments(
            seen.expand_as(self.mean),
            torch.where(known, self.mean.double(), 0.0),
            torch.where(known, self.var.double() * freedom, 0.0),
        )
        whole = before + moments
        self.mean.copy_(whole.mean)
        self.var.copy_(whole.var(self.convention.correction))
        self.values.copy_(whole.count.max())


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Statistics are computed from the data, and recorded in `record` if there is one."""

    record: Running | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Statistics are the stored ones, constants to the input; shape (channels,)."""

    mean: Tensor
    var: Tensor


Source = Batch | Stored


def weight_of_new(momentum: float | None, k: int, *, debias: bool = False) -> float:
    """The weight of the new value at the k-th update (k = 1, 2, ...).

    Example:
        >>> weight_of_new(0.1, 5), weight_of_new(None, 5), weight_of_new(0.1, 1, debias=True)
        (0.1, 0.2, 1.0)
    """
    if momentum is None:
        return 1 / max(k, 1)
    if debias and 0 < momentum < 1:
        return min(1.0, momentum / (1 - weight_left(momentum, k)))
    return momentum


def weight_left(momentum: float, k: int) -> float:
    """(1 − m)ᵏ: what the initial state still weighs after k updates with weight m for the new value.

    Example:
        >>> round(weight_left(0.001, 300), 4)
        0.7407
    """
    return float((1 - momentum) ** k)


def warm_count(momentum: float) -> int:
    """The number of updates after which the initial state weighs less than float64 can tell from nothing.

    What a counter is set to where statistics no longer hold anything of the initial state.

    Example:
        >>> warm_count(0.1), weight_left(0.1, warm_count(0.1)) < 2**-53
        (349, True)
    """
    if momentum >= 1:
        return 1
    return math.floor(53 * math.log(2) / -math.log1p(-momentum)) + 1 if momentum > 0 else 0


def debiased(running: Tensor, initial: float, left: float) -> Tensor:
    """(running − left·initial)/(1 − left): the average of what was seen, without the initial state.

    Float64 in and out; `left` below 1.
    """
    return (running.double() - left * initial) / (1 - left)


def _over_examples(statistic: Tensor) -> Tensor:
    return statistic.mean(0) if statistic.dim() > 1 else statistic


def _blend(kept: Tensor, new: Tensor, weight: float) -> None:
    """(1 − w)·kept + w·new in float64, rounded once; w = 1 forgets what was kept, even a NaN."""
    new = new.double()
    kept.copy_(new if weight == 1 else (1 - weight) * kept.double() + weight * new)
