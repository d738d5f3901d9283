"""Which modules are normalization layers, by class; each is recorded as one step.

Not for finding out what an unknown module computes: that takes a probe.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normalcy.nn import LayerNorm2d

_BASES: tuple[tuple[type[nn.Module], str], ...] = (
    (_InstanceNorm, "instance"),
    (_BatchNorm, "batch"),
    (nn.LayerNorm, "layer"),
    (nn.GroupNorm, "group"),
    (nn.RMSNorm, "rms"),
    (LayerNorm2d, "layer"),
)


def base_kind(module: nn.Module) -> str | None:
    """The kind that a module's base class stands for, whatever its forward does; None for what is no norm.

    >>> base_kind(nn.SyncBatchNorm(4)), base_kind(nn.Linear(2, 2))
    ('batch', None)
    """
    return next((kind for base, kind in _BASES if isinstance(module, base)), None)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer of PyTorch's or of this library, or a subclass of one.

    >>> is_norm(nn.SyncBatchNorm(4)), is_norm(nn.Linear(2, 2))
    (True, False)
    """
    return base_kind(module) is not None
