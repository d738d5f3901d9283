"""Rules on a checkpoint alone: what its statistics, γ and β say without a model and without data.

Not for a model: there momentum, eps and the gap on data are known, and other rules have the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import Finding, Severity
from normalcy.doctor.rules.base import Rule
from normalcy.doctor.rules.stored import WEIGHT_LEFT, NegativeVariance, NonFiniteStatistics, is_unwarmed
from normalcy.doctor.rules.wiring import UnrecognizedNorm
from normalcy.statistics import updates_until, weight_left

MOMENTA = (0.1, 0.01)
"""The weights of the new value for which the weight left is told: the default of PyTorch, and of Keras."""

# Higher than for a model, whose momentum is known and not assumed.
_CERTAIN_WEIGHT_LEFT = 0.5
# Channels that let less than a thousandth of a standard deviation through are dead or pruned.
_NO_SCALE = 1e-3


def weights_left(updates: int) -> dict[str, float]:
    """What the initial state weighs after `updates`, for each of `MOMENTA`.

    Example:
        >>> {name: round(left, 3) for name, left in weights_left(300).items()}
        {'weight_left_at_momentum_0.1': 0.0, 'weight_left_at_momentum_0.01': 0.049}
    """
    return {f"weight_left_at_momentum_{momentum:g}": weight_left(momentum, updates) for momentum in MOMENTA}


class NonFiniteScale(Rule):
    """NaN or infinity in γ or β."""

    code = "non-finite-parameters"
    title = "γ or β is not finite"
    cause = (
        "A step with a NaN or infinite gradient, or an overflow when the weights were cast to half precision."
    )
    remedy = "Go back to an earlier checkpoint; clip gradients or skip steps whose gradients are not finite."

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Counts the values."""
        for norm in evidence.norms:
            for name, tensor in (("weight", _scale(norm)), ("bias", _held(norm, "bias"))):
                if tensor is not None and not bool(tensor.isfinite().all()):
                    bad = ~tensor.isfinite().flatten()
                    numbers = {
                        "channels": int(bad.sum()),
                        "of": bad.numel(),
                        "first": int(bad.int().argmax()),
                    }
                    yield self.found(norm.where, {"tensor": name, **numbers})


class InitialInCheckpoint(Rule):
    """Mean exactly 0 and variance exactly 1 in every channel, weighed by what else the file says."""

    code = "initial-statistics"
    title = "Running statistics are at their initial values"
    cause = "Evaluation with this checkpoint normalizes with mean 0 and variance 1."
    remedy = "Load it, call normalcy.surgery.recalibrate(model, batches), and save it again."

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """An error where γ, β or the counter show training; a note where nothing in the file was trained."""
        tracked = [norm for norm in evidence.norms if norm.stored is not None]
        unseen = all(norm.initial and not norm.updates for norm in tracked)
        untrained = unseen and all(_as_built(norm) for norm in tracked)
        for norm in tracked:
            if norm.initial:
                severity, cause, remedy = self._judged(norm, untrained=untrained, unseen=unseen)
                numbers: dict[str, float | int | str | None] = {"updates": norm.updates}
                yield self.found(norm.where, numbers, severity=severity, cause=cause, remedy=remedy)

    def _judged(self, norm: Norm, *, untrained: bool, unseen: bool) -> tuple[Severity, str, str]:
        if norm.updates:
            return "error", f"{self.cause} {_NOTHING_MOVED.format(norm.updates)}", ""
        if untrained:
            return "note", _AS_BUILT, "Nothing needs to be done if it was saved before training."
        if _as_built(norm) is not False:
            return "warning", f"{self.cause} {_NOT_USED}", ""
        if norm.updates is None:
            return "warning", f"{self.cause} {_ABSORBED}", f"If it is not frozen on purpose: {self.remedy}"
        if unseen:
            return "warning", f"{self.cause} {_NEVER_RAN}", f"If it was trained: {self.remedy}"
        return "error", f"{self.cause} {_WITHOUT_BUFFERS}", ""


_NOTHING_MOVED = (
    "The counter says {} updates, yet nothing moved: momentum 0, statistics that were reset, or weights that "
    "were saved without their buffers."
)
_AS_BUILT = "No norm in this file has seen a batch, and γ is 1 (or 0) and β 0: all are as they were built."
_NEVER_RAN = (
    "No norm in this file has seen a batch, yet γ or β are not 1 and 0: it was initialized in its own way "
    "and never trained, or the weights were loaded or saved without their buffers."
)
_NOT_USED = (
    "No batch has passed in training mode: a part that is not used, a norm that stayed in evaluation mode, "
    "or weights that were loaded without their buffers."
)
_ABSORBED = (
    "γ and β were trained, and there is no counter: the statistics were multiplied into γ and β, as for a "
    "frozen norm, or they were lost in a conversion."
)
_WITHOUT_BUFFERS = (
    "γ and β were trained, and the counter is 0: the weights were loaded without the buffers, the buffers "
    "were reset, or the norm stayed in evaluation mode."
)


