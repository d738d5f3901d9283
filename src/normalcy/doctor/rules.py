"""The rules: each a small class that looks at the evidence and yields findings.

A rule's words stand beside what it looks for. Numbers it reports were read or measured, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import Finding, Severity
from normalcy.flow import Value

# Of the initial state, what may remain before a measured gap is put down to it.
_WEIGHT_LEFT = 0.01
# A gap of a tenth of a standard deviation moves outputs visibly; running averages of small batches wander
# by less: momentum 0.1 over batches of 64 values wanders by √(0.1/1.9/64) = 0.03.
_GAP = 0.1
_LARGE_GAP = 0.5
# The standard error of a mean of n values is 1/√n standard deviations: a quarter at 16.
_FEW_VALUES = 16
_RETRAIN = (
    "Train, load the checkpoint with its buffers, or build it with track_running_stats=False, which "
    "normalizes each example by itself in both modes."
)


class Rule:
    """One kind of fault. `check` yields a finding for each place where it stands."""

    code: ClassVar[str]
    title: ClassVar[str]
    cause: ClassVar[str]
    remedy: ClassVar[str]
    severity: ClassVar[Severity] = "error"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Yield what is found."""
        raise NotImplementedError

    def found(
        self,
        where: str,
        evidence: dict[str, float | int | str | None],
        *,
        severity: Severity | None = None,
        cause: str = "",
        remedy: str = "",
    ) -> Finding:
        """A finding of this rule; what is None is left out of the evidence."""
        numbers = {name: value for name, value in evidence.items() if value is not None}
        return Finding(
            self.code,
            self.title,
            severity or self.severity,
            where,
            numbers,
            cause or self.cause,
            remedy or self.remedy,
        )


