"""The norms as layers: drop-in subclasses of PyTorch's own, with one body for each family.

`adopt` and `release` change a model's layers to these and back, in place. For functions see
`normalcy.functional`.
"""

from normalcy.nn.adopting import adopt, release
from normalcy.nn.features import GroupNorm, LayerNorm, LayerNorm2d, RMSNorm
from normalcy.nn.fused import Fused
from normalcy.nn.tracking import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Fused",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm2d",
    "RMSNorm",
    "adopt",
    "release",
]
