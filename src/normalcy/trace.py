"""One feature's normalization as named steps with every number, computed by the executable definition.

Not for whole arrays and not for speed: every value of every step is kept as a Python number, to be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from normalcy import definition
from normalcy.errors import ArgumentError, DataError, ShapeError

Value: TypeAlias = (
    "float | int | Sequence[float] | Mapping[str, Value] | Sequence[Mapping[str, Value]] | None"
)

KEYS = (
    *("mean", "var", "xhat", "y", "normalized_variance", "skewness", "kurtosis", "distinct"),
    *("dgamma", "dbeta", "dx", "update", "y_inference", "a", "c", "after"),
)
"""What `Trace.as_dict` reports, in this order; a key is there when its step was asked for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name, its formulas (one a line), and its numbers by name (a list has one per value)."""

    name: str
    formula: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps in the order in which they are computed; `+` puts one trace after another.

    Example:
        >>> [step.name for step in trace([2, 4, 6, 8], eps=0).steps]
        ['mean', 'variance', 'normalize', 'scale and shift', 'what changes', 'what stays']
    """

    steps: tuple[Step, ...]

    def __add__(self, other: Trace) -> Trace:
        return Trace(self.steps + other.steps)

    def as_dict(self) -> dict[str, Value]:
        """Return the results under the names in `KEYS`, ready for JSON: floats, lists and None.

        None is what is not defined: x̂, y and what follows from them where var + eps is 0, skewness and
        kurtosis where x̂ has no spread, the debiased value while the initial state is all there is.

        Example:
            >>> trace([0, 0, 2, 2], eps=0).as_dict()["xhat"]
            [-1.0, -1.0, 1.0, 1.0]
        """
        values = {key: value for step in self.steps for key, value in step.values.items()}
        return {key: values[key] for key in KEYS if key in values}


def trace(
    x: Sequence[float],
    *,
    gamma: float = 1.0,
    beta: float = 0.0,
    eps: float = 1e-5,
    dy: Sequence[float] | None = None,
    running: tuple[float, float] | None = None,
    momentum: float | None = None,
    correction: int = 1,
) -> Trace:
    """Trace the batch normalization of one feature, one value per example.

    Forward x̂ = (x − mean)/√(var + eps), y = γ·x̂ + β; with `dy` also backward; with `momentum` also
    the update of the running statistics, in both meanings of momentum; with `running` also inference.

    Args:
        x: the values of the feature.
        gamma: γ.
        beta: β.
        eps: in the unit of the variance; 0 is allowed where the variance is positive.
        dy: the gradient that arrives at y, one per value.
        running: the stored mean and variance: inference uses them as given, the update starts from them
            (from 0 and 1 without).
        momentum: a weight, from 0 to 1.
        correction: the stored variance is var·n/(n − correction).

    Returns:
        The steps, all in float64. Skewness is E[x̂³]/Var^(3/2), kurtosis E[x̂⁴]/Var² (3 for a Gaussian);
        `distinct` counts the different values of x̂.

    Raises:
        DataError: no values, a number that is not finite, or numbers too large or too close for float64.
        ShapeError: dy is not one per value.
        ArgumentError: eps, momentum, correction or the stored variance is impossible; or the variance and eps
            are both 0 (no error with `running` alone: inference does not need x̂, and what does is None).

    Example:
        >>> trace([18], gamma=4, beta=2, eps=0, running=(10, 16)).as_dict()["y_inference"]
        [10.0]
    """
    _check(x, gamma, beta, eps, dy, running)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused at the end, by name
        return _finite(Trace(tuple(_steps(x, gamma, beta, eps, dy, running, momentum, correction))))


