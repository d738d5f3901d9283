"""Rules on running statistics: at their initial values, not warmed up, impossible, or far from the data's."""

from __future__ import annotations

from collections.abc import Iterator

from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import Finding
from normalcy.doctor.rules.base import Rule
from normalcy.statistics import updates_until

WEIGHT_LEFT = 0.01
"""Of the initial state, what may remain before anything is put down to it."""
_SEVERE_WEIGHT_LEFT = 0.1
# A gap of a tenth of a standard deviation moves outputs visibly; running averages of small batches wander
# by less: momentum 0.1 over batches of 64 values wanders by √(0.1/1.9/64) = 0.03.
_GAP = 0.1
_LARGE_GAP = 0.5
_ONE_CHANNEL = 1.0
_RETRAIN = (
    "Train, load the checkpoint with its buffers, or build it with track_running_stats=False, which "
    "normalizes each example by itself in both modes."
)
_CALL_IT = (
    "Call the layer itself in forward, then normalcy.surgery.recalibrate(model, batches) reaches it; or "
    "train, or load the checkpoint with its buffers."
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
        for norm in _judged(evidence):
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
                remedy=_RETRAIN if norm.kind == "instance" else _cure(norm),
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
        for norm in _judged(evidence):
            if not is_unwarmed(norm) or norm.weight_left is None:
                continue
            severe = norm.gap.rms > _LARGE_GAP if norm.gap else norm.weight_left > _SEVERE_WEIGHT_LEFT
            yield self.found(
                norm.where,
                {
                    "updates": norm.updates,
                    "momentum": norm.momentum,
                    "weight_left": norm.weight_left,
                    "updates_for_1_percent": updates_until(WEIGHT_LEFT, norm.momentum or 0.0),
                    **_gap_numbers(norm),
                },
                severity="error" if severe else "warning",
                remedy=_cure(norm),
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
        for norm in _judged(evidence):
            if norm.stored is None:
                continue
            bad = ~(norm.stored[0].isfinite() & norm.stored[1].isfinite())
            if bool(bad.any()):
                yield self.found(
                    norm.where,
                    {"channels": int(bad.sum()), "of": bad.numel(), "first_channel": int(bad.int().argmax())},
                    remedy=_cure(norm),
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
        for norm in _judged(evidence):
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
                    remedy=_cure(norm),
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
        for norm in _judged(evidence):
            if norm.gap is None or norm.measured is None or norm.initial or is_unwarmed(norm):
                continue
            if not _finite(norm) or not (norm.gap.rms > gap_allowed(norm) or _one_channel_is_off(norm)):
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


def _judged(evidence: Evidence) -> Iterator[Norm]:
    """The norms of whose statistics something can be said.

    Those that nothing uses have a rule of their own, and where what a norm receives is not finite, that is
    the fault: its statistics follow from it, and recalibration would fail.
    """
    for norm in evidence.norms:
        if norm.where not in evidence.idle and not norm.overflown:
            yield norm


def _cure(norm: Norm) -> str:
    """The remedy where it is another than the rule's own."""
    return _CALL_IT if norm.lent else ""


def is_unwarmed(norm: Norm) -> bool:
    """Weight left on the initial state, and a gap where one was measured; initial statistics are no case."""
    left = norm.weight_left
    if left is None or left <= WEIGHT_LEFT or norm.initial or not _finite(norm):
        return False
    return norm.gap is None or norm.gap.rms > gap_allowed(norm)


def _one_channel_is_off(norm: Norm) -> bool:
    """One channel moved by more than its own spread, which an average over many channels would hide."""
    if norm.gap is None or norm.measured is None:
        return False
    return norm.gap.worst > _ONE_CHANNEL + 8 * norm.measured.standard_error


def gap_allowed(norm: Norm) -> float:
    """The gap that needs no explanation: `_GAP`, and four standard errors of the data that were measured."""
    return _GAP + (4 * norm.measured.standard_error if norm.measured else 0.0)


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