class InitialStatistics(Rule):
    """Mean exactly 0 and variance exactly 1 in every channel."""

    code = "initial-statistics"
    title = "Running statistics are at their initial values"
    cause = "No batch has passed in training mode, so that evaluation normalizes with mean 0 and variance 1."
    remedy = (
        "Train, load the checkpoint with its buffers, or call normalcy.surgery.recalibrate(model, batches)."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Only norms that keep running statistics; a counter above zero is told apart."""
        for norm in evidence.norms:
            if not norm.initial:
                continue
            cause = self.cause
            if norm.updates:
                cause = (
                    f"The counter says {norm.updates} updates, yet nothing moved: momentum 0, statistics "
                    "reset, or a checkpoint loaded without its buffers."
                )
            yield self.found(
                norm.where,
                {"updates": norm.updates, "momentum": norm.momentum, **_gap_numbers(norm)},
                cause=cause,
                remedy=_RETRAIN if norm.kind == "instance" else "",
            )


class UnwarmedStatistics(Rule):
    """Weight left on the initial state and, given data, a measured gap."""

    code = "unwarmed-statistics"
    title = "Running statistics have not warmed up"
    cause = (
        "A running average from 0 and 1 still holds (1 − momentum)^updates of that initial state; the "
        "momentum is too small for so few updates."
    )
    remedy = (
        "Call normalcy.surgery.recalibrate(model, batches), or without data normalcy.surgery.debias(model); "
        "for the next training use a larger momentum or convention=replace(TORCH, debias=True)."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """A gap that the weight left cannot explain is another rule's."""
        for norm in evidence.norms:
            if not is_unwarmed(norm) or norm.weight_left is None:
                continue
            momentum = norm.momentum or 0.0
            needed = math.ceil(math.log(_WEIGHT_LEFT) / math.log1p(-momentum)) if 0 < momentum < 1 else None
            severe = norm.gap.rms > _LARGE_GAP if norm.gap else norm.weight_left > 0.1
            yield self.found(
                norm.where,
                {
                    "updates": norm.updates,
                    "momentum": norm.momentum,
                    "weight_left": norm.weight_left,
                    "updates_for_1_percent": needed,
                    **_gap_numbers(norm),
                },
                severity="error" if severe else "warning",
            )


class NonFiniteStatistics(Rule):
    """NaN or infinity among the running statistics."""

    code = "non-finite-statistics"
    title = "Running statistics are not finite"
    cause = "One batch with a NaN or an infinity enters a running average and never leaves it."
    remedy = (
        "Find the batch (overflow in half precision, bad data), then call "
        "normalcy.surgery.recalibrate(model, batches)."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Counts the channels."""
        for norm in evidence.norms:
            if norm.stored is None:
                continue
            bad = ~(norm.stored[0].isfinite() & norm.stored[1].isfinite())
            if bool(bad.any()):
                yield self.found(
                    norm.where,
                    {"channels": int(bad.sum()), "of": bad.numel(), "first_channel": int(bad.int().argmax())},
                )


class NegativeVariance(Rule):
    """A stored variance below zero."""

    code = "negative-variance"
    title = "A stored variance is negative"
    cause = (
        "A variance cannot be negative: eps was subtracted in a conversion, or statistics were averaged with "
        "weights outside 0 to 1. Below −eps the output is NaN, above it the scale explodes."
    )
    remedy = "Call normalcy.surgery.recalibrate(model, batches), and mend what wrote the value."

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Says in how many channels the output is NaN."""
        for norm in evidence.norms:
            if norm.stored is None:
                continue
            negative = norm.stored[1] < 0
            if bool(negative.any()):
                eps = float(getattr(norm.module, "eps", 0.0))
                yield self.found(
                    norm.where,
                    {
                        "channels": int(negative.sum()),
                        "of": negative.numel(),
                        "lowest": float(norm.stored[1][negative].min()),
                        "eps": eps,
                        "nan_channels": int((norm.stored[1].double() + eps <= 0).sum()),
                    },
                )


class StaleStatistics(Rule):
    """Stored statistics far from the measured ones, where no more particular rule has the cause."""

    code = "stale-statistics"
    title = "Stored statistics are far from the data's"
    cause = (
        "Evaluation normalizes this input differently from training: the weights or the data changed after "
        "the statistics were kept, the mode was wrong, a copy was made without buffers, or the data given "
        "here are not of the kind it was trained on."
    )
    remedy = "Call normalcy.surgery.recalibrate(model, batches) with data like those of training."

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """The threshold allows for the sampling error of the data given."""
        for norm in evidence.norms:
            if norm.gap is None or norm.measured is None or norm.initial or is_unwarmed(norm):
                continue
            if not _finite(norm) or norm.gap.rms <= gap_allowed(norm):
                continue
            loss = evidence.loss
            yield self.found(
                norm.where,
                {
                    **_gap_numbers(norm),
                    "gap_allowed": gap_allowed(norm),
                    "loss_eval": loss.eval if loss else None,
                    "loss_batch": loss.batch if loss else None,
                },
                severity="error" if norm.gap.rms > _LARGE_GAP else "warning",
            )


class DeadBiasRule(Rule):
    """A bias that every consumer subtracts again."""

    code = "dead-bias"
    title = "A bias is erased by the norm after it"
    cause = (
        "While statistics come from the batch, the norm subtracts the mean and with it any bias before it: "
        "its gradient is zero up to rounding, and only weight decay moves it."
    )
    remedy = (
        "Build the layer with bias=False, or call normalcy.surgery.strip_dead_bias(model, example), which "
        "leaves evaluation unchanged."
    )
    severity = "warning"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """By data flow, only where it really is dead."""
        for verdict in evidence.sites.dead if evidence.sites else ():
            bias = getattr(verdict.module, "bias", None)
            yield self.found(
                verdict.where,
                {
                    "parameters": bias.numel() if bias is not None else None,
                    "largest": float(bias.detach().abs().max())
                    if bias is not None and bias.numel()
                    else None,
                    "erased_by": ", ".join(removal.where for removal in verdict.removals),
                },
            )


class TooFewValues(Rule):
    """Too few values share one statistic."""

    code = "too-few-values"
    title = "Too few values share one statistic"
    cause = (
        "Batch statistics need values per channel (batch × space), not merely a batch: the mean of n values "
        "is off by 1/√n standard deviations, and this noise differs between training and evaluation."
    )
    remedy = ""
    severity = "warning"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One value is an error for every norm, few are a warning for batch norm."""
        for norm in evidence.norms:
            n = norm.values
            if n is None or norm.site is None or n == 0 or _frozen(norm, evidence.model):
                continue
            if _of_weights(norm.site.steps[0].inputs[0]):
                continue
            if norm.kind == "batch" and n < _FEW_VALUES:
                yield self._batch(norm, n)
            elif n == 1 and norm.kind in ("group", "instance", "layer"):
                yield self.found(
                    norm.where,
                    {"values": n, "channels": norm.site.channels},
                    severity="error",
                    cause="One value is its own mean: the output is the bias, whatever comes in.",
                    remedy="Use fewer groups, or normalize over more axes.",
                )

    def _batch(self, norm: Norm, n: int) -> Finding:
        channels = norm.site.channels if norm.site else None
        cause = self.cause if n > 1 else "Training refuses one value per channel: it has no spread."
        return self.found(
            norm.where,
            {"values": n, "standard_error": 1 / math.sqrt(n), "channels": channels},
            severity="error" if n == 1 else "warning",
            cause=cause,
            remedy=f"Use a larger batch, or replace it by {_replacement(norm, channels)}.",
        )


class DecayedNorm(Rule):
    """Weight decay on γ and β."""

    code = "decayed-norm"
    title = "Weight decay acts on γ and β"
    cause = (
        "Decay pulls the scale γ and the shift β towards zero, which regularizes no function: the layers "
        "around the norm can undo it, and it shrinks what the norm lets through."
    )
    remedy = ""
    severity = "warning"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding for each parameter group that decays parameters of known norms."""
        if evidence.optimizer is None:
            return
        owners = {
            id(parameter): norm.where
            for norm in evidence.norms
            if norm.module is not None
            for parameter in norm.module.parameters(recurse=False)
        }
        for number, group in enumerate(evidence.optimizer.param_groups):
            hit = [p for p in group["params"] if id(p) in owners]
            if not hit or not group.get("weight_decay"):
                continue
            places = list(dict.fromkeys(owners[id(p)] for p in hit))
            yield self.found(
                f"optimizer group {number}",
                {
                    "weight_decay": float(group["weight_decay"]),
                    "tensors": len(hit),
                    "parameters": sum(p.numel() for p in hit),
                    "norms": ", ".join(places[:6]) + (f" and {len(places) - 6} more" if places[6:] else ""),
                },
                remedy=(
                    "Give the norms' parameters a group of their own: "
                    f"{type(evidence.optimizer).__name__}([{{'params': weights}}, "
                    "{'params': norms_and_biases, 'weight_decay': 0.0}])."
                ),
            )


class WrongMode(Rule):
    """A norm in another mode than its model."""

    code = "wrong-mode"
    title = "A norm is in another mode than its model"
    cause = ""
    remedy = ""

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Only norms whose result depends on the mode."""
        for norm in evidence.norms:
            if norm.module is None or norm.kind not in ("batch", "instance") or norm.stored is None:
                continue
            if norm.module.training == evidence.model.training:
                continue
            if norm.module.training:
                yield self.found(
                    norm.where,
                    {"model": "eval", "norm": "train"},
                    cause=(
                        "In training mode its output depends on the other examples of the batch, and every "
                        "pass moves its running statistics."
                    ),
                    remedy="Call model.eval() after everything that sets modes, or .eval() on this layer.",
                )
                continue
            trains = [p for p in norm.module.parameters(recurse=False) if p.requires_grad]
            yield self.found(
                norm.where,
                {"model": "train", "norm": "eval", "trainable": sum(p.numel() for p in trains)},
                severity="warning" if trains else "note",
                cause=(
                    "It normalizes with stored statistics while the model trains. If it is frozen on "
                    "purpose, the next model.train() undoes that"
                    + ("; its γ and β still train." if trains else ".")
                ),
                remedy="If that is not meant, call model.train(); else call .eval() after every train().",
            )


class UnrecognizedNorm(Rule):
    """What looks like a normalizer and is none that is known."""

    code = "unrecognized-norm"
    title = "A normalizer that is not recognized was not examined"
    cause = "It looks like a normalizer, but its class or function is not known here."
    remedy = "Look at it by hand; a subclass that keeps PyTorch's forward is recognized."
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One for each."""
        for item in evidence.unrecognized:
            yield self.found(item.where, {}, cause=item.why[:1].upper() + item.why[1:].rstrip(".") + ".")


class NoNorm(Rule):
    """A model without any norm that is known."""

    code = "no-norm"
    title = "There is nothing to examine"
    cause = "The model has no batch, layer, group, instance or RMS norm that is recognized."
    remedy = "Nothing needs to be done."
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """At most one; what could not be looked into is said."""
        if evidence.norms:
            return
        cause = remedy = ""
        if evidence.unrecognized:
            remedy = "Look at what was not recognized by hand."
        elif evidence.sites is None:
            cause = "No layer of the model is a batch, layer, group, instance or RMS norm that is recognized."
            remedy = "Give data: norms that are called as functions are found in a recorded pass."
        elif evidence.sites.not_seen:
            cause = f"{self.cause[:-1]}, but not all of it could be looked into."
            remedy = "Give the model as it was before it was scripted or compiled."
        yield self.found(type(evidence.model).__name__, {}, cause=cause, remedy=remedy)


def is_unwarmed(norm: Norm) -> bool:
    """Weight left on the initial state, and a gap where one was measured; initial statistics are no case."""
    left = norm.weight_left
    if left is None or left <= _WEIGHT_LEFT or norm.initial or not _finite(norm):
        return False
    return norm.gap is None or norm.gap.rms > gap_allowed(norm)


def gap_allowed(norm: Norm) -> float:
    """The gap that needs no explanation: `_GAP`, and four standard errors of the data that were measured."""
    return _GAP + (4 * norm.measured.standard_error if norm.measured else 0.0)


def _frozen(norm: Norm, model: nn.Module) -> bool:
    """Whether it keeps to its stored statistics while the model trains."""
    return model.training and norm.module is not None and not norm.module.training and norm.stored is not None


def _of_weights(value: Value) -> bool:
    """Whether it is computed from parameters alone: a standardized weight is no activation."""
    if value.step is None:
        return value.origin == "parameter"
    inputs = value.step.inputs
    return bool(inputs) and all(_of_weights(each) for each in inputs)


def _finite(norm: Norm) -> bool:
    if norm.stored is None:
        return False
    mean, var = norm.stored
    return bool(mean.isfinite().all() and var.isfinite().all() and (var >= 0).all())


def _gap_numbers(norm: Norm) -> dict[str, float | int | str | None]:
    if norm.gap is None or norm.measured is None:
        return {}
    return {
        "gap_rms": norm.gap.rms,
        "gap_worst": norm.gap.worst,
        "channel": norm.gap.channel,
        "mean_shift": norm.gap.mean_shift,
        "var_ratio": norm.gap.var_ratio,
        "values_measured": int(norm.measured.actual.count.max()),
    }


def _replacement(norm: Norm, channels: int | None) -> str:
    """A norm that does not need a batch, as it would be written."""
    if channels is None or norm.site is None:
        return "group or layer norm"
    if len(norm.site.steps[0].inputs[0].shape) == 2:
        return f"normalcy.nn.LayerNorm({channels})"
    return f"normalcy.nn.GroupNorm({math.gcd(32, channels)}, {channels})"


RULES: tuple[Rule, ...] = (
    NonFiniteStatistics(),
    NegativeVariance(),
    InitialStatistics(),
    UnwarmedStatistics(),
    StaleStatistics(),
    WrongMode(),
    TooFewValues(),
    DeadBiasRule(),
    DecayedNorm(),
    UnrecognizedNorm(),
    NoNorm(),
)
