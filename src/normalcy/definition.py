"""The executable definition of normalization in NumPy float64: what every other answer is judged by.

Not for training or serving: it copies freely, cares for no memory layout and knows no device.

A named norm is nothing but *which axes are averaged*. Arrays are channels-first, (N, C, *space):

    batch     everything but the channel              one statistic per channel
    instance  the space                               one per example and channel
    group     the channels of a group, and the space  one per example and group
    layer     the named axes of one example           one per remaining place
    rms       as layer, and nothing is subtracted     one per remaining place

For the n values x that share one statistic:

    mean = Σx/n        var = Σ(x − mean)²/n        (rms: mean = 0, so that var = Σx²/n)
    x̂ = (x − mean)/√(var + eps)        y = γ·x̂ + β
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normalcy.errors import ArgumentError, ShapeError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Name = Literal["batch", "layer", "group", "instance", "rms"]
Weighs = Literal["new", "old"]


@dataclass(frozen=True, slots=True)
class Forward:
    """One normalization: `count`, `mean`, `var`, `rstd` per statistic; `xhat` and `y` in the shape of x.

    `count` is how many values share the statistic. `mean` is what was subtracted: 0 for rms norm.
    Where nothing is valid (`count` 0), `mean` and `var` are NaN and the output is 0.
    """

    count: Array
    mean: Array
    var: Array
    rstd: Array
    xhat: Array
    y: Array


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients: `dx` in the shape of x, `dweight` and `dbias` in the shape of the weight."""

    dx: Array
    dweight: Array
    dbias: Array


def forward(
    norm: Name,
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    groups: int | None = None,
    axes: Sequence[int] = (-1,),
    mask: ArrayLike | None = None,
) -> Forward:
    """Normalize x by its own statistics.

    x̂ = (x − mean)/√(var + eps), y = γ·x̂ + β, with the population variance (divided by n).

    Args:
        norm: which axes are averaged, by name; the table is at the head of this module.
        x: (N, C, *space); for layer and rms norm any shape.
        weight: γ; None is 1. One per channel (C,); for layer and rms norm the extents of `axes`.
        bias: β, shaped like the weight; None is 0.
        eps: in the unit of the variance; 0 is allowed where every variance is positive.
        groups: group norm only: into how many groups of equal size the channels fall.
        axes: layer and rms norm only: what is averaged: `(-1,)` the last axis, `(1,)` NCHW's channels.
        mask: True = valid, broadcast to x. Other places count nowhere, whatever they hold; their y is 0.

    Returns:
        All of it, computed in float64. A constant feature gives exactly β (eps > 0).

    Raises:
        ShapeError: a shape does not fit the norm.
        ArgumentError: an unknown norm, a negative eps, or eps 0 where the variance is 0.

    Source: Ioffe & Szegedy, "Batch Normalization", 2015, algorithm 1; Ba, Kiros & Hinton, "Layer
    Normalization", 2016; Wu & He, "Group Normalization", 2018; Zhang & Sennrich, "Root Mean Square Layer
    Normalization", 2019.

    Example:
        >>> forward("batch", [[2.0], [4.0], [6.0], [8.0]], [3.0], [-1.0], eps=0).y.ravel().round(3).tolist()
        [-5.025, -2.342, 0.342, 3.025]
    """
    x = np.asarray(x, dtype=np.float64)
    split, averaged, along = _layout(norm, x.shape, groups, tuple(axes))
    gamma, beta = _per("weight", weight, x.shape, along, 1.0), _per("bias", bias, x.shape, along, 0.0)
    valid = _valid(mask, x.shape)
    with np.errstate(invalid="ignore", over="ignore"):  # not finite in, not finite out: as the formulas say
        values = np.where(valid, x, 0.0).reshape(split)
        count, mean, centred = _centre(values, valid.reshape(split), averaged, centre=norm != "rms")
        var = _mean_of(centred**2, count, averaged)
        rstd = _rstd(var, eps)
        xhat = (centred * np.where(count > 0, rstd, 0.0)).reshape(x.shape)
        y = np.where(valid, gamma * xhat + beta, 0.0)
    count, mean, var, rstd = (np.squeeze(s, axis=averaged) for s in (count, mean, var, rstd))
    return Forward(count, mean, var, rstd, xhat, y)


