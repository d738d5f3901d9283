"""Why each step of a trace is as it is: on top of the way forward, the way back, the update and inference.

Not a text book: what is said was computed just now, with the definition, on these very values.
"""

from __future__ import annotations

import numpy as np

from normalcy import definition
from normalcy.definition import Array
from normalcy.trace.forward import ForwardReasons
from normalcy.trace.written import number


class Reasons(ForwardReasons):
    """The sentences of every step of one run."""

    def sums(self, dx: Array) -> tuple[str, ...]:
        """What the two sums take out of the gradient."""
        along, stretched = float(np.sum(self.at(dx))), float(np.sum(self.at(dx) * self.at(self.made.xhat)))
        if self.given.norm == "rms":
            return (
                (
                    "S₂ is what g would gain from stretching all these x; rms norm undoes a stretch, so "
                    f"that part is taken out: Σdx·x̂ = {number(stretched)} (0 but for eps and rounding). "
                    f"Moving all x is not undone, so there is no S₁: Σdx = {number(along)}."
                ),
            )
        return (
            (
                "S₁ is what g would gain from moving all these x together, S₂ from stretching them. The "
                f"norm undoes both, so both parts are taken out: Σdx = {number(along)} and Σdx·x̂ = "
                f"{number(stretched)} (0 but for rounding, and the second for eps). A bias that all of them "
                "have in common has the gradient Σdx: it learns nothing."
            ),
        )

    def gradient(self, g: Array, dx: Array) -> tuple[str, ...]:
        """What the gradient would be with constant statistics."""
        cell = self.cells[0]
        rstd = float(self.made.rstd.ravel()[self.focus])
        return (
            (
                f"Were the statistics constants, as in inference, dx of {self.name(cell)} would be g·rstd = "
                f"{number(float(g[cell]) * rstd)}; they move with x, so it is {number(float(dx[cell]))}."
            ),
        )

    def update(
        self, before: tuple[Array, Array], stored: Array, momentum: float, correction: int
    ) -> tuple[str, ...]:
        """Which variance is stored, which weight momentum is, and what the initial state still weighs."""
        k, n, var = self.focus, len(self.values), self.spread
        kept = float(stored[k])
        new = float(definition.running_update(before[1][k], kept, momentum, weighs="new"))
        old = float(definition.running_update(before[1][k], kept, momentum, weighs="old"))
        return (
            f"With a correction of 0 the variance of these values themselves is stored, {number(kept)}; "
            "PyTorch's is 1, for a guess about the values that inference will see."
            if correction == 0
            else f"The variance that is stored is {number(var)}·{n}/({n} − {correction}) = {number(kept)}, "
            f"divided by "
            f"n − {correction}: a guess about the values that inference will see.",
            (
                f"Momentum {momentum:g} means two things: as the weight of the new value it gives a running "
                f"variance of {number(new)}, as the weight of the old one {number(old)}. The initial state "
                f"then weighs {number(1 - momentum)} or {number(momentum)}; it takes many updates until it "
                "is gone."
            ),
        )

    def inference(self, a: Array, c: Array, y: Array) -> tuple[str, ...]:
        """How inference becomes one multiply and one add, without neighbours."""
        cell = self.cells[0]
        channel = cell[1]
        x, name = float(self.given.x[cell]), self.name(cell)
        slope, offset = float(a[channel]), float(c[channel])
        long_way = float(y[cell])
        short = slope * x + offset
        said = [
            (
                "The stored statistics are constants, so that the four numbers of a channel become two: "
                f"{name} gives a·x + c = {number(slope)}·{number(x)} + {number(offset)} = {number(short)}, "
                f"and step by step γ·(x − mean)/√(var + eps) + β = {number(long_way)} (they differ by "
                f"{number(abs(short - long_way))}). A linear layer before it can take a and c into its "
                "weight and bias, at no cost."
            )
        ]
        if len(self.given.x) > 1:
            mean, var = self.given.running or (np.zeros(1), np.ones(1))
            alone = definition.inference(
                self.given.x[cell[0]][None],
                mean,
                var,
                self.given.gamma.full,
                self.given.beta.full,
                eps=self.given.eps,
            )[(0, *cell[1:])]
            said.append(
                f"No neighbour enters: alone in its batch {name} gives {number(float(alone))} too (they "
                f"differ by {number(abs(float(alone) - long_way))})."
            )
        return tuple(said)
