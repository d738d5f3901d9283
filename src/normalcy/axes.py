"""Which axes share one statistic: named averaging rules, resolved against a shape.

Integers only, no torch. Where values lie in memory is `view`'s business, not this module's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from normalcy.errors import ArgumentError, ShapeError


class Role(Enum):
    """What an axis means to a norm."""

    EXAMPLE = "example"
    GROUP = "group"
    CHANNEL = "channel"
    SPACE = "space"
    FEATURE = "feature"


class Layout(NamedTuple):
    """An averaging rule, resolved against one shape.

    Attributes:
        shape: the input's shape, the channel axis split into (groups, channels) where there are groups.
        roles: what each axis of `shape` means.
        reduce: the axes of `shape` that are averaged over.
        statistic: `shape` with the averaged axes at extent 1.
        parameter: `shape` with every axis at extent 1 over which weight and bias do not vary.
        values: how many values share one statistic.
        weight: the shape that weight and bias have as parameters of a layer.
    """

    shape: tuple[int, ...]
    roles: tuple[Role, ...]
    reduce: tuple[int, ...]
    statistic: tuple[int, ...]
    parameter: tuple[int, ...]
    values: int
    weight: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """An averaging rule: which roles are averaged over, and over which the parameters vary.

    Attributes:
        average: the roles whose axes share one statistic.
        parameters: the roles over which weight and bias vary.
        groups: split the channels (axis 1) into this many groups; None: no such axis.
        features: how many trailing axes are features, all others being examples (layer and RMS norm);
            None: axis 0 is the example, axis 1 the channel, the others space.

    Example:
        >>> layout = over_groups(2).resolve((8, 6, 5, 5))
        >>> layout.shape, layout.reduce, layout.values
        ((8, 2, 3, 5, 5), (2, 3, 4), 75)
    """

    average: frozenset[Role]
    parameters: frozenset[Role]
    groups: int | None = None
    features: int | None = None

    @property
    def outlives_example(self) -> bool:
        """Whether a statistic is shared between examples: only then can one be stored for inference.

        Decided from the rule and never from an extent, which is 1 by accident at batch size one.
        """
        return Role.EXAMPLE in self.average

    def resolve(self, shape: tuple[int, ...], *, remember: bool = True) -> Layout:
        """Resolve the rule against `shape`; `remember=False` where extents are symbols, not numbers.

        Raises:
            ShapeError: the shape has too few axes, or its channels do not divide into the groups.
        """
        return _remembered(self, shape) if remember else _resolve(self, shape)


OVER_BATCH = Axes(frozenset({Role.EXAMPLE, Role.SPACE}), frozenset({Role.CHANNEL}))
OVER_SPACE = Axes(frozenset({Role.SPACE}), frozenset({Role.CHANNEL}))
OVER_CHANNELS = Axes(frozenset({Role.CHANNEL}), frozenset({Role.CHANNEL}))


def over_groups(groups: int) -> Axes:
    """Average over the channels of one group, and space (group norm).

    Raises:
        ArgumentError: fewer than one group.
    """
    if groups < 1:
        raise ArgumentError(f"num_groups is {groups}", "1 or more")
    roles = frozenset({Role.CHANNEL, Role.SPACE})
    return Axes(roles, frozenset({Role.GROUP, Role.CHANNEL}), groups=groups)


def over_features(features: int) -> Axes:
    """Average over the last `features` axes of each example (layer and RMS norm)."""
    roles = frozenset({Role.FEATURE})
    return Axes(roles, roles, features=features)


def _resolve(axes: Axes, shape: tuple[int, ...]) -> Layout:
    split, roles = _named(axes, shape)
    reduce = tuple(i for i, role in enumerate(roles) if role in axes.average)
    varies = tuple(e for e, r in zip(split, roles, strict=True) if r in axes.parameters)
    return Layout(
        shape=split,
        roles=roles,
        reduce=reduce,
        statistic=tuple(1 if i in reduce else extent for i, extent in enumerate(split)),
        parameter=tuple(e if r in axes.parameters else 1 for e, r in zip(split, roles, strict=True)),
        values=_product(split[i] for i in reduce),
        weight=varies if axes.features is not None else (_product(varies),),
    )


def _product(extents: Iterable[int]) -> int:
    """As `math.prod`; but compilers follow this one where extents are symbols."""
    product = 1
    for extent in extents:
        product *= extent
    return product


_remembered = lru_cache(maxsize=4096)(_resolve)


def _named(axes: Axes, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Role, ...]]:
    """The shape with the channel axis split, and the role of each of its axes."""
    if axes.features is not None:
        lead = len(shape) - axes.features
        if lead < 0:
            raise ShapeError(f"the input has shape {shape}", f"at least {axes.features} axes")
        return shape, (Role.EXAMPLE,) * lead + (Role.FEATURE,) * axes.features
    if len(shape) < 2:
        raise ShapeError(f"the input has shape {shape}", "at least 2 axes, (examples, channels, ...)")
    space = shape[2:]
    roles = (Role.SPACE,) * len(space)
    if axes.groups is None:
        return shape, (Role.EXAMPLE, Role.CHANNEL, *roles)
    if shape[1] % axes.groups:
        raise ShapeError(
            f"{shape[1]} channels (axis 1 of {shape}) in {axes.groups} groups",
            "a number of channels that the groups divide",
            "choose another num_groups",
        )
    within = shape[1] // axes.groups
    return (shape[0], axes.groups, within, *space), (Role.EXAMPLE, Role.GROUP, Role.CHANNEL, *roles)
