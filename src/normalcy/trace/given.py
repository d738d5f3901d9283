"""What is traced, checked once: the array, its norm, its parameters, and which cells share a statistic.

Not for layers: a tensor is not taken, and nothing here is fast.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normalcy import definition
from normalcy.definition import Array, Mask, Name
from normalcy.errors import ArgumentError, DataError, ShapeError

NORMS: tuple[Name, ...] = get_args(Name)
MOST = 250_000
"""How many values a trace takes: every one of them is kept at every step."""

_AVERAGED = {
    "batch": "everything but axis 1",
    "instance": "every axis from 2 on",
    "group": "the channels of a group and every axis from 2 on",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """γ or β: `full` over the extents that the definition wants; `kept` is `given` with shared axes as 1.

    `number` is there where one number was given for all places.
    """

    full: Array
    kept: tuple[int, ...]
    given: tuple[int, ...]
    number: float | None = None

    def gradient(self, full: Array) -> Array:
        """Sum a gradient over the places that share one value, into the shape that was given."""
        shared = tuple(axis for axis, n in enumerate(self.kept) if n == 1)
        return np.asarray(np.sum(full, axis=shared, keepdims=True)).reshape(self.given)


@dataclass(frozen=True, slots=True)
class Given:
    """One normalization to trace; `single` is one feature, kept as (N, 1) and reported without the 1."""

    norm: Name
    x: Array
    single: bool
    gamma: Parameter
    beta: Parameter
    eps: float
    groups: int | None
    axes: tuple[int, ...]
    dy: Array | None
    mask: Mask
    masked: bool
    shares: NDArray[np.intp]
    running: tuple[Array, Array] | None

    def forward(self, x: Array | None = None, *, eps: float | None = None) -> definition.Forward:
        """Normalize x, or other values of its shape, perhaps with another eps."""
        return definition.forward(
            self.norm,
            self.x if x is None else x,
            self.gamma.full,
            self.beta.full,
            eps=self.eps if eps is None else eps,
            groups=self.groups,
            axes=self.axes,
            mask=self.mask,
        )

    def backward(self, dy: Array) -> definition.Backward:
        """Carry dy back."""
        return definition.backward(
            self.norm,
            self.x,
            dy,
            self.gamma.full,
            eps=self.eps,
            groups=self.groups,
            axes=self.axes,
            mask=self.mask,
        )

    def centred(self) -> Given:
        """The same with the mean taken out: for rms norm, layer norm."""
        return replace(self, norm="layer") if self.norm == "rms" else self


def check(
    x: ArrayLike,
    *,
    norm: str,
    groups: int | None,
    axes: int | Sequence[int] | None,
    gamma: ArrayLike,
    beta: ArrayLike,
    eps: float,
    dy: ArrayLike | None,
    mask: ArrayLike | None,
    running: tuple[ArrayLike, ArrayLike] | None,
) -> Given:
    """Check what is given and bring it to one form; `trace` says what it is and what raises."""
    values = _array("values", x)
    single = values.ndim == 1 and norm == "batch"
    values = values[:, None] if single else values
    named, axes = _named(norm, groups, axes)
    shares = definition.shares(named, values.shape, groups=groups, axes=axes)
    averaged = sorted(axis % values.ndim for axis in axes) if named in {"layer", "rms"} else [1]
    valid = np.ones(values.shape, np.bool_) if mask is None else _mask(mask, values.shape, single=single)
    _finite("values", values[valid])
    scale = _parameter("gamma", gamma, averaged, values.shape)
    shift = _parameter("beta", beta, averaged, values.shape)
    if named == "rms" and shift.full.any():
        raise ArgumentError("rms norm got a β", "none, because it scales and does not shift", "leave β out")
    _finite("eps", np.asarray(eps, np.float64))
    return Given(
        norm=named,
        x=values,
        single=single,
        gamma=scale,
        beta=shift,
        eps=float(eps),
        groups=groups,
        axes=axes,
        dy=None if dy is None else _gradient(dy, values.shape, valid, single=single),
        mask=valid,
        masked=mask is not None,
        shares=shares,
        running=None if running is None else _stored(running, named, values.shape),
    )


def _array(name: str, value: ArrayLike) -> Array:
    try:
        read = np.asarray(value, np.float64)
    except (ValueError, TypeError, OverflowError):
        given = f"the {name} are no array of numbers"
        raise ShapeError(given, "lists of numbers, equally long at each level", "even them out") from None
    if not read.size:
        raise DataError(f"there are no {name}", "at least one number")
    if read.size > MOST:
        given, do = f"there are {read.size:,} {name}", "trace a part of them"
        raise DataError(given, f"at most {MOST:,}, because each is followed through every step", do)
    return read


def _finite(name: str, values: Array) -> None:
    bad = values[~np.isfinite(values)]
    if bad.size:
        raise DataError(f"{bad.ravel()[0]} is among the {name}", "finite numbers", "take it out")


def _named(norm: str, groups: int | None, axes: int | Sequence[int] | None) -> tuple[Name, tuple[int, ...]]:
    named = next((name for name in NORMS if name == norm), None)
    if named is None:
        raise ArgumentError(f"there is no norm named {norm!r}", "batch, layer, group, instance or rms")
    if groups is not None and named != "group":
        raise ArgumentError(f"{named} norm is given groups", "them for group norm alone", "leave them out")
    if groups is None and named == "group":
        raise ArgumentError(
            "group norm is not told into how many groups", "a number of groups", "give groups (--groups)"
        )
    if axes is None:
        return named, (-1,)
    if named in _AVERAGED:
        needed = f"none, because it averages over {_AVERAGED[named]}"
        raise ArgumentError(f"{named} norm is given axes", needed, "leave them out, or name layer norm")
    try:
        return named, (axes,) if isinstance(axes, int) else tuple(operator.index(axis) for axis in axes)
    except TypeError:
        raise ArgumentError(f"the axes are {axes!r}", "whole numbers, as in (1, 2)") from None


def _parameter(name: str, value: ArrayLike, averaged: Sequence[int], shape: tuple[int, ...]) -> Parameter:
    """Spread γ or β: a number for all, one per place, or one per channel where more axes are averaged."""
    read = _array(name, value)
    _finite(name, read)
    extents = tuple(shape[axis] for axis in averaged)
    if read.ndim == 0:
        return Parameter(np.full(extents, float(read)), extents, extents, float(read))
    kept = read.shape
    if len(extents) > 1 and read.ndim == 1 and 1 in averaged:
        kept = tuple(n if axis == 1 else 1 for axis, n in zip(averaged, extents, strict=True))
    fits = len(kept) == len(extents) and all(k in {1, n} for k, n in zip(kept, extents, strict=True))
    if not fits or math.prod(kept) != read.size:
        needed = f"a number or the shape {extents}, as x has shape {shape}"
        raise ShapeError(f"{name} has shape {read.shape}", needed)
    return Parameter(np.array(np.broadcast_to(read.reshape(kept), extents)), kept, read.shape)


def _mask(mask: ArrayLike, shape: tuple[int, ...], *, single: bool) -> Mask:
    read = np.asarray(mask)
    if read.dtype != np.bool_ and not np.isin(read, (0, 1)).all():
        raise DataError("the mask has other values than true and false", "true where a value counts")
    valid = read.astype(np.bool_)
    valid = valid[:, None] if single and valid.ndim == 1 else valid
    try:
        valid = np.array(np.broadcast_to(valid, shape))
    except ValueError:
        raise ShapeError(f"the mask has shape {read.shape}", f"one that broadcasts to {shape}") from None
    if not valid.any():
        raise DataError("the mask leaves no value", "at least one that counts")
    return valid


def _gradient(dy: ArrayLike, shape: tuple[int, ...], valid: Mask, *, single: bool) -> Array:
    read = _array("dy", dy)
    if single and read.ndim == 1:
        if read.shape != shape[:1]:
            needed = f"{shape[0]}, one number per value"
            raise ShapeError(f"dy has length {len(read)}", needed, "give dy for each value")
        read = read[:, None]
    if read.shape != shape:
        raise ShapeError(f"dy has shape {read.shape}", f"{shape}, the shape of x", "give dy for each value")
    _finite("dy", read[valid])
    return read


def _stored(running: tuple[ArrayLike, ArrayLike], norm: Name, shape: tuple[int, ...]) -> tuple[Array, Array]:
    if norm != "batch":
        given = f"{norm} norm is given running statistics"
        raise ArgumentError(given, "batch norm, whose inference uses them", "leave them out")
    mean, var = (_array("running statistics", value) for value in running)
    for value in (mean, var):
        _finite("running statistics", value)
        if value.shape not in {(), (shape[1],)}:
            needed = f"a number or one for each of {shape[1]} channels, as x has shape {shape}"
            raise ShapeError(f"a running statistic has shape {value.shape}", needed)
    if np.any(var < 0):
        raise ArgumentError(f"the running variance is {np.min(var):g}", "0 or a positive number")
    mean, var = (np.array(np.broadcast_to(value, shape[1:2])) for value in (mean, var))
    return mean, var