def backward(
    norm: Name,
    x: ArrayLike,
    dy: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    groups: int | None = None,
    axes: Sequence[int] = (-1,),
    mask: ArrayLike | None = None,
) -> Backward:
    """Carry dy back through `forward`, whose statistics depend on x.

    With g = dy·γ, S₁ = Σg and S₂ = Σg·x̂ over the n values that share a statistic:

        dx = (g − (S₁ + x̂·S₂)/n)/√(var + eps)        rms norm subtracts no mean, so it has no S₁
        dγ = Σdy·x̂        dβ = Σdy                    over the places that share the parameter

    Shapes, dtypes, arguments and what raises as in `forward`; dy in the shape of x. Masked places get
    gradient 0. A parameter that is absent has the gradient it would have at γ = 1, β = 0.

    Example:
        >>> gradients = backward("batch", [[2.0], [4.0], [6.0], [8.0]], [[0.1], [-0.2], [0.3], [-0.4]], eps=0)
        >>> gradients.dweight.round(4).tolist(), gradients.dbias.round(4).tolist()
        ([-0.4472], [-0.2])
    """
    x = np.asarray(x, dtype=np.float64)
    split, averaged, along = _layout(norm, x.shape, groups, tuple(axes))
    gamma = _per("weight", weight, x.shape, along, 1.0)
    valid = _valid(mask, x.shape)
    dy = np.where(valid, _like(dy, x.shape), 0.0)
    made = forward(norm, x, eps=eps, groups=groups, axes=axes, mask=mask)
    count = np.expand_dims(made.count, averaged)
    rstd = np.expand_dims(made.rstd, averaged)
    with np.errstate(invalid="ignore", over="ignore"):
        g = (dy * gamma).reshape(split)
        xhat = made.xhat.reshape(split)
        mean_of_g = _mean_of(g, count, averaged) if norm != "rms" else 0.0
        mean_of_g_xhat = _mean_of(g * xhat, count, averaged)
        dx = ((g - mean_of_g - xhat * mean_of_g_xhat) * rstd).reshape(x.shape)
    return Backward(
        dx=np.where(valid, dx, 0.0),
        dweight=_sum_along(dy * made.xhat, along),
        dbias=_sum_along(dy, along),
    )


def affine(
    mean: ArrayLike,
    var: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Array, Array]:
    """Write inference with stored statistics as y = a·x + c.

    a = γ/√(var + eps), c = β − a·mean; everything is one value per channel, in float64.

    Raises:
        ArgumentError: var + eps is not positive.

    Example:
        >>> a, c = affine(10.0, 16.0, 4.0, 2.0, eps=0)
        >>> float(a), float(c)
        (1.0, -8.0)
    """
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    gamma = np.asarray(1.0 if weight is None else weight, np.float64)
    beta = np.asarray(0.0 if bias is None else bias, np.float64)
    a = np.asarray(gamma * _rstd(var, eps))
    return a, np.asarray(beta - a * mean)


def inference(
    x: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
) -> Array:
    """Normalize x, (N, C, *space), by stored statistics, one per channel: the same map for any neighbours.

    y = γ·(x − mean)/√(var + eps) + β, in float64.

    Raises:
        ShapeError: a statistic or parameter is not one per channel.
        ArgumentError: var + eps is not positive.

    Example:
        >>> inference([[18.0]], [10.0], [16.0], [4.0], [2.0], eps=0).tolist()
        [[10.0]]
    """
    x = np.asarray(x, dtype=np.float64)
    _, _, along = _layout("batch", x.shape, None, ())
    mean, var = _per("mean", mean, x.shape, along, 0.0), _per("var", var, x.shape, along, 1.0)
    gamma, beta = _per("weight", weight, x.shape, along, 1.0), _per("bias", bias, x.shape, along, 0.0)
    return np.asarray(gamma * ((x - mean) * _rstd(var, eps)) + beta)


