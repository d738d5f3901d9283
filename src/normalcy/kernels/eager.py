"""The backend in plain PyTorch operations: right in every layout, and not fast.

The same file holds `compose`, the differentiable form of the whole forward pass, for derivatives of any
order. Not the definition: that is `normalcy.definition`, which judges this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normalcy.axes import Layout, Role
from normalcy.kernels.contract import GradSums, Needs, Stats, compute_dtype
from normalcy.moments import Moments

name = "eager"


def why_not(x: Tensor) -> str | None:  # noqa: ARG001 - the contract asks for x; plain PyTorch takes any
    """Never a reason: whatever PyTorch can compute, this can."""
    return None


def collect(x: Tensor, layout: Layout) -> Moments:
    """The moments of x in two float64 passes, of shape `layout.statistic`."""
    return Moments.of(split(x, layout), layout.reduce, keepdim=True)


def apply(x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute y = ((x − s) − r)·rstd·weight + bias with mean = s + r, in the shape and dtype of x.

    The pair s = float32(mean), r = mean − s keeps a few units in the last place however far the data lie
    from zero; x·a + c would cancel. Reads x once and makes two passes over one temporary for each operand.
    """
    y = _normalized(split(x, layout), stats)
    if weight is not None:
        y *= weight.reshape(layout.parameter).to(y.dtype)
    if bias is not None:
        y += bias.reshape(layout.parameter).to(y.dtype)
    return join(y.to(x.dtype), layout)


def collect_grad(
    dy: Tensor, x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, needs: Needs
) -> GradSums:
    """Σg and Σg·x̂ over each statistic's values, Σdy·x̂ and Σdy over each parameter's; summed in float64."""
    dy = split(dy, layout).to(compute_dtype(x))
    from_data = stats.values is not None and needs.x
    scale = None if weight is None else weight.reshape(layout.parameter).double()
    center = stats.mean is not None
    s1, dbias = _sums(dy, layout, scale, statistic=from_data and center, parameter=needs.bias)
    if not (needs.weight or from_data):
        return GradSums(s1, None, None, dbias)
    dy = _normalized(split(x, layout), stats).mul_(dy)
    s2, dweight = _sums(dy, layout, scale, statistic=from_data, parameter=needs.weight)
    return GradSums(s1, s2, dweight, dbias)


def apply_grad(
    dy: Tensor, x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, sums: GradSums
) -> Tensor:
    """Compute dx = (g − (s1 + x̂·s2)/values)·rstd; the mean of g is taken off as a pair, as that of x is."""
    g = split(dy, layout).to(compute_dtype(x), copy=True)
    if weight is not None:
        g *= weight.reshape(layout.parameter).to(g.dtype)
    if sums.s2 is not None and stats.values is not None:
        n = max(stats.values, 1)
        if sums.s1 is not None:
            _subtract(g, sums.s1 / n)
        g -= _normalized(split(x, layout), stats).mul_((sums.s2 / n).to(g.dtype))
    g *= stats.rstd.to(g.dtype)
    return join(g.to(x.dtype), layout)


def compose(
    x: Tensor,
    layout: Layout,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    center: bool,
    constants: Stats | None,
) -> Tensor:
    """The forward pass as differentiable operations, in float64; statistics recomputed from x unless given.

    For derivatives of order two and more, and for transforms (vmap, jvp, jacfwd, hessian).
    """
    wide = split(x, layout).double()
    if constants is not None:
        centred = wide if constants.mean is None else wide - constants.mean
        y = centred * constants.rstd
    else:
        centred = wide
        if center:
            first = wide.detach()
            for i in layout.reduce:
                first = first.narrow(i, 0, 1)
            centred = wide - first  # so that a constant is exactly zero after its mean is taken off
            centred = centred - centred.mean(layout.reduce, keepdim=True)
        y = centred * (centred.square().mean(layout.reduce, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight.reshape(layout.parameter).double()
    if bias is not None:
        y = y + bias.reshape(layout.parameter).double()
    return join(y.to(x.dtype), layout)


def split(x: Tensor, layout: Layout) -> Tensor:
    """View x in the layout's shape: a split axis is always a view."""
    if Role.GROUP not in layout.roles:
        return x
    axis = layout.roles.index(Role.GROUP)
    return torch.unflatten(x, axis, layout.shape[axis : axis + 2])


def join(y: Tensor, layout: Layout) -> Tensor:
    """The inverse of `split`."""
    if Role.GROUP not in layout.roles:
        return y
    axis = layout.roles.index(Role.GROUP)
    return y.flatten(axis, axis + 1)


def _normalized(x: Tensor, stats: Stats) -> Tensor:
    """x̂ as a fresh tensor in the compute dtype."""
    xhat = x.to(compute_dtype(x), copy=True)
    if stats.mean is not None:
        _subtract(xhat, stats.mean)
    xhat *= stats.rstd.to(xhat.dtype)
    return xhat


def _subtract(x: Tensor, value: Tensor) -> None:
    """Take a float64 value off x in place, in two steps where x is float32."""
    near = value.to(x.dtype)
    x -= near
    if x.dtype != torch.float64:
        x -= (value - near.double()).to(x.dtype)


def _sums(
    d: Tensor, layout: Layout, scale: Tensor | None, *, statistic: bool, parameter: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Σd·scale over each statistic's values and Σd over each parameter's; None for what is not asked for.

    Where the parameter is one number for all the values of a statistic, one sum serves both.
    """
    shared = tuple(i for i, extent in enumerate(layout.parameter) if extent == 1)
    one = all(layout.parameter[i] == 1 for i in layout.reduce)
    partial = _sum(d, layout.reduce) if one else d
    total = _sum(partial, shared) if parameter else None
    if not statistic:
        return None, total
    if one:
        return partial if scale is None else partial * scale, total
    return _sum(d if scale is None else d * scale.to(d.dtype), layout.reduce), total


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum in float64, keeping the axes. An empty `dims` means no axis (torch takes it for all)."""
    return x.sum(dims, keepdim=True, dtype=torch.float64) if dims else x.double()
