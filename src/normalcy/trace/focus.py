"""The one statistic of a trace that sentences speak of, and trials of what other values would have given.

Not for results: those are there for every statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normalcy import definition
from normalcy.definition import Array
from normalcy.trace.given import Given


@dataclass(frozen=True)
class Focus:
    """The first statistic with a spread, or the first of all: its values, and trials with others."""

    given: Given
    made: definition.Forward

    @cached_property
    def focus(self) -> int:
        """Which statistic, as an index into those of the trace."""
        var, count = self.made.var.ravel(), self.made.count.ravel()
        spread = np.flatnonzero((count > 0) & (np.nan_to_num(var) > 0))
        return int(spread[0] if len(spread) else np.flatnonzero(count > 0)[0])

    @cached_property
    def cells(self) -> list[tuple[int, ...]]:
        """Its first and its last cell; one where there is but one."""
        here = np.argwhere((self.given.shares == self.focus) & self.given.mask)
        return [tuple(int(i) for i in here[k]) for k in sorted({0, len(here) - 1})]

    @cached_property
    def values(self) -> Array:
        """Its x."""
        return self.at(self.given.x)

    @cached_property
    def centre(self) -> float:
        """Its mean, as it was subtracted."""
        return float(self.made.mean.ravel()[self.focus])

    @cached_property
    def spread(self) -> float:
        """Its variance; for rms norm the mean square."""
        return float(self.made.var.ravel()[self.focus])

    @property
    def far(self) -> float:
        """Ten standard deviations, roughly: a step that somebody might have typed."""
        return float(f"{10 * (math.sqrt(self.spread) or 1.0):.2g}")

    @property
    def offset(self) -> float:
        """100, or what stands to the spread as 100 to everyday numbers."""
        root = math.sqrt(self.spread)
        return 100.0 if root == 0 or 0.01 <= root <= 1e4 else 10.0 ** (math.floor(math.log10(root)) + 2)

    def at(self, values: Array) -> Array:
        """What an array has in its cells."""
        return np.asarray(values[(self.given.shares == self.focus) & self.given.mask])

    def name(self, cell: tuple[int, ...]) -> str:
        """What a person calls a cell."""
        if self.given.single:
            return f"example {cell[0] + 1}"
        return f"x[{', '.join(map(str, cell))}]"

    def xhat_with(self, cell: tuple[int, ...], value: float) -> Array:
        """All x̂, had one cell another value."""
        x = self.given.x.copy()
        x[cell] = value
        return self.xhat_of(x)

    def xhat_of(self, x: Array) -> Array:
        """All x̂, had all cells other values."""
        # With eps 0, a smaller one than any variance: the values tried may have become equal.
        return self.given.forward(
            x, eps=self.given.eps or float(np.finfo(np.float64).smallest_subnormal)
        ).xhat
