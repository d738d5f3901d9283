"""What a trace is made of: steps with their formulas, numbers and reasons, under fixed names.

Not where anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from normalcy.errors import DataError

Value: TypeAlias = "float | int | str | Sequence[Value] | Mapping[str, Value] | None"

KEYS = (
    *("mean", "var", "xhat", "y", "normalized_variance", "skewness", "kurtosis", "distinct"),
    *("dgamma", "dbeta", "dx", "update", "y_inference", "a", "c", "after"),
)
"""What `Trace.as_dict` reports, in this order; a key is there when its step was asked for."""

WORDS = {
    "xhat": "x̂",
    "gamma": "γ",
    "beta": "β",
    "dgamma": "dγ",
    "dbeta": "dβ",
    "S1": "S₁",
    "S2": "S₂",
    "y_inference": "y",
    "skewness": "skewness of x̂",
    "kurtosis": "kurtosis of x̂",
    "distinct": "distinct in x̂",
    "count": "values of each",
}
"""How a person reads the names of numbers that are not words already."""

ARRAY_KEYS = ("norm", "shares", "count")
"""What `Trace.as_dict` reports beside `KEYS`, except for one feature of batch norm without a mask."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name, its formulas (one a line), its numbers by name, and why it is as it is.

    A number is a float where there is one; a list has one per statistic or per value, nested as the input.
    """

    name: str
    formula: str
    values: Mapping[str, Value]
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps in the order in which they are computed; `+` puts one trace after another.

    Example:
        >>> from normalcy.trace import trace
        >>> [step.name for step in trace([2, 4, 6, 8], eps=0).steps]
        ['mean', 'variance', 'normalize', 'scale and shift', 'what changes', 'what stays']
    """

    steps: tuple[Step, ...]

    def __add__(self, other: Trace) -> Trace:
        return Trace(self.steps + other.steps)

    def as_dict(self) -> dict[str, Value]:
        """Return the results under the names in `KEYS`, ready for JSON: floats, lists and None.

        Arrays add what stands in `ARRAY_KEYS`; where reasons were asked for, `why` has the sentences of each
        step by its name. None is what is not defined: x̂, y and what follows from them where var + eps is 0,
        skewness and kurtosis where x̂ has no spread, the debiased value while the initial state is all there
        is, the statistics of nothing, and the statistic of a masked place.

        Example:
            >>> from normalcy.trace import trace
            >>> trace([0, 0, 2, 2], eps=0).as_dict()["xhat"]
            [-1.0, -1.0, 1.0, 1.0]
        """
        values = {key: value for step in self.steps for key, value in step.values.items()}
        made = {key: values[key] for key in (*KEYS, *ARRAY_KEYS) if key in values}
        why: dict[str, Value] = {step.name: list(step.why) for step in self.steps if step.why}
        return made | {"why": why} if why else made

    def finite(self) -> Trace:
        """Return the trace itself.

        Raises:
            DataError: a number left the range of float64 on the way.
        """
        for step in self.steps:
            if not _finite(step.values):
                raise DataError(
                    f"the numbers of the step {step.name!r} are too large for float64", "smaller ones"
                )
        return self


def _finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return all(map(_finite, value.values())) if isinstance(value, Mapping) else True
