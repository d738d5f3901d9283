"""What is right, from the float64 definition, and the scale that an error of each result is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from normalcy import definition, spec
from normalcy.axes import Layout


@dataclass(frozen=True)
class Truth:
    """Float64 results; `scale` has, for each, the size of what it was computed from."""

    y: Tensor
    xhat: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    scale: dict[str, Tensor]


def truth(
    norm: spec.Norm,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Truth:
    """Forward and backward of `norm` on the exact values of the tensors given."""
    dtype, x, dy = x.dtype, x.detach().double(), dy.detach().double()
    layout = norm.axes.resolve(tuple(x.shape))
    shape = _parameter_shape(norm, x)
    w = torch.ones(shape, dtype=torch.float64) if weight is None else weight.detach().double()
    b = torch.zeros(shape, dtype=torch.float64) if bias is None else bias.detach().double()
    if stored is None:
        made, back = _from_data(norm, x, dy, w, b, eps)
        mean, var, count = (torch.from_numpy(v.copy()) for v in (made.mean, made.var, made.count))
        y, xhat = torch.from_numpy(made.y), torch.from_numpy(made.xhat)
        rstd = torch.from_numpy(made.rstd.copy()).reshape(layout.statistic)
    else:
        mean, var = (s.detach().double() for s in stored)
        numbers = [t.numpy() for t in (x, mean, var, w, b)]
        y = torch.from_numpy(definition.inference(*numbers, eps=eps))
        xhat = torch.from_numpy(definition.inference(*numbers[:3], eps=eps))
        back = definition.inference_backward(
            x.numpy(), dy.numpy(), *[t.numpy() for t in (mean, var, w)], eps=eps
        )
        count = torch.tensor(0.0)
        rstd = (var + eps).rsqrt().reshape([-1 if i == 1 else 1 for i in range(x.dim())])
    dx, dweight, dbias = (torch.from_numpy(v) for v in (back.dx, back.dweight, back.dbias))
    wide, narrow = w.reshape(layout.parameter), b.reshape(layout.parameter)
    dys = dy.reshape(layout.shape).abs()
    xh = _size_of_xhat(x, dtype, layout, xhat, mean, rstd)
    g = dys * wide.abs()
    terms = g
    if stored is None:
        average = list(layout.reduce)
        terms = g + xh * (g * xh).mean(average, keepdim=True)
        if norm.center:
            terms = terms + g.mean(average, keepdim=True)
    shared = [i for i, extent in enumerate(layout.parameter) if extent == 1]
    scale = {
        "y": ((wide.abs() * xh) + narrow.abs()).reshape(x.shape),
        "dx": (rstd * terms).reshape(x.shape),
        "dweight": _sum(dys * xh, shared).reshape(shape),
        "dbias": _sum(dys, shared).reshape(shape),
    }
    return Truth(y, xhat, mean, var, count, dx, dweight.reshape(shape), dbias.reshape(shape), scale)


def _size_of_xhat(
    x: Tensor, dtype: torch.dtype, layout: Layout, xhat: Tensor, mean: Tensor, rstd: Tensor
) -> Tensor:
    """|x̂|; in float64 the mean is as coarse as x itself, |mean|·rstd, and its sum as the spread, 1.

    Float32 keeps the mean as a pair, and sums in float64, so that neither is felt.
    """
    size = xhat.reshape(layout.shape).abs()
    if dtype != torch.float64 or not mean.numel():
        return size
    shape = layout.statistic if mean.numel() == prod(layout.statistic) else rstd.shape
    return 1 + size + mean.reshape(shape).abs().nan_to_num() * rstd.reshape(shape)


def _from_data(
    norm: spec.Norm, x: Tensor, dy: Tensor, w: Tensor, b: Tensor, eps: float
) -> tuple[definition.Forward, definition.Backward]:
    name, keywords = norm.name, {}
    if norm is spec.channels:
        keywords["axes"] = (1,)
    elif norm.axes.features is not None:
        keywords["axes"] = tuple(range(-norm.axes.features, 0))
    elif norm.axes.groups is not None:
        keywords["groups"] = norm.axes.groups
    made = definition.forward(name, x.numpy(), w.numpy(), b.numpy(), eps=eps, **keywords)
    return made, definition.backward(name, x.numpy(), dy.numpy(), w.numpy(), eps=eps, **keywords)


def _parameter_shape(norm: spec.Norm, x: Tensor) -> tuple[int, ...]:
    if norm.axes.features is not None:
        return tuple(x.shape[-norm.axes.features :])
    return (x.shape[1],)


def _sum(values: Tensor, dims: list[int]) -> Tensor:
    return values.sum(dims) if dims else values
