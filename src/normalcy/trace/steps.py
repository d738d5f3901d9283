"""The steps of one normalization, in the order in which they are computed.

Not where input is checked: `given` did that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from normalcy import definition
from normalcy.definition import Array
from normalcy.errors import DataError
from normalcy.trace import grouped, why
from normalcy.trace.given import Given, Parameter
from normalcy.trace.record import Step, Value

_TINY = np.finfo(np.float64)
_ROOM = 1e140


def steps(given: Given, momentum: float | None, correction: int, *, explain: bool) -> Iterator[Step]:
    """Compute the steps that `given`, and a momentum, ask for."""
    # The statistics are there even where x̂ is not: any positive eps gives them.
    made = given.forward(eps=1.0)
    var = made.var.ravel()
    if np.any((var < _TINY.tiny) & (grouped.spread(given, given.x) > 0)):
        raise DataError(
            "the values lie too close together for float64", "a variance above 1e-307", "scale them up"
        )
    undefined = bool(given.eps == 0 and np.any(var == 0) and given.running is not None and given.dy is None)
    if not undefined:
        made = given.forward()
    said = _reasons(given, made) if explain else None
    if not given.single or given.masked:
        yield _shares(given, made, said)
    yield from _forward(given, made, said, undefined=undefined)
    if given.dy is not None:
        yield from _backward(given, made, given.dy, said)
    if momentum is not None:
        yield _update(given, made, momentum, correction, said)
    if given.running is not None:
        yield _inference(given, given.running, said)


def _reasons(given: Given, made: definition.Forward) -> why.Reasons | None:
    """The sentences, where there is room to try larger values beside these."""
    largest = float(np.max(np.abs(given.x[given.mask])))
    if not np.isfinite(made.var[made.count > 0]).all():
        return None  # refused at the end, by the name of the step
    if largest > _ROOM:
        said, do = (
            f"to explain, other values are tried, and there is one as large as {largest:g}",
            "scale down",
        )
        raise DataError(said, f"values up to {_ROOM:g}", do)
    return why.Reasons(given, made)


def _shares(given: Given, made: definition.Forward, said: why.Reasons | None) -> Step:
    values: dict[str, Value] = {
        "norm": given.norm,
        "shape": list(given.x.shape[: 1 if given.single else None]),
        "shares": grouped.per_cell(given, given.shares, masked=True),
        "count": grouped.per_statistic(given, [int(n) for n in made.count.ravel()]),
    }
    formula = "cells with the same number are averaged together"
    return Step("what shares a statistic", formula, values, said.shares() if said else ())


def _forward(
    given: Given, made: definition.Forward, said: why.Reasons | None, *, undefined: bool
) -> Iterator[Step]:
    def where(value: Value) -> Value:
        return None if undefined else value

    rms, plain = given.norm == "rms", given.single and not given.masked
    said = None if undefined else said
    x = grouped.per_cell(given, given.x, masked=True)
    first: dict[str, Value] = {"x": x} | ({"n": len(given.x)} if plain else {})
    mean, var = (grouped.per_statistic(given, made.mean), grouped.per_statistic(given, made.var))
    yield Step(
        "mean",
        "mean = 0: rms norm subtracts nothing" if rms else "mean = Σx/n",
        first | {"mean": mean},
        said.mean() if said else (),
    )
    yield Step(
        "mean square" if rms else "variance",
        "var = Σx²/n" if rms else "var = Σ(x − mean)²/n",
        {"var": var},
        said.variance() if said else (),
    )
    rstd, xhat = grouped.per_statistic(given, made.rstd), grouped.per_cell(given, made.xhat)
    yield Step(
        "normalize",
        "x̂ = x·rstd\nrstd = 1/√(var + eps)" if rms else "x̂ = (x − mean)·rstd\nrstd = 1/√(var + eps)",
        {"eps": given.eps, "rstd": where(rstd), "xhat": where(xhat)},
        said.normalize() if said else (),
    )
    gamma, shifts = _parameter(given, given.gamma), {} if rms else {"beta": _parameter(given, given.beta)}
    yield Step(
        "scale" if rms else "scale and shift",
        "y = γ·x̂" if rms else "y = γ·x̂ + β",
        {"gamma": gamma, **shifts, "y": where(grouped.per_cell(given, made.y))},
        said.affine() if said else (),
    )
    yield _changes(given, made, said, undefined=undefined)
    yield _stays(given, made, said, undefined=undefined)


def _parameter(given: Given, parameter: Parameter) -> Value:
    """Report a parameter in the shape in which it was given."""
    if parameter.number is not None:
        return parameter.number
    shared = tuple(slice(0, 1) if n == 1 else slice(None) for n in parameter.kept)
    return grouped.per_place(given, parameter.full[shared].reshape(parameter.given))


def _changes(given: Given, made: definition.Forward, said: why.Reasons | None, *, undefined: bool) -> Step:
    share = None if undefined else grouped.per_statistic(given, made.var / (made.var + given.eps))
    word = "mean square" if given.norm == "rms" else "variance"
    formula = f"{word} of x̂ = var/(var + eps)"
    return Step("what changes", formula, {"normalized_variance": share}, said.changes() if said else ())


def _stays(given: Given, made: definition.Forward, said: why.Reasons | None, *, undefined: bool) -> Step:
    centred = given.centred()
    # An eps so small that it changes no variance: constants, which have none, stay 0.
    before = centred.forward(eps=float(_TINY.smallest_subnormal)).xhat
    after = made.xhat
    if given.norm == "rms":
        after = centred.forward(made.xhat, eps=float(_TINY.smallest_subnormal)).xhat
    skewness_of_x, kurtosis_of_x = grouped.shape(given, before)
    skewness, kurtosis = ([None] * len(skewness_of_x),) * 2 if undefined else grouped.shape(given, after)
    distinct: Value = None if undefined else grouped.per_statistic(given, grouped.distinct(given, made.xhat))
    values: Mapping[str, Value] = {
        "skewness_of_x": grouped.per_statistic(given, skewness_of_x),
        "skewness": grouped.per_statistic(given, skewness),
        "kurtosis_of_x": grouped.per_statistic(given, kurtosis_of_x),
        "kurtosis": grouped.per_statistic(given, kurtosis),
        "distinct_in_x": grouped.per_statistic(given, grouped.distinct(given, given.x)),
        "distinct": distinct,
    }
    reasons = said.stays(values) if said else ()
    return Step("what stays", "skewness = E[x̂³]/Var^(3/2)\nkurtosis = E[x̂⁴]/Var²", values, reasons)


def _backward(given: Given, made: definition.Forward, dy: Array, said: why.Reasons | None) -> Iterator[Step]:
    gradients = given.backward(dy)
    arriving = np.where(given.mask, dy, 0.0)
    g = arriving * _spread(given)
    rms = given.norm == "rms"
    dgamma = grouped.per_place(given, given.gamma.gradient(gradients.dweight))
    dbeta = None if rms else grouped.per_place(given, given.beta.gradient(gradients.dbias))
    sums: dict[str, Value] = {"g": grouped.per_cell(given, g)}
    if not rms:
        sums["S1"] = grouped.per_statistic(given, grouped.total(given, g))
    sums["S2"] = grouped.per_statistic(given, grouped.total(given, g * made.xhat))
    yield Step("gradient of γ", "dγ = Σdy·x̂", {"dy": grouped.per_cell(given, arriving), "dgamma": dgamma})
    formula = "rms norm has no β" if rms else "dβ = Σdy"
    yield Step("gradient of β", formula, {"dbeta": dbeta})
    yield Step(
        "what the statistics take back",
        "g = dy·γ\nS₂ = Σg·x̂" if rms else "g = dy·γ\nS₁ = Σg\nS₂ = Σg·x̂",
        sums,
        said.sums(gradients.dx) if said else (),
    )
    formula = "dx = (g − x̂·S₂/n)·rstd" if rms else "dx = (g − (S₁ + x̂·S₂)/n)·rstd"
    reasons = said.gradient(g, gradients.dx) if said else ()
    yield Step("gradient of x", formula, {"dx": grouped.per_cell(given, gradients.dx)}, reasons)


def _spread(given: Given) -> Array:
    """γ for every cell."""
    along = [1]
    if given.norm in {"layer", "rms"}:
        along = sorted(axis % given.x.ndim for axis in given.axes)
    return given.gamma.full.reshape([n if axis in along else 1 for axis, n in enumerate(given.x.shape)])


def _update(
    given: Given, made: definition.Forward, momentum: float, correction: int, said: why.Reasons | None
) -> Step:
    stored = definition.stored_variance(made.var, made.count, correction)
    before = given.running or (np.zeros(given.x.shape[1]), np.ones(given.x.shape[1]))

    def after(weighs: definition.Weighs) -> Mapping[str, Value]:
        mean = definition.running_update(before[0], made.mean, momentum, weighs=weighs)
        var = definition.running_update(before[1], stored, momentum, weighs=weighs)
        return {
            "running_mean": grouped.per_place(given, mean),
            "running_var": grouped.per_place(given, var),
        }

    update: Mapping[str, Value] = {
        "momentum": momentum,
        "correction": correction,
        "stored_var": grouped.per_place(given, stored),
        "initial_mean": grouped.per_place(given, before[0]),
        "initial_var": grouped.per_place(given, before[1]),
        "weight_of_new": after("new"),
        "weight_of_old": after("old"),
    }
    formula = (
        "stored var = var·n/(n − correction)\nm weighs the new value: (1 − m)·old + m·new\nm weighs the old "
        "value: m·old + (1 − m)·new"
    )
    reasons = said.update(before, stored, momentum, correction) if said else ()
    return Step("running update", formula, {"update": update}, reasons)


def _inference(given: Given, running: tuple[Array, Array], said: why.Reasons | None) -> Step:
    mean, var = running
    gamma, beta = given.gamma.full, given.beta.full
    a, c = definition.affine(mean, var, gamma, beta, eps=given.eps)
    with np.errstate(invalid="ignore"):
        y = definition.inference(np.where(given.mask, given.x, 0.0), mean, var, gamma, beta, eps=given.eps)
    y = np.where(given.mask, y, 0.0)
    values: Mapping[str, Value] = {
        "running_mean": grouped.per_place(given, mean),
        "running_var": grouped.per_place(given, var),
        "a": grouped.per_place(given, a),
        "c": grouped.per_place(given, c),
        "y_inference": grouped.per_cell(given, y),
    }
    formula = "a = γ/√(running var + eps)\nc = β − a·running mean\ny = a·x + c"
    return Step("inference", formula, values, said.inference(a, c, y) if said else ())