class UnwarmedInCheckpoint(Rule):
    """Weight left on the initial state at the momentum that is assumed."""

    code = "unwarmed-statistics"
    title = "Running statistics have not warmed up"
    cause = (
        "At the momentum that is assumed, a running average from 0 and 1 still holds (1 − momentum)^updates "
        "of that initial state. If momentum was None, or the statistics were computed anew, none is left."
    )
    remedy = (
        "Load it and call normalcy.surgery.recalibrate(model, batches), or without data "
        "normalcy.surgery.debias(model)."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """An error only where most of what is stored is the initial state."""
        weights = getattr(evidence.model, "weights", None)
        averaged = weights is not None and any(name.endswith("n_averaged") for name in weights.entries)
        for norm in evidence.norms:
            left, momentum = norm.weight_left, norm.momentum
            if not is_unwarmed(norm) or left is None or norm.updates is None or momentum is None:
                continue
            yield self.found(
                norm.where,
                {
                    "updates": norm.updates,
                    "momentum_assumed": momentum,
                    **weights_left(norm.updates),
                    "updates_for_1_percent": updates_until(WEIGHT_LEFT, momentum),
                },
                # an averaged model's statistics are computed anew, with momentum None
                severity="error" if left > _CERTAIN_WEIGHT_LEFT and not averaged else "warning",
            )


class EpsDecides(Rule):
    """Variances below eps, in channels whose γ lets them through."""

    code = "eps-decides"
    title = "Stored variances are smaller than eps"
    cause = (
        "Where the variance is below eps, eps and not the data sets the scale: the output varies by "
        "√(var/(var + eps)) of γ, and another eps (frameworks differ: 1e-5, 1e-3) gives another output. The "
        "values before the norm were scaled down, or channels are nearly constant."
    )
    remedy = (
        "Check that eps is that of training. If whole layers are so small, mend the scale of what feeds the "
        "norm, or use a smaller eps."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """A warning where most of the channels live below eps; dead ones are only counted, in a note."""
        for norm in evidence.norms:
            eps = getattr(norm.module, "eps", None)
            if norm.stored is None or eps is None:
                continue
            var = norm.stored[1].double()
            small = (var >= 0) & (var < eps)
            if not bool(small.any()):
                continue
            scale = _scale(norm)
            dead = (
                small & (scale.double().abs() < _NO_SCALE) if scale is not None else torch.zeros_like(small)
            )
            alive = small & ~dead
            numbers = {
                "channels": int(small.sum()),
                "of": small.numel(),
                "smallest": float(var[small].min()),
                "eps_assumed": float(eps),
                "passing_nothing": int(dead.sum()),
            }
            if bool(alive.any()):
                often = 2 * int(alive.sum()) >= alive.numel()
                first = {"first_channel": int(alive.int().argmax())}
                yield self.found(norm.where, {**numbers, **first}, severity="warning" if often else "note")
            else:
                yield self.found(
                    norm.where,
                    numbers,
                    severity="note",
                    cause=_DEAD,
                    remedy="Nothing needs to be done; such channels can be removed.",
                )


_DEAD = (
    "These channels are dead or pruned: what feeds them does not vary, and γ lets nothing of it through, so "
    "that eps decides nothing."
)


class ScaleNearZero(Rule):
    """γ so small that a channel lets nothing through."""

    code = "decayed-norm"
    title = "γ is near zero"
    cause = (
        "Weight decay on γ pulls it towards zero where little gradient holds against it. What the norm lets "
        "through shrinks with it, and half precision loses what is left."
    )
    remedy = (
        "Leave γ and β out of weight decay: give them a parameter group with weight_decay=0. If it is meant, "
        "nothing."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """A warning where most of a batch norm's γ shrank; what is exactly zero was set, not decayed."""
        for norm in evidence.norms:
            scale = _scale(norm)
            if scale is None or not bool(scale.isfinite().all()):
                continue
            size = scale.double().abs().flatten()
            near = size < _NO_SCALE
            if not bool(near.any()):
                continue
            zero, shrunk = int((size == 0).sum()), int((near & (size > 0)).sum())
            most = norm.stored is not None and 2 * shrunk >= size.numel()
            yield self.found(
                norm.where,
                {
                    "channels": int(near.sum()),
                    "of": size.numel(),
                    "exactly_zero": zero,
                    "median": float(size.median()),
                    "largest": float(size.max()),
                },
                severity="warning" if most else "note",
                cause=self.cause if shrunk else _SET_TO_ZERO,
                remedy=self.remedy if shrunk else "Nothing, if it was pruned or starts at zero on purpose.",
            )


_SET_TO_ZERO = (
    "It is exactly zero: pruned, started at zero (the last norm of a residual branch), or stored as what is "
    "added to 1, as some RMS norms do."
)


class NothingInCheckpoint(Rule):
    """A checkpoint in which no norm is found."""

    code = "no-norm"
    title = "There is nothing to examine"
    cause = (
        "No tensors of this file look like a norm's: there are no running statistics, no γ and β of one "
        "shape and no vector under a norm's name."
    )
    remedy = "If the model has norms, examine it as file.py:callable: that sees layers, not names."
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """At most one."""
        if not evidence.norms:
            yield self.found("the checkpoint", {})


STATE_RULES: tuple[Rule, ...] = (
    NonFiniteStatistics(),
    NonFiniteScale(),
    NegativeVariance(),
    InitialInCheckpoint(),
    UnwarmedInCheckpoint(),
    EpsDecides(),
    ScaleNearZero(),
    UnrecognizedNorm(),
    NothingInCheckpoint(),
)
"""In the order in which findings of one severity are reported."""


def _held(norm: Norm, name: str) -> Tensor | None:
    tensor = getattr(norm.module, name, None)
    return tensor if isinstance(tensor, Tensor) else None


def _scale(norm: Norm) -> Tensor | None:
    return _held(norm, "weight")


def _as_built(norm: Norm) -> bool | None:
    built: bool | None = getattr(norm.module, "as_built", None)
    return built
