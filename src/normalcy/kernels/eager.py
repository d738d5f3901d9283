"""The backend in plain PyTorch operations: right in every layout, and not fast.

Not for derivatives beyond the first: those are `compose`'s. Not the definition either: that is
`normalcy.definition`, which judges this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normalcy.axes import Layout, Role
from normalcy.kernels.activation import activated
from normalcy.kernels.contract import Given, GradSums, Needs, Stats, compute_dtype
from normalcy.moments import Moments

name = "eager"


def why_not(given: Given) -> str | None:  # noqa: ARG001 - the contract asks; plain PyTorch takes any call
    """Never a reason: whatever PyTorch can compute, this can."""
    return None


def collect(x: Tensor, layout: Layout, mask: Tensor | None) -> Moments:
    """The moments of x in two float64 passes, of shape `layout.statistic`."""
    valid = None if mask is None else split(mask, layout)
    return Moments.of(split(x, layout), layout.reduce, valid, keepdim=True)


def apply(given: Given, layout: Layout, stats: Stats, activation: str | None) -> Tensor:
    """Compute y = activation(((x − s) − r)·rstd·weight + bias + residual) with mean = s + r.

    The pair s = float32(mean), r = mean − s keeps a few units in the last place however far the data lie
    from zero; x·a + c would cancel. Reads x once and makes two passes over one temporary for each operand.
    """
    y = _normalized(given, layout, stats)
    if given.weight is not None:
        y *= given.weight.reshape(layout.parameter).to(y.dtype)
    if given.bias is not None:
        y += given.bias.reshape(layout.parameter).to(y.dtype)
    if given.residual is not None:
        y += split(given.residual, layout).to(y.dtype)
    y = activated(y, activation)
    return join(_valid(y.to(given.x.dtype), given, layout), layout)


def collect_grad(dz: Tensor, given: Given, layout: Layout, stats: Stats, needs: Needs) -> GradSums:
    """Σg and Σg·x̂ over each statistic's values, Σdz·x̂ and Σdz over each parameter's; summed in float64."""
    masked = given.mask is not None
    dz = _valid(split(dz, layout).to(compute_dtype(given.x), copy=masked), given, layout)
    from_data = stats.n is not None and needs.x
    scale = None if given.weight is None else given.weight.reshape(layout.parameter).double()
    center = stats.mean is not None
    s1, dbias = _sums(dz, layout, scale, statistic=from_data and center, parameter=needs.bias)
    if not (needs.weight or from_data):
        return GradSums(s1, None, None, dbias)
    product = dz * _normalized(given, layout, stats)  # out of place: dz may be a batch of gradients
    s2, dweight = _sums(product, layout, scale, statistic=from_data, parameter=needs.weight)
    return GradSums(s1, s2, dweight, dbias)


def apply_grad(dz: Tensor, given: Given, layout: Layout, stats: Stats, sums: GradSums) -> Tensor:
    """Compute dx = (g − (s1 + x̂·s2)/n)·rstd; the mean of g is taken off as a pair, as that of x is."""
    g = split(dz, layout).to(compute_dtype(given.x), copy=True)
    if given.weight is not None:
        g *= given.weight.reshape(layout.parameter).to(g.dtype)
    if sums.s2 is not None and stats.n is not None:
        n = stats.n.clamp(min=1) if isinstance(stats.n, Tensor) else max(stats.n, 1)
        if sums.s1 is not None:
            _subtract(g, sums.s1 / n)
        g -= (sums.s2 / n).to(g.dtype) * _normalized(given, layout, stats)
    g *= stats.rstd.to(g.dtype)
    return join(_valid(g.to(given.x.dtype), given, layout), layout)


def split(x: Tensor, layout: Layout) -> Tensor:
    """View x in the layout's shape: a split axis is always a view."""
    if Role.GROUP not in layout.roles:
        return x
    axis = layout.roles.index(Role.GROUP)
    return x.view(*x.shape[:axis], *layout.shape[axis : axis + 2], *x.shape[axis + 1 :])


def join(y: Tensor, layout: Layout) -> Tensor:
    """The inverse of `split`."""
    if Role.GROUP not in layout.roles:
        return y
    axis = layout.roles.index(Role.GROUP)
    extents = y.shape[:axis], y.shape[axis] * y.shape[axis + 1], y.shape[axis + 2 :]
    return y.reshape(*extents[0], extents[1], *extents[2])


def _valid(x: Tensor, given: Given, layout: Layout) -> Tensor:
    """X, a fresh tensor, with 0 at masked places, whatever stood there. In place, which keeps its strides."""
    return x if given.mask is None else x.masked_fill_(~split(given.mask, layout), 0)


def _normalized(given: Given, layout: Layout, stats: Stats) -> Tensor:
    """x̂ as a fresh tensor in the compute dtype, 0 at masked places."""
    xhat = split(given.x, layout).to(compute_dtype(given.x), copy=True)
    if stats.mean is not None:
        _subtract(xhat, stats.mean)
    xhat *= stats.rstd.to(xhat.dtype)
    return _valid(xhat, given, layout)


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
