"""The strided view, by enumeration: each address, statistic and parameter against the shape's indices."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalcy.axes import (
    OVER_BATCH,
    OVER_CHANNELS,
    OVER_SPACE,
    Axes,
    Layout,
    over_features,
    over_groups,
)
from normalcy.view import View, contiguous_strides, split_strides, view_of

N, C, H, W, G, D = 2, 6, 3, 5, 3, 7
NCHW, NHWC = (C * H * W, H * W, W, 1), (H * W * C, 1, W * C, C)
FOUR = (N, C, H, W)

# norm, layout: rule, shape, strides, (instance, outer, feature, inner) extents, parameter strides, step, walk
NINE = {
    "batch NCHW": (OVER_BATCH, FOUR, NCHW, (1, N, C, H * W), (0, 1, 0), 1, "columns"),
    "batch NHWC": (OVER_BATCH, FOUR, NHWC, (1, N * H * W, C, 1), (0, 1, 0), 1, "columns"),
    "instance NCHW": (OVER_SPACE, FOUR, NCHW, (N, 1, C, H * W), (0, 1, 0), 1, "rows"),
    "instance NHWC": (OVER_SPACE, FOUR, NHWC, (N, H * W, C, 1), (0, 1, 0), 1, "columns"),
    "group NCHW": (over_groups(G), FOUR, NCHW, (N, 1, G, C // G * H * W), (0, C // G, 1), H * W, "rows"),
    "group NHWC": (over_groups(G), FOUR, NHWC, (N, H * W, G, C // G), (0, C // G, 1), 1, "columns"),
    "layer last axis": (over_features(1), (N, C, D), (C * D, D, 1), (N * C, 1, 1, D), (0, 0, 1), 1, "rows"),
    "layer over channels NCHW": (OVER_CHANNELS, FOUR, NCHW, (N, C, H * W, 1), (1, 0, 0), 1, "columns"),
    "layer over C,H,W": (over_features(3), FOUR, NCHW, (N, 1, 1, C * H * W), (0, 0, 1), 1, "rows"),
}


def by_definition(
    layout: Layout, strides: tuple[int, ...]
) -> Counter[frozenset[tuple[tuple[int, int], int]]]:
    """For each statistic the addresses of its values, each with its parameter's index."""
    strides = split_strides(layout, strides)
    parameters = contiguous_strides(layout.parameter)
    groups: dict[tuple[int, ...], Counter[tuple[int, int]]] = defaultdict(Counter)
    for index in product(*map(range, layout.shape)):
        address = sum(i * s for i, s in zip(index, strides, strict=True))
        parameter = sum(i * s for i, s, n in zip(index, parameters, layout.parameter, strict=True) if n > 1)
        kept = tuple(0 if axis in layout.reduce else i for axis, i in enumerate(index))
        groups[kept][address, parameter] += 1
    return Counter(frozenset(group.items()) for group in groups.values())


def by_view(view: View) -> Counter[frozenset[tuple[tuple[int, int], int]]]:
    groups: dict[tuple[int, int], Counter[tuple[int, int]]] = defaultdict(Counter)
    extents = (view.instance.extent, view.outer.extent, view.feature.extent, view.inner.extent)
    for i, o, f, n in product(*map(range, extents)):
        groups[i, f][view.address(i, o, f, n), view.parameter(o, f, n)] += 1
    return Counter(frozenset(group.items()) for group in groups.values())


@pytest.mark.parametrize("name", NINE)
def test_the_nine_rows_agree_with_the_definition_in_every_address_and_index(name: str) -> None:
    rule, shape, strides, extents, param, step, walk = NINE[name]
    layout = rule.resolve(shape)
    view = view_of(layout, strides)
    assert view is not None
    assert (view.instance.extent, view.outer.extent, view.feature.extent, view.inner.extent) == extents
    assert (view.param, view.step, view.walk) == (param, step, walk)
    assert by_view(view) == by_definition(layout, strides)


def test_long_contiguous_rows_are_walked_as_rows() -> None:
    view = view_of(OVER_BATCH.resolve((2, 3, 10, 10)), contiguous_strides((2, 3, 10, 10)))
    assert view is not None
    assert view.walk == "rows"


rules = st.sampled_from(
    [
        OVER_BATCH,
        OVER_SPACE,
        OVER_CHANNELS,
        over_groups(1),
        over_groups(2),
        over_features(1),
        over_features(2),
    ]
)
shapes = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda extents: (extents[0], 2 * extents[1], *extents[2:])  # an even number of channels, for the groups
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Axes, tuple[int, ...], tuple[int, ...]]:
    """A rule, a shape, and strides of axes in any order, with gaps and with stride 0."""
    rule, shape = draw(rules), draw(shapes)
    strides, step = [0] * len(shape), 1
    for axis in draw(st.permutations(range(len(shape)))):
        step *= draw(st.sampled_from([1, 1, 1, 2]))
        strides[axis] = step
        step *= shape[axis]
        if draw(st.integers(0, 9)) == 0:
            strides[axis] = 0
    return rule, shape, tuple(strides)


@given(placed())
def test_a_view_is_exactly_right_or_refused(case: tuple[Axes, tuple[int, ...], tuple[int, ...]]) -> None:
    rule, shape, strides = case
    layout = rule.resolve(shape)
    view = view_of(layout, strides)
    if view is not None:
        assert by_view(view) == by_definition(layout, strides)


@given(rules, shapes)
def test_contiguous_memory_always_has_a_view(rule: Axes, shape: tuple[int, ...]) -> None:
    layout = rule.resolve(shape)
    view = view_of(layout, contiguous_strides(shape))
    assert view is not None
    assert by_view(view) == by_definition(layout, contiguous_strides(shape))
    extents = view.instance.extent * view.outer.extent * view.feature.extent * view.inner.extent
    assert extents == prod(shape)


@given(
    shapes.filter(lambda shape: len(shape) == 4), st.sampled_from([OVER_BATCH, OVER_SPACE, over_groups(2)])
)
def test_channels_last_memory_has_a_view_for_every_channel_norm(shape: tuple[int, ...], rule: Axes) -> None:
    n, c, h, w = shape
    strides = (h * w * c, 1, w * c, c)
    layout = rule.resolve((n, c, h, w))
    view = view_of(layout, strides)
    assert view is not None
    assert by_view(view) == by_definition(layout, strides)


def test_a_strange_slice_has_no_view() -> None:
    shape = (2, 4, 3, 5)
    assert view_of(OVER_BATCH.resolve(shape), (1000, 100, 20, 1)) is None
