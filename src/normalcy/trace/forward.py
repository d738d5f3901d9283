"""Why each step forward is as it is, in sentences with the numbers of the run, tried out on its values.

Not a text book: what is said was computed just now, with the definition, on these very values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from normalcy.trace.focus import Focus
from normalcy.trace.record import Value
from normalcy.trace.written import apart, counted, digits, number, upper

_ONE_STATISTIC = {
    "batch": "per channel, over all examples{space}",
    "instance": "per example and channel, over the positions",
    "group": "per example and group of {size} channel{s}{space}",
    "layer": "for each place outside the averaged axes",
    "rms": "for each place outside the averaged axes",
}


class ForwardReasons(Focus):
    """The sentences of the steps from x to y."""

    def shares(self) -> tuple[str, ...]:
        """Which cells are averaged together, and which are not neighbours."""
        shape = self.given.x.shape
        count = self.made.count.ravel()
        one = _ONE_STATISTIC[self.given.norm].format(
            space=" and positions" if len(shape) > 2 else "",
            size=shape[1] // (self.given.groups or 1) if len(shape) > 1 else 1,
            s="" if len(shape) > 1 and shape[1] == self.given.groups else "s",
        )
        if self.given.norm in {"layer", "rms"}:
            axes = sorted(axis % len(shape) for axis in self.given.axes)
            one += (
                f" (here axis {axes[0]})" if len(axes) == 1 else f" (here axes {', '.join(map(str, axes))})"
            )
        low, high = int(count.min()), int(count.max())
        cells = f"{low}" if low == high else f"{low} to {high}"
        said = [
            (
                f"{self.given.norm} norm keeps one statistic {one}: {counted(len(count), 'statistic')} for "
                f"{counted(int(self.given.mask.sum()), 'value')}, each over {cells}."
            )
        ]
        if not self.given.mask.all():
            gone = int((~self.given.mask).sum())
            said.append(f"Masked: {counted(gone, 'cell')}; what is masked counts nowhere, and y is 0 there.")
        if len(count) > 1:
            said.append(
                f"The sentences below speak of statistic {self.focus}, of {self.name(self.cells[0])}."
            )
        return (upper(said[0]), *said[1:])

    def mean(self) -> tuple[str, ...]:
        """Mean before variance."""
        values, mean, var = self.values, self.centre, self.spread
        square = float(np.mean(values**2))
        centre = float(np.mean(values))
        if self.given.norm == "rms":
            return (
                (
                    f"Rms norm leaves the mean, {number(centre)}, where it is: it divides by the root of the "
                    f"mean square {number(square)}, of which {number(centre**2)} is the mean's own square."
                ),
            )
        return (
            (
                "The mean comes before the variance, because the variance is measured from it: around "
                f"{number(mean)} the mean square is {number(var)}, around 0 it would be {number(square)}, of "
                f"which mean² = {number(mean**2)} says where the values lie and not how far they spread."
            ),
        )

    def variance(self) -> tuple[str, ...]:
        """Divide by n, not n − 1."""
        n, var = len(self.values), self.spread
        if self.given.norm == "rms":
            return (f"Divided by n = {n}, so that the mean square of x̂ comes to 1 but for eps.",)
        if n == 1:
            return ("One value alone has variance 0; divided by n − 1 = 0 it would have none at all.",)
        if var == 0:
            return (
                f"All {n} values are {number(self.centre)}, so the variance is 0, whatever divides the sum.",
            )
        other = var * n / (n - 1)
        centred = self.values - self.centre
        exact, less = (float(np.mean((centred / math.sqrt(v)) ** 2)) for v in (var, other))
        return (
            f"Divided by n = {n}: these values themselves are to get variance 1, and with n they do (mean of "
            f"x̂² without eps: {number(exact)}). With n − 1 the variance would be {number(other)} and the "
            f"mean of x̂² only {number(less)}. n − 1 corrects a guess about values not seen, "
            + (
                "so it belongs to the variance that is stored for inference."
                if self.given.norm == "batch"
                else f"and {self.given.norm} norm makes none"
                + (
                    " unless it is told to track running statistics."
                    if self.given.norm == "instance"
                    else "."
                )
            ),
        )

    def normalize(self) -> tuple[str, ...]:
        """What eps did, and how the neighbours entered."""
        return (self._eps_did(), *self._neighbours())

    def affine(self) -> tuple[str, ...]:
        """Why a bias before the norm is useless, and what γ and β can restore."""
        return (self._bias(), self._restored())

    def changes(self) -> tuple[str, ...]:
        """Why the normalized variance is not exactly 1."""
        var, eps = self.spread, self.given.eps
        word = "mean square" if self.given.norm == "rms" else "variance"
        share = var / (var + eps)
        measured = float(np.mean(self.at(self.made.xhat) ** 2))
        if var == 0:
            first = f"A {word} of 0 stays 0: nothing was spread, so nothing can be."
        elif eps == 0:
            first = f"eps is 0, so the {word} of x̂ is 1 (measured: {number(measured)})."
        else:
            first = (
                f"x̂ is divided by √(var + eps), not √var, so its {word} is var/(var + eps) = "
                f"{digits(share)}, short of 1 by {number(eps / (var + eps))} (measured: {digits(measured)})."
            )
        y = self.at(self.made.y)
        mean_of_y, var_of_y = float(np.mean(y)), float(np.var(y))
        after = "γ" if self.given.norm == "rms" else "γ and β"
        return (
            first,
            f"After {after} these y have mean {number(mean_of_y)} and variance {number(var_of_y)}.",
        )

    def stays(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """That the shape stays."""

        def at(name: str) -> float | None:
            value = values[name]
            found = value[self.focus] if isinstance(value, list) else value
            return float(found) if isinstance(found, int | float) else None

        skewness, kurtosis = at("skewness"), at("kurtosis")
        if skewness is None or kurtosis is None:
            return ("Values without a spread have no shape.",)
        before = (
            f"skewness {number(round(at('skewness_of_x') or 0.0, 12))} and kurtosis "
            f"{number(at('kurtosis_of_x'))}"
        )
        return (
            (
                f"Moving and stretching keep the shape: {before} before, {number(round(skewness, 12))} and "
                f"{number(kurtosis)} after. A Gaussian has 0 and 3; normalizing makes nothing Gaussian."
            ),
        )

    def _eps_did(self) -> str:
        var, eps = self.spread, self.given.eps
        word = "mean square" if self.given.norm == "rms" else "variance"
        if var == 0:
            kept = f"1/√(var + eps) = {number(1 / math.sqrt(eps))} stays finite and x̂ is 0"
            return f"The {word} is 0, and eps = {eps:g} alone keeps the division possible: {kept}."
        without = 1 / math.sqrt(var)
        if eps == 0:
            other = 1 / math.sqrt(var + 1e-5)
            return (
                f"eps is 0, so x̂ is divided by √var alone, rstd = {number(without)}; with 1e-05, PyTorch's "
                f"default, it would be {number(other)}. A constant feature would divide by 0."
            )
        rstd = 1 / math.sqrt(var + eps)
        centred = self.values - (0.0 if self.given.norm == "rms" else self.centre)
        moved = float(np.max(np.abs(centred))) * (without - rstd)
        decides = " eps decides here, more than the data." if eps > var else ""
        return (
            f"eps = {eps:g} beside a {word} of {number(var)}: rstd is {apart(rstd, without)} instead of "
            f"{apart(without, rstd)}, and no x̂ changes by more than {number(moved)}. Were the {word} 0, eps "
            f"alone would keep the division possible.{decides}"
        )

    def _neighbours(self) -> tuple[str, ...]:
        first, last = self.cells[0], self.cells[-1]
        said = []
        if first == last:
            said.append(
                f"No neighbour shares the statistic of {self.name(first)}: it is divided by its own size, "
                f"and x̂ is {number(float(self.made.xhat[first]))}, hardly more than its sign."
                if self.given.norm == "rms"
                else f"No neighbour shares the statistic of {self.name(first)}: it is its own mean, "
                "and x̂ is 0, whatever it is."
            )
        else:
            was, to = float(self.given.x[last]), float(self.given.x[last]) + self.far
            moved = self.xhat_with(last, to)
            said.append(
                f"The neighbours enter through the statistics: {self.name(last)} moved from {apart(was, to)} "
                f"to {apart(to, was)} would move x̂ of {self.name(first)} from "
                f"{number(float(self.made.xhat[first]))} to {number(float(moved[first]))}."
            )
        others = np.argwhere((self.given.shares != self.focus) & self.given.mask)
        if len(others):
            cell = tuple(int(i) for i in others[-1])
            was, to = float(self.given.x[cell]), float(self.given.x[cell]) + self.far
            change = float(np.max(np.abs(self.at(self.xhat_with(cell, to)) - self.at(self.made.xhat))))
            said.append(
                f"Those with another statistic do not enter: {self.name(cell)} moved from {apart(was, to)} "
                f"to {apart(to, was)} changes x̂ of {self.name(first)} by {number(change)}."
            )
        return tuple(said)

    def _bias(self) -> str:
        bias = self.offset
        valid = self.given.mask
        change = float(np.max(np.abs((self.xhat_of(self.given.x + bias) - self.made.xhat)[valid])))
        if self.given.norm == "rms":
            return (
                f"A bias before rms norm is not useless: {number(bias)} added to every value changes x̂ by "
                f"up to {number(change)}, because no mean takes it away. There is no β after it."
            )
        told = (
            f"Why a bias before the norm is useless: {number(bias)} added to every value moves the mean from "
            f"{number(self.centre)} to {number(float(np.mean(self.values + bias)))} and leaves x̂ as it is "
            f"(largest change {number(change)}{', rounding' if change else ''}). β, after the norm, does its "
            "work."
        )
        axis = 1 if self.given.norm == "group" else self._feature_axis()
        if self.given.norm in {"batch", "instance"} or self.given.x.shape[axis] in {1, self.given.groups}:
            return told
        uneven = self.given.x.copy()
        uneven[tuple(0 if a == axis else slice(None) for a in range(uneven.ndim))] += bias
        change = float(np.max(np.abs((self.xhat_of(uneven) - self.made.xhat)[valid])))
        return (
            f"{told} But a layer's bias is one number per feature: {number(bias)} on the first along axis "
            f"{axis} alone changes x̂ by up to {number(change)}, so before {self.given.norm} norm it is not "
            "useless."
        )

    def _feature_axis(self) -> int:
        averaged = sorted(axis % self.given.x.ndim for axis in self.given.axes)
        return 1 if 1 in averaged else averaged[-1]

    def _restored(self) -> str:
        var, eps = self.spread, self.given.eps
        root = math.sqrt(var + eps)
        xhat = self.at(self.made.xhat)
        mean = 0.0 if self.given.norm == "rms" else self.centre
        error = float(np.max(np.abs(root * xhat + mean - self.values)))
        shift = "" if self.given.norm == "rms" else f" and β = mean = {number(mean)}"
        return (
            f"Nothing is lost: γ = √(var + eps) = {number(root)}{shift} would give x back (largest "
            f"difference {number(error)}). γ and β decide about scale and place from here on, not the data."
        )