def warm_up(batch_means: Sequence[float], *, momentum: float = 0.1, initial: float = 0.0) -> Trace:
    """Trace a running mean from batch to batch: what the initial state still weighs, and the mean without it.

    running ← (1 − m)·running + m·new,  weight left = (1 − m)^k,
    debiased = (running − weight left·initial)/(1 − weight left).

    Args:
        batch_means: the means of the batches, in order.
        momentum: m, the weight of the new value, from 0 to 1.
        initial: the running mean before the first batch.

    Returns:
        One step, `after`: for each batch `running`, `debiased` and `weight_left`, in float64.

    Raises:
        DataError: no batch, or a number that is not finite.
        ArgumentError: momentum outside [0, 1].

    Example:
        >>> [round(after["running"], 2) for after in warm_up([10, 12, 8]).as_dict()["after"]]
        [1.0, 2.1, 2.69]
    """
    _numbers("batch means", batch_means)
    _numbers("initial", [initial])
    running, from_zero = initial, 0.0
    after: list[Mapping[str, Value]] = []
    for k, new in enumerate(batch_means, start=1):
        running = float(definition.running_update(running, new, momentum))
        # From a second average that starts at 0: a large initial value would cancel only to rounding.
        from_zero = float(definition.running_update(from_zero, new, momentum))
        debiased = float(definition.debias(from_zero, 0.0, momentum, k)) if momentum > 0 else None
        left = definition.weight_left(momentum, k)
        after.append({"running": running, "debiased": debiased, "weight_left": left})
    formula = (
        "running = (1 − m)·running + m·new\nweight left = (1 − m)^k\n"
        "debiased = (running − weight left·initial)/(1 − weight left)"
    )
    values: Mapping[str, Value] = {"momentum": momentum, "initial": initial, "after": after}
    return _finite(Trace((Step("warm-up", formula, values),)))


def _steps(
    x: Sequence[float],
    gamma: float,
    beta: float,
    eps: float,
    dy: Sequence[float] | None,
    running: tuple[float, float] | None,
    momentum: float | None,
    correction: int,
) -> Iterator[Step]:
    feature = np.asarray(x, np.float64)[:, None]
    # The statistics are there even where x̂ is not: any positive eps gives them.
    made = definition.forward("batch", feature, [gamma], [beta], eps=1.0)
    mean, var = float(made.mean[0]), float(made.var[0])
    if var < np.finfo(np.float64).tiny and len(set(x)) > 1:
        raise DataError(
            "the values lie too close together for float64", "a variance above 1e-307", "scale them up"
        )
    undefined = eps == 0 and var == 0 and running is not None and dy is None
    if not undefined:
        made = definition.forward("batch", feature, [gamma], [beta], eps=eps)
    yield from _forward(made, feature, gamma, beta, eps, undefined=undefined)
    if dy is not None:
        yield from _backward(made, feature, dy, gamma, eps)
    if momentum is not None:
        yield _update(mean, var, len(x), running or (0.0, 1.0), momentum, correction)
    if running is not None:
        yield _inference(feature, gamma, beta, eps, running)


def _forward(
    made: definition.Forward, x: definition.Array, gamma: float, beta: float, eps: float, *, undefined: bool
) -> Iterator[Step]:
    mean, var = float(made.mean[0]), float(made.var[0])
    xhat = None if undefined else _list(made.xhat)
    y = None if undefined else _list(made.y)
    rstd = None if undefined else float(made.rstd[0])
    spread = None if undefined else var / (var + eps)
    yield Step("mean", "mean = Σx/n", {"x": _list(x), "n": len(x), "mean": mean})
    yield Step("variance", "var = Σ(x − mean)²/n", {"var": var})
    yield Step(
        "normalize", "x̂ = (x − mean)·rstd\nrstd = 1/√(var + eps)", {"eps": eps, "rstd": rstd, "xhat": xhat}
    )
    yield Step("scale and shift", "y = γ·x̂ + β", {"gamma": gamma, "beta": beta, "y": y})
    yield Step("what changes", "variance of x̂ = var/(var + eps)", {"normalized_variance": spread})
    centred = definition.forward("batch", x, eps=0).xhat if var > 0 else x - mean
    skewness_of_x, kurtosis_of_x = _shape(centred)
    skewness, kurtosis = _shape(made.xhat)
    values: Mapping[str, Value] = {
        "skewness_of_x": skewness_of_x,
        "skewness": skewness,
        "kurtosis_of_x": kurtosis_of_x,
        "kurtosis": kurtosis,
        "distinct_in_x": len(set(_list(x))),
        "distinct": None if xhat is None else len(set(xhat)),
    }
    yield Step("what stays", "skewness = E[x̂³]/Var^(3/2)\nkurtosis = E[x̂⁴]/Var²", values)


