"""Rules on what is not finite: parameters, what a norm receives, the loss.

Running statistics that are not finite have a rule of their own, beside the others on statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from normalcy.doctor.evidence import Evidence
from normalcy.doctor.findings import Finding
from normalcy.doctor.rules.base import Rule


class NonFiniteParameters(Rule):
    """NaN or infinity among the parameters."""

    code = "non-finite-parameters"
    title = "Parameters are not finite"
    cause = (
        "Whatever is computed from them is not finite either, so that no statistic behind them can be "
        "judged: training diverged, or the checkpoint is damaged."
    )
    remedy = (
        "Load a checkpoint from before, or train again with a smaller step or with clipped gradients; then "
        "examine again."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, at the first of them."""
        bad = {name: n for name, p in evidence.model.named_parameters() if (n := _not_finite(p))}
        if bad:
            first = next(iter(bad))
            of = sum(1 for _ in evidence.model.parameters())
            yield self.found(first, {"values": bad[first], "tensors": len(bad), "of": of})


class NonFiniteActivations(Rule):
    """A norm is given NaN or infinity, and the parameters are finite."""

    code = "non-finite-activations"
    title = "A norm receives values that are not finite"
    cause = (
        "The parameters are finite and what reaches this norm is not: something before it overflows (half "
        "precision, an exponential), divides by zero or takes a root or logarithm of what it must not."
    )
    remedy = (
        "Look at what runs before it, in float32 if it is half precision; statistics of this norm and of "
        "those behind it cannot be judged before that."
    )

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding, at the first norm in the order of the pass."""
        if any(_not_finite(p) for p in evidence.model.parameters()):
            return
        hit = [norm for norm in evidence.norms if norm.overflown]
        for norm in hit[:1]:
            of = norm.measured.actual.count.numel() if norm.measured else None
            yield self.found(norm.where, {"channels": norm.overflown, "of": of, "norms": len(hit)})


class NonFiniteLoss(Rule):
    """The loss is NaN or infinite with either source of statistics."""

    code = "non-finite-loss"
    title = "The loss is not finite"
    cause = "A loss that is no number says nothing about the statistics."
    remedy = "Look at the outputs and targets that it was given, and at the findings above."
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Says which of the two."""
        loss = evidence.loss
        if loss is None or (math.isfinite(loss.eval) and math.isfinite(loss.batch)):
            return
        source = "either source of statistics"
        if math.isfinite(loss.batch):
            source = "stored statistics, and finite with each batch's own"
        elif math.isfinite(loss.eval):
            source = "each batch's own statistics, and finite with the stored ones"
        yield self.found(
            "loss",
            {"loss_eval": loss.eval, "loss_batch": loss.batch},
            cause=f"It is not finite with {source}. {self.cause}",
        )


def _not_finite(parameter: Tensor) -> int:
    """How many values are neither finite nor the −∞ of an additive mask."""
    # sparse tensors and eight-bit floats have no isfinite
    if parameter.layout != torch.strided or not parameter.is_floating_point() or parameter.element_size() < 2:
        return 0
    finite = parameter.detach().isfinite()
    if bool(finite.all()):
        return 0
    rest, whole = parameter.detach()[~finite], parameter.detach()[finite]
    is_mask = bool((rest == -torch.inf).all()) and bool((whole == 0).all()) and not parameter.requires_grad
    return 0 if is_mask else int((~finite).sum())
