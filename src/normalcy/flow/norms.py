"""Which modules are normalization layers, by class; each is recorded as one step.

Not for finding out what an unknown module computes: that takes a probe.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from normalcy.nn import LayerNorm2d

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, LayerNorm2d)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer of PyTorch's or of this library, or a subclass of one.

    >>> is_norm(nn.SyncBatchNorm(4)), is_norm(nn.Linear(2, 2))
    (True, False)
    """
    return isinstance(module, _NORMS)