def _backward(
    made: definition.Forward, feature: definition.Array, dy: Sequence[float], gamma: float, eps: float
) -> Iterator[Step]:
    arriving = np.asarray(dy, np.float64)[:, None]
    gradients = definition.backward("batch", feature, arriving, [gamma], eps=eps)
    g = arriving * gamma
    sums: Mapping[str, Value] = {"g": _list(g), "S1": float(g.sum()), "S2": float((g * made.xhat).sum())}
    yield Step("gradient of γ", "dγ = Σdy·x̂", {"dy": _list(arriving), "dgamma": float(gradients.dweight[0])})
    yield Step("gradient of β", "dβ = Σdy", {"dbeta": float(gradients.dbias[0])})
    yield Step("what the statistics take back", "g = dy·γ\nS₁ = Σg\nS₂ = Σg·x̂", sums)
    yield Step("gradient of x", "dx = (g − (S₁ + x̂·S₂)/n)·rstd", {"dx": _list(gradients.dx)})


def _update(
    mean: float, var: float, n: int, before: tuple[float, float], momentum: float, correction: int
) -> Step:
    stored = float(definition.stored_variance(var, n, correction))

    def after(weighs: definition.Weighs) -> Mapping[str, Value]:
        new_mean = definition.running_update(before[0], mean, momentum, weighs=weighs)
        new_var = definition.running_update(before[1], stored, momentum, weighs=weighs)
        return {"running_mean": float(new_mean), "running_var": float(new_var)}

    update: Mapping[str, Value] = {
        "momentum": momentum,
        "correction": correction,
        "stored_var": stored,
        "initial_mean": float(before[0]),
        "initial_var": float(before[1]),
        "weight_of_new": after("new"),
        "weight_of_old": after("old"),
    }
    formula = (
        "stored var = var·n/(n − correction)\nm weighs the new value: (1 − m)·old + m·new\n"
        "m weighs the old value: m·old + (1 − m)·new"
    )
    return Step("running update", formula, {"update": update})


def _inference(
    feature: definition.Array, gamma: float, beta: float, eps: float, running: tuple[float, float]
) -> Step:
    mean, var = running
    a, c = definition.affine(mean, var, gamma, beta, eps=eps)
    y = definition.inference(feature, [mean], [var], [gamma], [beta], eps=eps)
    values: Mapping[str, Value] = {
        "running_mean": float(mean),
        "running_var": float(var),
        "a": float(a),
        "c": float(c),
        "y_inference": _list(y),
    }
    return Step("inference", "a = γ/√(running var + eps)\nc = β − a·running mean\ny = a·x + c", values)


def _shape(centred: definition.Array) -> tuple[float | None, float | None]:
    """Return skewness and kurtosis of values around 0; None for both where they have no spread."""
    largest = np.max(np.abs(centred))
    if largest == 0:
        return None, None
    scaled = centred / largest  # so that no power underflows
    var = float(np.mean(scaled**2))
    return float(np.mean(scaled**3)) / var**1.5, float(np.mean(scaled**4)) / var**2


def _check(
    x: Sequence[float],
    gamma: float,
    beta: float,
    eps: float,
    dy: Sequence[float] | None,
    running: tuple[float, float] | None,
) -> None:
    _numbers("values", x)
    for name, value in {"gamma": gamma, "beta": beta, "eps": eps}.items():
        _numbers(name, [value])
    if dy is not None:
        _numbers("dy", dy)
        if len(dy) != len(x):
            raise ShapeError(
                f"dy has length {len(dy)}", f"{len(x)}, one number per value", "give dy for each value"
            )
    if running is not None:
        _numbers("running statistics", running)
        if running[1] < 0:
            raise ArgumentError(f"the running variance is {running[1]:g}", "0 or a positive number")


def _numbers(name: str, values: Sequence[float]) -> None:
    if not len(values):
        raise DataError(f"there are no {name}", "at least one number")
    for value in values:
        if not math.isfinite(value):
            raise DataError(f"{value} is among the {name}", "finite numbers", "take it out")


def _finite(made: Trace) -> Trace:
    """Return the trace, refused where a number left the range of float64 on the way."""

    def numbers(value: object) -> Iterator[float]:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, Sequence) and not isinstance(value, str):
            for inner in value:
                yield from numbers(inner)
        elif isinstance(value, float):
            yield value

    for step in made.steps:
        if not all(math.isfinite(v) for v in numbers(step.values)):
            raise DataError(
                f"the numbers of the step {step.name!r} are too large for float64", "smaller ones"
            )
    return made


def _list(values: definition.Array) -> list[float]:
    return [float(v) for v in values.ravel()]
