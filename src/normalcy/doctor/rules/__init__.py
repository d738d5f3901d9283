"""The rules: each a small class that looks at the evidence and yields findings.

A rule's words stand beside what it looks for. Numbers it reports were read or measured, never guessed.
"""

from normalcy.doctor.rules.base import Rule
from normalcy.doctor.rules.finite import NonFiniteActivations, NonFiniteLoss, NonFiniteParameters
from normalcy.doctor.rules.reached import NeverCalled, UnmeasuredStatistics
from normalcy.doctor.rules.stored import (
    InitialStatistics,
    NegativeVariance,
    NonFiniteStatistics,
    StaleStatistics,
    UnwarmedStatistics,
)
from normalcy.doctor.rules.training import DecayedNorm, WrongMode
from normalcy.doctor.rules.wiring import DeadBiasRule, NoNorm, TooFewValues, UnrecognizedNorm

RULES: tuple[Rule, ...] = (
    NonFiniteParameters(),
    NonFiniteActivations(),
    NonFiniteStatistics(),
    NegativeVariance(),
    InitialStatistics(),
    UnwarmedStatistics(),
    StaleStatistics(),
    WrongMode(),
    TooFewValues(),
    DeadBiasRule(),
    DecayedNorm(),
    NeverCalled(),
    UnmeasuredStatistics(),
    NonFiniteLoss(),
    UnrecognizedNorm(),
    NoNorm(),
)
"""In the order in which findings of one severity are reported."""
