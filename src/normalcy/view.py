"""Axes, shape and strides brought into the one strided view that every kernel walks.

Integers only, no torch. Backends that leave strides to PyTorch (`kernels.eager`) need only the `Layout`.

    element address = i·sᵢ + o·sₒ + f·s_f + n·sₙ        statistic index = (i, f)        reduce over o and n
    parameter index = o·pₒ + f·p_f + (n // step)·pₙ     (stride 0: shared)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

from normalcy.axes import Layout, Role

# Below this many contiguous values per statistic, one accumulator per column beats one per row.
_SHORT_ROW = 64


class Axis(NamedTuple):
    """`extent` steps of `stride` elements each."""

    extent: int
    stride: int


class View(NamedTuple):
    """How to walk memory: reduce `outer` and `inner`; one statistic for each (instance, feature).

    `param` holds the parameter's strides along (outer, feature, inner); along inner it moves once every
    `step` values. `walk` says which of the two ways is fast: "rows" reduces along the contiguous axis,
    "columns" keeps an accumulator for each of the contiguous feature × inner columns.

    Example:
        >>> from normalcy.axes import OVER_BATCH
        >>> view = view_of(OVER_BATCH.resolve((8, 3, 5, 5)), (75, 25, 5, 1))
        >>> view.outer, view.feature, view.inner
        (Axis(extent=8, stride=75), Axis(extent=3, stride=25), Axis(extent=25, stride=1))
    """

    instance: Axis
    outer: Axis
    feature: Axis
    inner: Axis
    param: tuple[int, int, int]
    step: int
    walk: Literal["rows", "columns"]

    def address(self, i: int, o: int, f: int, n: int) -> int:
        """Offset in elements of the value at (instance, outer, feature, inner)."""
        return (
            i * self.instance.stride + o * self.outer.stride + f * self.feature.stride + n * self.inner.stride
        )

    def parameter(self, o: int, f: int, n: int) -> int:
        """Index of the weight and bias that belong to that value."""
        po, pf, pn = self.param
        return o * po + f * pf + n // self.step * pn


class _Run(NamedTuple):
    """Neighbouring axes merged into one: extent, stride, and how the parameter index moves along it."""

    extent: int
    stride: int
    param: int
    step: int


_ONE = _Run(1, 0, 0, 1)


def split_strides(layout: Layout, strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of the input, with the channel axis split as in `layout.shape`."""
    if Role.GROUP not in layout.roles:
        return tuple(strides)
    within = layout.shape[layout.roles.index(Role.CHANNEL)]
    return (strides[0], strides[1] * within, *strides[1:])


def view_of(layout: Layout, strides: Sequence[int]) -> View | None:
    """The view of an input with these strides (in elements, axis by axis), or None if no view describes it.

    None means: copy the input once into contiguous memory, of which there always is a view, and ask again.
    """
    axes = _sorted_axes(layout, split_strides(layout, strides))
    kept = [(run, role) for run, role, reduced in axes if not reduced]
    examples = [run for run, role in kept if role is Role.EXAMPLE]
    features = [run for run, role in kept if role is not Role.EXAMPLE]
    if examples and not features and (axes[-1][0] is examples[-1]):
        features = [examples.pop()]  # the fastest axis is kept: walk along it
    instance, feature = _merge(examples), _merge(features)
    if len(instance) > 1 or len(feature) > 1:
        return None
    edge = feature[0].stride if feature else None
    reduced = [run for run, _, is_reduced in axes if is_reduced]
    if edge is None:
        runs = _merge(reduced)
        outer, inner = runs[:-1], runs[-1:]
    else:
        outer = _merge([run for run in reduced if run.stride >= edge])
        inner = _merge([run for run in reduced if run.stride < edge])
    if len(outer) > 1 or len(inner) > 1:
        return None
    i, o, f, n = (runs[0] if runs else _ONE for runs in (instance, outer, feature, inner))
    if o.step != 1 or f.step != 1 or i.param:
        return None
    return View(
        Axis(i.extent, i.stride),
        Axis(o.extent, o.stride),
        Axis(f.extent, f.stride),
        Axis(n.extent, n.stride),
        (o.param, f.param, n.param),
        n.step,
        _walk(o, f, n),
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array of this shape, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _sorted_axes(layout: Layout, strides: Sequence[int]) -> list[tuple[_Run, Role, bool]]:
    """The axes longer than one, slowest first, each with its role and whether it is averaged over."""
    param = _parameter_strides(layout.parameter)
    axes = [
        (_Run(extent, strides[k], param[k], 1), layout.roles[k], k in layout.reduce)
        for k, extent in enumerate(layout.shape)
        if extent != 1
    ]
    return sorted(axes, key=lambda axis: -axis[0].stride)


def _parameter_strides(parameter: Sequence[int]) -> tuple[int, ...]:
    """Strides of the contiguous parameter over the input's axes; 0 where it does not vary."""
    dense = contiguous_strides(parameter)
    return tuple(0 if extent == 1 else stride for extent, stride in zip(parameter, dense, strict=True))


def _merge(runs: list[_Run]) -> list[_Run]:
    """Merge runs, slowest first, wherever two walk memory and parameters as one."""
    merged: list[_Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        joined = _join(last, run) if last else None
        if joined:
            merged[-1] = joined
        else:
            merged.append(run)
    return merged


def _join(slow: _Run, fast: _Run) -> _Run | None:
    if slow.stride != fast.stride * fast.extent:
        return None
    extent = slow.extent * fast.extent
    if fast.param == 0 and slow.param != 0:  # the parameter moves once in so many fast runs
        return _Run(extent, fast.stride, slow.param, slow.step * fast.extent)
    if fast.param == 0 and slow.param == 0:
        return _Run(extent, fast.stride, 0, 1)
    if fast.step > 1 and slow.param == fast.param * (fast.extent // fast.step):
        return _Run(extent, fast.stride, fast.param, fast.step)
    if fast.step == slow.step == 1 and slow.param == fast.param * fast.extent:
        return _Run(extent, fast.stride, fast.param, 1)
    return None


def _walk(outer: _Run, feature: _Run, inner: _Run) -> Literal["rows", "columns"]:
    width = inner.extent * inner.stride if inner.extent > 1 else 1
    contiguous = feature.extent > 1 and feature.stride == width
    return "columns" if contiguous and outer.extent > 1 and inner.extent < _SHORT_ROW else "rows"