def inference_backward(
    x: ArrayLike,
    dy: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
) -> Backward:
    """Carry dy back through `inference`, whose statistics are constants: no value depends on its neighbours.

    dx = dy·γ/√(var + eps), dγ = Σdy·x̂, dβ = Σdy. Shapes, dtypes and what raises as in `inference`.

    Example:
        >>> inference_backward([[18.0], [2.0]], [[0.5], [1.0]], [10.0], [16.0], [4.0], eps=0).dx.tolist()
        [[0.5], [1.0]]
    """
    x = np.asarray(x, dtype=np.float64)
    _, _, along = _layout("batch", x.shape, None, ())
    dy = _like(dy, x.shape)
    gamma = _per("weight", weight, x.shape, along, 1.0)
    rstd = _rstd(_per("var", var, x.shape, along, 1.0), eps)
    xhat = inference(x, mean, var, eps=eps)
    return Backward(
        dx=np.asarray(dy * gamma * rstd),
        dweight=_sum_along(dy * xhat, along),
        dbias=_sum_along(dy, along),
    )


def fold(weight: ArrayLike, bias: ArrayLike | None, a: ArrayLike, c: ArrayLike) -> tuple[Array, Array]:
    """Fold y = a·z + c into the linear or convolution layer z = W·x + b before it.

    W′ = a·W for each output channel, b′ = a·b + c: the layer's own bias is scaled too.

    Args:
        weight: W, (out, in, *kernel).
        bias: b, (out,); None is 0.
        a: one per output channel, (out,); so is c.
        c: as a.

    Raises:
        ShapeError: the four do not agree on the number of output channels.

    Example:
        >>> [v.tolist() for v in fold([[2.0]], [3.0], [0.5], [-1.0])]
        [[[1.0]], [0.5]]
    """
    weight = np.asarray(weight, np.float64)
    a, c = np.asarray(a, np.float64), np.asarray(c, np.float64)
    out = weight.shape[:1]
    b = np.zeros(out) if bias is None else np.asarray(bias, np.float64)
    if not out == b.shape == a.shape == c.shape:
        given = f"the weight has shape {weight.shape}, the bias {b.shape}, a {a.shape} and c {c.shape}"
        raise ShapeError(
            given, "one value of each per output channel", "fold a norm into the layer that feeds it"
        )
    return a.reshape(-1, *[1] * (weight.ndim - 1)) * weight, a * b + c


def stored_variance(var: ArrayLike, count: ArrayLike, correction: int = 1) -> Array:
    """Turn the population variance of `count` values into the one that is stored: var·n/(n − correction).

    A correction of 1 gives the unbiased variance, 0 the population variance itself; float64, any shape.

    Raises:
        ArgumentError: there are not more values than the correction.

    Example:
        >>> float(stored_variance(1.25, 4))
        1.6666666666666667
    """
    count = np.asarray(count, np.float64)
    if bool(np.any(count <= correction)):
        given = f"the variance of n = {count.min():g} cannot be stored with a correction of {correction:g}"
        raise ArgumentError(given, "n above the correction", "give more values, or a correction of 0")
    return np.asarray(np.asarray(var, np.float64) * count / (count - correction))


