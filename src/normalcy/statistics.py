"""Where statistics come from, and how running ones are updated.

Running values are averages of finished means and variances, never of standard deviations, and are no
monoid: what pools is `Moments`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normalcy import masks
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

    def update(self, moments: Moments) -> None:
        """Take in the moments of one batch: shape (channels,), or (examples, channels) to average over.

        A channel without values keeps its statistics, and without any value nothing is counted. Inside a
        backward pass nothing is updated either, so that activation checkpointing, which runs a forward
        pass twice, counts once. What is read back to the host is
        whether a mask treats channels unevenly, and only where one counter has to describe them all.

        Under a compiler this is the operator `normalcy::update_running`, which decides when it runs.
        """
        pooled = self.momentum is None and self.convention.cumulative == "values"
        if pooled and self.values is None:
            raise ArgumentError("pooled running statistics without a count of values", "a `values` tensor")
        if self.batches is None and (self.convention.debias or (self.momentum is None and not pooled)):
            raise ArgumentError(
                "running statistics without a count of batches", "num_batches_tracked, for such an average"
            )
        if _batched(moments.mean) and not _batched(self.mean):
            raise ArgumentError(
                "torch.vmap over the batches of one layer with running statistics",
                "statistics for each batch, or none",
                "give the buffers to torch.func.functional_call too, or use track_running_stats=False",
            )
        update = torch.ops.normalcy.update_running if torch.compiler.is_compiling() else _update
        update(
            *(self.mean, self.var, self.batches, self.values if pooled else None),
            *(moments.count, moments.mean, moments.m2),
            *(self.momentum, self.convention.correction, self.convention.debias),
        )

    def weight_for_pytorch(self) -> float | None:
        """The weight of the new value at this update, where PyTorch's own operator would make the same one.

        0 inside a backward pass, where nothing is to be updated; None where PyTorch cannot.
        """
        pooled = self.momentum is None and self.convention.cumulative == "values"
        if pooled or self.convention.correction != TORCH.correction:
            return None
        if torch.compiler.is_compiling():
            return None if self.momentum is None or self.convention.debias else self.momentum
        if _recomputing():
            return 0.0
        if self.batches is None or self.batches.is_meta:
            return self.momentum
        k = 0 if self.momentum is not None and not self.convention.debias else int(self.batches) + 1
        return weight_of_new(self.momentum, k, debias=self.convention.debias)

    def count_one(self) -> None:
        """Count an update that PyTorch's own operator has made."""
        if self.batches is not None and (torch.compiler.is_compiling() or not _recomputing()):
            self.batches.add_(1)


def _batched(t: Tensor) -> bool:
    """Whether `torch.vmap` stands for many of this tensor."""
    many: bool = torch._C._functorch.is_batchedtensor(t)  # noqa: SLF001 - no public name
    return many


def _recomputing() -> bool:
    """Whether this runs inside a backward pass, as a checkpointed forward pass does the second time."""
    inside: bool = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public name
    return inside


@torch.no_grad()
def _update(
    mean: Tensor,
    var: Tensor,
    batches: Tensor | None,
    values: Tensor | None,
    count: Tensor,
    new_mean: Tensor,
    m2: Tensor,
    momentum: float | None,
    correction: int,
    debias: bool,
) -> None:
    if _recomputing() or not count.numel():
        return
    new = Moments(count, new_mean, m2)
    if values is not None:
        after = _pooled(mean, var, values, new, correction)
    else:
        weight = _weight(momentum, batches, debias=debias)
        after = _blended(mean, var, new, correction, weight)
    # Everything is computed before anything is changed, and the counter last.
    mean.copy_(after[0])
    var.copy_(after[1])
    if values is not None:
        values.add_(count.max().to(values.dtype))
    if batches is not None:
        batches.add_((count > (0 if values is not None else correction)).any())  # what was taken in


