"""A normalizer as a value: axes × where statistics come from × centred or not.

A named norm is a row of the table at the end. Parameters, eps and buffers are read at call time and are not
part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from normalcy.axes import OVER_BATCH, OVER_CHANNELS, OVER_SPACE, Axes, over_features, over_groups


class Origin(Enum):
    """Where the statistics come from. "Train" and "eval" are nothing but this choice."""

    DATA = "data"
    STORED = "stored"


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalizer.

    Attributes:
        name: the field's word for it.
        axes: which values share a statistic.
        train: where statistics come from in training mode.
        infer: where they come from in evaluation mode.
        center: subtract the mean; False: divide by the root mean square.

    Example:
        >>> batch.infer, layer(1).infer, rms(1).center
        (<Origin.STORED: 'stored'>, <Origin.DATA: 'data'>, False)
    """

    name: str
    axes: Axes
    train: Origin = Origin.DATA
    infer: Origin = Origin.DATA
    center: bool = True


batch = Norm("batch", OVER_BATCH, infer=Origin.STORED)
instance = Norm("instance", OVER_SPACE)
tracked_instance = replace(instance, infer=Origin.STORED)  # as PyTorch's, with track_running_stats
channels = Norm("layer", OVER_CHANNELS)  # layer norm over the channels of each position (NCHW)


# Made once each, and in dictionaries rather than a cache decorator, which compilers warn about.
_layer: dict[int, Norm] = {}
_rms: dict[int, Norm] = {}
_group: dict[int, Norm] = {}


def layer(features: int) -> Norm:
    """Layer norm over the last `features` axes."""
    if features not in _layer:
        _layer[features] = Norm("layer", over_features(features))
    return _layer[features]


def rms(features: int) -> Norm:
    """RMS norm over the last `features` axes: layer norm without the mean."""
    if features not in _rms:
        _rms[features] = Norm("rms", over_features(features), center=False)
    return _rms[features]


def group(groups: int) -> Norm:
    """Group norm with this many groups of channels."""
    if groups not in _group:
        _group[groups] = Norm("group", over_groups(groups))
    return _group[groups]