def running_update(
    old: ArrayLike,
    new: ArrayLike,
    momentum: float | None,
    *,
    weighs: Weighs = "new",
    updates: int = 0,
) -> Array:
    """Blend a batch's statistic into the running one.

    running = (1 − m)·old + m·new, where m is the weight of the new value. Frameworks disagree about which of
    the two weights `momentum` is: `weighs` says it. A momentum of None is the plain average of all batches,
    m = 1/(updates + 1). Variances are averaged as variances, never as standard deviations.

    Args:
        old: the running mean or variance before; any shape, float64.
        new: the batch's own; for the variance, what `stored_variance` gives.
        momentum: from 0 to 1, or None.
        weighs: whether momentum is the weight of the new value or of the old one.
        updates: how many batches went into `old`; matters only where momentum is None.

    Raises:
        ArgumentError: momentum outside [0, 1].

    Example:
        >>> float(running_update(0.0, 10.0, 0.1)), float(running_update(0.0, 10.0, 0.1, weighs="old"))
        (1.0, 9.0)
    """
    old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
    if momentum is None:
        return np.asarray(old + (new - old) / (updates + 1))
    if not 0.0 <= momentum <= 1.0:
        raise ArgumentError(
            f"momentum is {momentum:g}", "a weight from 0 to 1", "check what your framework weighs"
        )
    of_old, of_new = (1.0 - momentum, momentum) if weighs == "new" else (momentum, 1.0 - momentum)
    return np.asarray(of_old * old + of_new * new)


def weight_left(momentum: float, updates: int) -> float:
    """Say what the initial state still weighs after k updates with weight m for the new value: (1 − m)^k.

    Example:
        >>> round(weight_left(0.1, 3), 3)
        0.729
    """
    return float((1.0 - momentum) ** updates)


def debias(running: ArrayLike, initial: ArrayLike, momentum: float, updates: int) -> Array:
    """Take the initial state out of a running average.

    debiased = (running − w·initial)/(1 − w), with w = (1 − m)^k after k updates of weight m.

    Raises:
        ArgumentError: nothing but the initial state is in the average.

    Example:
        >>> float(debias(1.9, 1.0, 0.1, 1).round(12))
        10.0
    """
    # 1 − w, without the cancellation that a small momentum would bring.
    gained = -math.expm1(updates * math.log1p(-momentum)) if momentum < 1.0 else float(updates > 0)
    if gained == 0.0:
        given = f"after {updates} updates with momentum {momentum:g} the average is the initial state alone"
        raise ArgumentError(given, "at least one update with a positive momentum", "run some batches first")
    started = weight_left(momentum, updates) * np.asarray(initial, np.float64)
    return np.asarray((np.asarray(running, np.float64) - started) / gained)


def shares(
    norm: Name, shape: Sequence[int], *, groups: int | None = None, axes: Sequence[int] = (-1,)
) -> NDArray[np.intp]:
    """Say which cells share a statistic: each cell's index into `Forward.mean.ravel()`.

    Arguments and what raises as in `forward`; the result has the shape of x.

    Example:
        >>> shares("group", (1, 4), groups=2).tolist()
        [[0, 0, 1, 1]]
    """
    split, averaged, _ = _layout(norm, tuple(shape), groups, tuple(axes))
    kept = [1 if axis in averaged else n for axis, n in enumerate(split)]
    index = np.arange(math.prod(kept), dtype=np.intp).reshape(kept)
    return np.broadcast_to(index, split).reshape(tuple(shape))