def _weight(momentum: float | None, batches: Tensor | None, *, debias: bool) -> float | Tensor:
    """`weight_of_new` at the number of this update, as a tensor where it depends on that."""
    if momentum is not None and not (debias and 0 < momentum < 1):
        return momentum
    if batches is None:
        raise ArgumentError("running statistics without a count of batches", "num_batches_tracked")
    k = batches.double() + 1
    if momentum is None:
        return 1 / k
    return (momentum / -torch.expm1(k * math.log1p(-momentum))).clamp(max=1)


def _blended(
    mean: Tensor, var: Tensor, new: Moments, correction: int, weight: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(1 − w)·kept + w·new in float64; w = 1 forgets what was kept, even a NaN."""
    known = new.count > correction
    fresh = (new.mean, new.var(correction))
    if known.dim() > 1:  # the examples' own statistics, averaged over those that have any
        examples = known.sum(0).clamp(min=1)
        fresh = tuple(torch.where(known, f, 0.0).sum(0) / examples for f in fresh)  # type: ignore[assignment]
        known = known.any(0)
    if isinstance(weight, Tensor):
        _as_many_batches(known)
    after = []
    for kept, f in zip((mean, var), fresh, strict=True):
        wide = kept.double()
        blend = (1 - weight) * wide + weight * f
        whole = (
            torch.where(weight == 1, f, blend) if isinstance(weight, Tensor) else f if weight == 1 else blend
        )
        after.append(torch.where(known, whole, wide))
    return after[0], after[1]


def _as_many_batches(known: Tensor) -> None:
    """One counter serves all channels, so all of them take a batch in, or none does."""
    if masks.has_values(known) and not _batched(known) and bool((known != known.any()).any()):
        raise ArgumentError(
            "a mask that leaves some channels no values, with statistics whose weight depends on the count",
            "values in every channel, or in none",
            "use a momentum without debias, or a mask that is the same for all channels",
        )


def _pooled(
    mean: Tensor, var: Tensor, values: Tensor, new: Moments, correction: int
) -> tuple[Tensor, Tensor]:
    """Merge with what was pooled so far, whose M2 follows from the stored variance and the count."""
    if bool((new.count != new.count.max()).any()):
        raise ArgumentError(
            "a mask that leaves some channels more values than others, with statistics pooled by values",
            "as many valid values in every channel",
            'use cumulative="batches", or a mask that is the same for all channels',
        )
    seen = values.double()
    # before the first batch count is 0, and what the buffers hold then is nobody's variance
    freedom = (seen - correction).clamp(min=0)
    known = seen > 0
    before = Moments(
        seen.expand_as(mean),
        torch.where(known, mean.double(), 0.0),
        torch.where(known, var.double() * freedom, 0.0),
    )
    whole = before + new
    has = whole.count > correction
    return torch.where(has, whole.mean, mean.double()), torch.where(has, whole.var(correction), var.double())


torch.library.define(
    "normalcy::update_running",
    "(Tensor(a!) mean, Tensor(b!) var, Tensor(c!)? batches, Tensor(d!)? values, Tensor count, "
    "Tensor new_mean, Tensor m2, float? momentum, int correction, bool debias) -> ()",
)
torch.library.impl("normalcy::update_running", "CompositeExplicitAutograd")(_update)


@torch.library.register_fake("normalcy::update_running")  # type: ignore[untyped-decorator]
def _nothing_returned(*_: object) -> None:
    """The shapes of what comes out: nothing does."""


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
        return min(1.0, momentum / -math.expm1(k * math.log1p(-momentum)))  # 1 − (1 − m)ᵏ, uncancelled
    return momentum


def weight_left(momentum: float, k: int) -> float:
    """(1 − m)ᵏ: what the initial state still weighs after k updates with weight m for the new value.

    Example:
        >>> round(weight_left(0.001, 300), 4)
        0.7407
    """
    return float((1 - momentum) ** k)


def updates_until(left: float, momentum: float) -> int | None:
    """After how many updates the initial state weighs at most `left`; None: never, or at once.

    Example:
        >>> updates_until(0.01, 0.001), updates_until(0.01, 1.0)
        (4603, None)
    """
    return math.ceil(math.log(left) / math.log1p(-momentum)) if 0 < momentum < 1 else None


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
