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


# The usual ones ready-made, in tables that never change: compilers guard on them.
_LAYER = {n: Norm("layer", over_features(n)) for n in range(1, 6)}
_RMS = {n: Norm("rms", over_features(n), center=False) for n in range(1, 6)}
_GROUP = {n: Norm("group", over_groups(n)) for n in (1, 2, 4, 8, 16, 32, 64)}


def layer(features: int) -> Norm:
    """Layer norm over the last `features` axes."""
    return _LAYER.get(features) or Norm("layer", over_features(features))


def rms(features: int) -> Norm:
    """RMS norm over the last `features` axes: layer norm without the mean."""
    return _RMS.get(features) or Norm("rms", over_features(features), center=False)


def group(groups: int) -> Norm:
    """Group norm with this many groups of channels."""
    return _GROUP.get(groups) or Norm("group", over_groups(groups))