def _layout(
    norm: str, shape: tuple[int, ...], groups: int | None, axes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Say how x is split, which axes of the split are averaged, and along which axes of x γ and β vary."""
    rank = len(shape)
    if norm in {"layer", "rms"}:
        averaged = tuple(sorted({axis % rank for axis in axes if -rank <= axis < rank}))
        if not axes or len(averaged) != len(axes):
            raise ShapeError(f"{norm} norm over axes {axes} of shape {shape}", "different axes that x has")
        return shape, averaged, averaged
    if norm not in {"batch", "instance", "group"}:
        raise ArgumentError(f"there is no norm named {norm!r}", "batch, layer, group, instance or rms")
    if rank < 2:
        raise ShapeError(
            f"x has shape {shape}", f"(N, C, *space) for {norm} norm", "put one feature as (N, 1)"
        )
    n, channels, *space = shape
    if norm == "batch":
        return shape, (0, *range(2, rank)), (1,)
    if norm == "instance":
        return shape, tuple(range(2, rank)), (1,)
    if groups is None or groups < 1 or channels % groups:
        raise ShapeError(f"group norm of {channels} channels in {groups} groups", "groups of equal size")
    return (n, groups, channels // groups, *space), tuple(range(2, rank + 1)), (1,)


def _centre(
    values: Array, valid: Mask, averaged: tuple[int, ...], *, centre: bool
) -> tuple[Array, Array, Array]:
    """Return how many values share each statistic, their mean, and the values less their mean (masked: 0)."""
    count = np.asarray(np.sum(valid, axis=averaged, keepdims=True, dtype=np.float64))
    if not centre:
        return count, np.asarray(np.where(count > 0, 0.0, np.nan)), values
    # One of the values is subtracted before anything is summed: constants give exactly 0, and what is summed
    # is no larger than the spread of the data, however far they lie from 0.
    shift = np.max(values, axis=averaged, keepdims=True, where=valid, initial=-np.inf)
    shift = np.where(count > 0, shift, 0.0)
    shifted = np.asarray(np.where(valid, values - shift, 0.0))
    rest = _mean_of(shifted, count, averaged)
    return count, np.asarray(shift + rest), np.asarray(np.where(valid, shifted - rest, 0.0))


def _mean_of(values: Array, count: Array, averaged: tuple[int, ...]) -> Array:
    """Return the mean over the averaged axes, kept as axes of extent 1; NaN where nothing is counted."""
    total = np.sum(values, axis=averaged, keepdims=True)
    return np.asarray(np.where(count > 0, total, np.nan) / np.maximum(count, 1.0))


def _rstd(var: Array, eps: float) -> Array:
    """Return 1/√(var + eps), refused where there is no such number; NaN stays NaN."""
    if not (eps >= 0.0 and np.isfinite(eps)):
        raise ArgumentError(f"eps is {eps:g}", "0 or a positive number")
    if bool(np.any(var + eps <= 0.0)):
        given = f"a variance is {np.nanmin(var):g} and eps is {eps:g}"
        raise ArgumentError(given, "var + eps above 0, because its root divides", "give a positive eps")
    return np.asarray(1.0 / np.sqrt(var + eps))


def _valid(mask: ArrayLike | None, shape: tuple[int, ...]) -> Mask:
    """Return which places of x count."""
    if mask is None:
        return np.ones(shape, dtype=np.bool_)
    try:
        return np.array(np.broadcast_to(np.asarray(mask, dtype=np.bool_), shape))
    except ValueError:
        raise ShapeError(f"the mask has shape {np.shape(mask)}", f"one that broadcasts to {shape}") from None


def _per(
    name: str, value: ArrayLike | None, shape: tuple[int, ...], along: tuple[int, ...], absent: float
) -> Array:
    """Return a parameter or a stored statistic so that it broadcasts against x."""
    needed = tuple(shape[axis] for axis in along)
    given = np.full(needed, absent) if value is None else np.asarray(value, np.float64)
    if given.shape != needed:
        raise ShapeError(f"the {name} has shape {given.shape}", f"{needed}, as x has shape {shape}")
    return given.reshape([n if axis in along else 1 for axis, n in enumerate(shape)])


def _like(dy: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Return dy, refused unless it has the shape of x."""
    dy = np.asarray(dy, np.float64)
    if dy.shape != shape:
        raise ShapeError(f"dy has shape {dy.shape}", f"{shape}, the shape of x")
    return dy


def _sum_along(values: Array, along: tuple[int, ...]) -> Array:
    """Sum over the places that share one parameter; the result has the parameter's shape."""
    return np.asarray(np.sum(values, axis=tuple(axis for axis in range(values.ndim) if axis not in along)))
