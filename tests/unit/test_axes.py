"""Axes: which axes share one statistic, by rule and shape."""

from __future__ import annotations

import pytest

from normalcy.axes import OVER_BATCH, OVER_CHANNELS, OVER_SPACE, Axes, over_features, over_groups
from normalcy.errors import ArgumentError, ShapeError


@pytest.mark.parametrize(
    ("axes", "shape", "reduce", "statistic", "parameter", "values"),
    [
        (OVER_BATCH, (4, 3, 5, 6), (0, 2, 3), (1, 3, 1, 1), (1, 3, 1, 1), 120),
        (OVER_BATCH, (4, 3), (0,), (1, 3), (1, 3), 4),
        (OVER_SPACE, (4, 3, 5, 6), (2, 3), (4, 3, 1, 1), (1, 3, 1, 1), 30),
        (OVER_CHANNELS, (4, 3, 5, 6), (1,), (4, 1, 5, 6), (1, 3, 1, 1), 3),
        (over_groups(2), (4, 6, 5), (2, 3), (4, 2, 1, 1), (1, 2, 3, 1), 15),
        (over_features(1), (4, 3, 5), (2,), (4, 3, 1), (1, 1, 5), 5),
        (over_features(2), (4, 3, 5), (1, 2), (4, 1, 1), (1, 3, 5), 15),
        (over_features(1), (7,), (0,), (1,), (7,), 7),
    ],
)
def test_a_rule_resolves_to_the_axes_that_are_averaged(
    axes: Axes,
    shape: tuple[int, ...],
    reduce: tuple[int, ...],
    statistic: tuple[int, ...],
    parameter: tuple[int, ...],
    values: int,
) -> None:
    layout = axes.resolve(shape)
    assert layout.reduce == reduce
    assert layout.statistic == statistic
    assert layout.parameter == parameter
    assert layout.values == values


def test_the_channel_axis_is_split_where_there_are_groups() -> None:
    assert over_groups(3).resolve((2, 6, 4)).shape == (2, 3, 2, 4)


@pytest.mark.parametrize("shape", [(1, 3, 4), (8, 3, 4)])
def test_only_statistics_shared_by_examples_outlive_one_whatever_the_extent(shape: tuple[int, ...]) -> None:
    rules = [OVER_BATCH, OVER_SPACE, OVER_CHANNELS, over_groups(3), over_features(1)]
    for rule in rules:
        rule.resolve(shape)
    assert [rule.outlives_example for rule in rules] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (OVER_BATCH, (3,), r"the input has shape \(3,\); needed: at least 2 axes"),
        (over_features(3), (2, 3), r"the input has shape \(2, 3\); needed: at least 3 axes"),
        (over_groups(4), (2, 6, 5), r"6 channels \(axis 1 of \(2, 6, 5\)\) in 4 groups; needed: .* divide"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_words(
    axes: Axes, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        axes.resolve(shape)


@pytest.mark.parametrize("groups", [0, -1])
def test_fewer_than_one_group_is_refused(groups: int) -> None:
    with pytest.raises(ArgumentError, match=f"num_groups is {groups}; needed: 1 or more"):
        over_groups(groups)
