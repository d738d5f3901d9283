"""A whole norm as differentiable operations in float64: for any derivative, transform and compiler.

Not the fast path, and no backend: it has no verbs, and PyTorch differentiates it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normalcy.axes import Layout
from normalcy.kernels.activation import activated
from normalcy.kernels.contract import Given, Stats
from normalcy.kernels.eager import join, split
from normalcy.moments import Moments


def compose(
    given: Given,
    layout: Layout,
    *,
    eps: float,
    center: bool,
    activation: str | None = None,
    constants: Stats | None = None,
) -> tuple[Tensor, Moments]:
    """Compute y = activation((x − mean)·rstd·weight + bias + residual); statistics from x unless given.

    Returns y in the shape and dtype of x, and the moments of x, detached (of no values where `constants`
    took their place).
    """
    wide = split(given.x, layout).double()
    mask = None if given.mask is None else split(given.mask, layout)
    wide = _valid(wide, mask)
    if constants is not None:
        moments = Moments.empty(layout.statistic, wide.device)
        y = (wide if constants.mean is None else wide - constants.mean) * constants.rstd
    else:
        y, moments = _standardized(wide, mask, layout, eps=eps, center=center)
    if given.weight is not None:
        y = y * given.weight.reshape(layout.parameter).double()
    if given.bias is not None:
        y = y + given.bias.reshape(layout.parameter).double()
    if given.residual is not None:
        y = y + split(given.residual, layout).double()
        y = _valid(y, mask)  # before the activation, whose gradient of a masked NaN would be NaN
    y = activated(y, activation)
    return join(_valid(y.to(given.x.dtype), mask), layout), moments


def _standardized(
    wide: Tensor, mask: Tensor | None, layout: Layout, *, eps: float, center: bool
) -> tuple[Tensor, Moments]:
    """x̂ and the moments; values are shifted by one of their own, so that a constant is exactly zero."""
    count = torch.full(layout.statistic, layout.values, dtype=torch.float64, device=wide.device)
    if mask is not None:
        count = mask.sum(layout.reduce, keepdim=True, dtype=torch.float64) if layout.reduce else mask.double()
    n = count.clamp(min=1)
    first = _one_of(wide.detach(), mask, count, layout)
    centred = _valid(wide - first, mask)
    mean = _sum(centred, layout.reduce) / n
    centred = _valid(centred - mean, mask)
    var = _sum(centred.square(), layout.reduce) / n
    moments = Moments(count, torch.where(count > 0, first + mean.detach(), 0.0), var.detach() * count)
    if center:
        return centred * _rstd(var, eps), moments
    return wide * _rstd(_sum(wide.square(), layout.reduce) / n, eps), moments


def _rstd(var: Tensor, eps: float) -> Tensor:
    """1/√(var + eps); NaN where a variance lies beyond float64, as 0 would look like a right answer."""
    rstd = (var + eps).rsqrt()
    return torch.where(rstd == 0, torch.nan, rstd)


def _one_of(wide: Tensor, mask: Tensor | None, count: Tensor, layout: Layout) -> Tensor:
    """One valid value of each statistic; 0 where there is none."""
    if wide.numel() == 0:
        return torch.zeros_like(count)
    if mask is not None and layout.reduce:
        top = torch.where(mask, wide, -torch.inf).amax(layout.reduce, keepdim=True)
        return torch.where(count > 0, top, 0.0)
    for i in layout.reduce:
        wide = wide.narrow(i, 0, 1)
    return wide


def _valid(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask, 0.0)


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims, keepdim=True) if dims else x
