"""Rules on what surrounds a norm: a dead bias before it, too few values in it, no norm at all."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import Finding
from normalcy.doctor.rules.base import Rule
from normalcy.flow import Value
from normalcy.measure import Measurements

# The standard error of a mean of n values is 1/√n standard deviations: a quarter at 16.
_FEW_VALUES = 16
_LARGER = "Use a larger batch, or a norm that does not need one (group or layer norm)."


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
        for dead in evidence.dead:
            verdict, remedy = dead.verdict, ""
            if dead.in_training is None:
                remedy = f"Build the layer with bias=False if training has the same wiring: {dead.kept}."
            elif dead.kept:
                remedy = (
                    f"Build the layer with bias=False; in the model as it stands it has to stay: {dead.kept}."
                )
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
                remedy=remedy,
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
        alone = any(norm.values == 1 for norm in evidence.norms)
        if evidence.left_out is not None and not (alone and len(evidence.left_out.skipped) == 1):
            yield self._left_out(evidence.left_out)
        if evidence.refusal and not alone:
            cause = f"Nothing was measured: {evidence.refusal}"
            yield self.found("every batch", {}, severity="error", cause=cause, remedy=_LARGER)
        for norm in evidence.norms:
            n = norm.values
            if n is None or norm.site is None or n == 0 or _frozen(norm, evidence.model):
                continue
            if _of_weights(norm.site.steps[0].inputs[0]):
                continue
            if norm.kind == "batch" and n < _FEW_VALUES:
                yield self._batch(norm, n)
            elif n == 1 and norm.kind != "batch":
                lost = "is its own mean: the output is the bias, whatever comes in"
                sign = "divided by its own size is 1 or −1: only its sign is left"
                yield self.found(
                    norm.where,
                    {"values": n, "channels": norm.site.channels},
                    severity="error",
                    cause=f"One value {sign if norm.kind == 'rms' else lost}.",
                    remedy="Use fewer groups, or normalize over more axes.",
                )

    def _left_out(self, measured: Measurements) -> Finding:
        first = measured.skipped[0]
        return self.found(
            f"batch {first.batch}",
            {"batches_left_out": len(measured.skipped), "of": measured.batches, "first": first.why},
            cause="Training refuses one value per channel, which has no spread: such a batch, often the last "
            "one of a loader, stops it. It was left out of everything measured here.",
            remedy=f"Give the loader drop_last=True. {_LARGER}",
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


def _frozen(norm: Norm, model: nn.Module) -> bool:
    """Whether it keeps to its stored statistics while the model trains."""
    return model.training and norm.module is not None and not norm.module.training and norm.stored is not None


def _of_weights(value: Value) -> bool:
    """Whether it is computed from parameters alone: a standardized weight is no activation."""
    if value.step is None:
        return value.origin == "parameter"
    inputs = value.step.inputs
    return bool(inputs) and all(_of_weights(each) for each in inputs)


def _replacement(norm: Norm, channels: int | None) -> str:
    """A norm that does not need a batch, as it would be written."""
    if channels is None or norm.site is None:
        return "group or layer norm"
    if len(norm.site.steps[0].inputs[0].shape) == 2:
        return f"normalcy.nn.LayerNorm({channels})"
    return f"normalcy.nn.GroupNorm({math.gcd(32, channels)}, {channels})"
