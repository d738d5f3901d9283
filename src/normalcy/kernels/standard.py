"""A whole norm as PyTorch's own operators: for compiled and exported inference, and for other devices.

Not for training on the CPU, where these are neither the fastest nor the most exact.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from normalcy.axes import OVER_BATCH, OVER_CHANNELS, OVER_SPACE, over_features, over_groups
from normalcy.kernels.activation import activated
from normalcy.kernels.contract import Given
from normalcy.spec import Norm

_GROUPS, _FEATURES = over_groups(1), over_features(1)


def knows(norm: Norm) -> bool:
    """Whether PyTorch has an operator for these axes, centred or not; a name tells nothing.

    Example:
        >>> from normalcy import spec
        >>> knows(spec.batch), knows(spec.Norm("batch", spec.batch.axes, center=False))
        (True, False)
    """
    axes = norm.axes
    if axes.features:
        return axes.average == axes.parameters == _FEATURES.average
    if axes.groups is not None:
        same = axes.average == _GROUPS.average and axes.parameters == _GROUPS.parameters
        return norm.center and same
    return norm.center and axes in (OVER_BATCH, OVER_SPACE, OVER_CHANNELS)


def call(
    given: Given,
    norm: Norm,
    *,
    eps: float,
    activation: str | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
    running: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """The same norm by `torch.nn.functional`, then residual and activation.

    Args:
        given: no mask: PyTorch's norms know none.
        norm: one that it `knows`.
        eps: inside the root.
        activation: by name.
        stored: (mean, var) to normalize with, instead of the data's own.
        running: (mean, var, weight of the new value) to update from the data, as PyTorch does.
    """
    y = _norm(given.x, given.weight, given.bias, norm, eps, stored, running)
    if given.residual is not None:
        y = y + given.residual
    return activated(y, activation)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    stored: tuple[Tensor, Tensor] | None,
    running: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    axes = norm.axes
    if stored is not None:
        return functional.batch_norm(x, *stored, weight, bias, training=False, eps=eps)
    mean, var, momentum = running or (None, None, 0.0)
    if axes == OVER_BATCH:
        return functional.batch_norm(x, mean, var, weight, bias, training=True, momentum=momentum, eps=eps)
    if axes == OVER_SPACE:
        return functional.instance_norm(x, mean, var, weight, bias, True, momentum, eps)
    if axes.groups is not None:
        return functional.group_norm(x, axes.groups, weight, bias, eps)
    if axes == OVER_CHANNELS:
        return functional.layer_norm(x.movedim(1, -1), (x.shape[1],), weight, bias, eps).movedim(-1, 1)
    shape = x.shape[x.dim() - (axes.features or 0) :]
    if norm.center:
        return functional.layer_norm(x, shape, weight, bias, eps)
    if weight is not None and weight.dtype != x.dtype:  # PyTorch's fused operator takes one dtype only
        return functional.rms_norm(x.to(weight.dtype), shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, shape, weight, eps)
