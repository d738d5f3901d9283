"""Rules on norms that the data did not reach, or reached by another way than a call of the layer.

Not for norms that are not recognized: those have a rule of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import Finding
from normalcy.doctor.rules.base import Rule
from normalcy.doctor.rules.stored import is_unwarmed

_UNMEASURED = "What is stored was examined; what the function receives was not measured."


class NeverCalled(Rule):
    """A norm whose statistics are no good, and that nothing uses."""

    code = "never-called"
    title = "A norm is never called"
    cause = ""
    remedy = (
        "Remove it, or call it in forward; if other data or another way of calling the model reach it, give "
        "those to the examination."
    )
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Only with data; where the statistics stored are sound, nothing is amiss."""
        for norm in evidence.norms:
            said = _spoilt(norm) if norm.where in evidence.idle else None
            if said:
                yield self.found(
                    norm.where,
                    {"updates": norm.updates, "calls": 0},
                    cause=f"Its running statistics {said}, and no data reach it in evaluation: it does no "
                    "harm as things stand, and recalibration cannot cure it.",
                )


class UnmeasuredStatistics(Rule):
    """Running statistics that forward hands to a function."""

    code = "unmeasured-statistics"
    title = "Running statistics are used by a function and were not measured"
    cause = ""
    remedy = "Call the layer itself, then what it receives can be measured and its statistics recalibrated."
    severity = "note"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One for each functional norm that is given running statistics."""
        for norm in evidence.norms:
            if norm.site is None or norm.site.module is not None or not norm.site.tracks:
                continue
            step, holder = norm.site.steps[0], norm.site.holder
            place = f"{step.op} in {step.module or 'the model itself'}"
            if norm.module is not None:
                cause = f"The layer is not called: forward gives its statistics to {place}. {_UNMEASURED}"
                yield self.found(norm.where, {"function": place}, cause=cause)
            elif any(other.where == holder for other in evidence.norms if other is not norm):
                cause = f"Forward calls {holder} and also gives its statistics to {place}. {_UNMEASURED}"
                yield self.found(norm.where, {"function": place, "held_by": holder}, cause=cause)
            else:
                yield self.found(
                    norm.where,
                    {"function": place, "held_by": holder},
                    cause=f"Forward gives them to {place}, and they belong to no layer that is known; they "
                    "were not examined either.",
                    remedy="Use a layer in its place, or compare what is stored with the data by hand.",
                )


def _spoilt(norm: Norm) -> str | None:
    """What is wrong with the statistics stored, as the end of a sentence; None where nothing is."""
    if norm.stored is None:
        return None
    if norm.initial:
        return "are at their initial values"
    mean, var = norm.stored
    if not bool(mean.isfinite().all() and var.isfinite().all()):
        return "are not finite"
    if bool((var < 0).any()):
        return "have a negative variance"
    return "have not warmed up" if is_unwarmed(norm) else None
