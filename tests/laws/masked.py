"""What is right with a mask, a residual and an activation, from the float64 definition, and masks to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from normalcy import definition, spec
from normalcy.axes import Layout
from normalcy.testing import ULPS, assert_close

ROOT_TWO, ROOT_TWO_PI = sqrt(2), sqrt(2 * torch.pi)
NAMES = ("y", "dx", "dresidual", "dweight", "dbias")


@dataclass(frozen=True)
class After:
    """An activation and its derivative by their formulas; the largest |f′| and |f″|, and ulps they cost."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    steepest: float = 1.0
    bend: float = 0.0
    ulps: float = 0.0


def _density(z: Tensor) -> Tensor:
    return (-z.square() / 2).exp() / ROOT_TWO_PI


def _share(z: Tensor) -> Tensor:
    return (1 + torch.erf(z / ROOT_TWO)) / 2


ACTIVATIONS: dict[str | None, After] = {
    None: After(lambda z: z, torch.ones_like),
    "relu": After(lambda z: z.clamp(min=0), lambda z: (z > 0).double()),
    "leaky_relu": After(
        lambda z: torch.where(z > 0, z, 0.01 * z),
        lambda z: torch.where(z > 0, 1.0, torch.full_like(z, 0.01)),
        ulps=1,
    ),
    # f′ = Φ + zφ is at most 1.13, f″ = (2 − z²)φ at most 2φ(0) = 0.8; erf and the products cost a few ulps
    "gelu": After(lambda z: z * _share(z), lambda z: _share(z) + z * _density(z), 1.13, 0.8, 4),
    # f′ is at most 1.1, f″ at most 0.5
    "silu": After(
        lambda z: z * z.sigmoid(), lambda z: z.sigmoid() * (1 + z * (1 - z.sigmoid())), 1.1, 0.5, 4
    ),
}


@dataclass(frozen=True)
class Right:
    """Float64 results by name, and for each the size of what it was computed from."""

    results: dict[str, Tensor]
    scale: dict[str, Tensor]
    count: Tensor
    mean: Tensor
    var: Tensor
    ulps: float

    def judge(self, got: dict[str, Tensor | None], ulps: float | None = None) -> None:
        """Raise unless every result is within the ulps of its dtype, plus the activation's own."""
        assert got
        for name, tensor in got.items():
            assert tensor is not None, f"no {name}"
            allowed = (ULPS[tensor.dtype] if ulps is None else ulps) + self.ulps
            if tensor.dtype in (torch.bfloat16, torch.float16):
                allowed = ULPS[tensor.dtype] + bool(self.ulps)  # the rest is float32's, and not seen
            assert_close(tensor, self.results[name], ulps=allowed, scale=self.scale[name], what=name)


def right(
    norm: spec.Norm,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Right:
    """Forward and backward of activation(norm(x) + residual) on the exact values of the tensors given.

    Scale: an error of z is at most ulps·size, size = |γ|(|x̂| + s) + |β| + |r|, with s = |mean|·rstd + 1 in
    float64, whose mean is no finer than x. One of y is at most `steepest` as large, and dz = dy·f′(z) is off
    by |dy|(steepest + bend·size); dx, dγ and dβ sum it.
    """
    after, layout = ACTIVATIONS[activation], norm.axes.resolve(tuple(x.shape))
    valid = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.broadcast_to(x.shape)
    wide = torch.where(valid, x.detach().double(), 0.0)
    grad = torch.where(valid, dy.detach().double(), 0.0)
    r = torch.zeros_like(wide) if residual is None else torch.where(valid, residual.detach().double(), 0.0)
    shape = layout.weight
    w = torch.ones(shape).double() if weight is None else weight.detach().double()
    b = torch.zeros(shape).double() if bias is None else bias.detach().double()

    made = _Made(norm, layout, wide, w, b, eps, valid, stored)
    z = torch.where(valid, made.y + r, 0.0)
    dz = grad * after.derivative(z)
    results = {"y": torch.where(valid, after.function(z), 0.0), "dresidual": dz, **made.back(dz)}

    size = w.reshape(layout.parameter).abs() * made.size(x.dtype) + b.reshape(layout.parameter).abs()
    size = torch.where(valid, size.reshape(x.shape) + r.abs(), 0.0)
    off = grad.abs() * (after.steepest + after.bend * size)
    scale = {"y": size * after.steepest, "dresidual": off, **made.sizes(off, x.dtype)}
    return Right(results, scale, made.count, made.mean, made.var, after.ulps + (residual is not None))


class _Made:
    """One normalization by the definition; from stored statistics the formula of inference, where valid."""

    def __init__(
        self,
        norm: spec.Norm,
        layout: Layout,
        x: Tensor,
        w: Tensor,
        b: Tensor,
        eps: float,
        valid: Tensor,
        stored: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.norm, self.layout, self.x, self.w, self.eps, self.valid = norm, layout, x, w, eps, valid
        self.stored = stored
        if stored is None:
            found = definition.forward(
                *self._name(), w.numpy(), b.numpy(), eps=eps, mask=valid.numpy(), **self._keywords()
            )
            self.y, self.xhat = torch.from_numpy(found.y), torch.from_numpy(found.xhat)
            parts = (found.count, found.mean, found.var, found.rstd)
            self.count, self.mean, self.var, rstd = (torch.from_numpy(v.copy()) for v in parts)
            self.rstd = rstd.reshape(layout.statistic).nan_to_num()
            self.place = self.mean.reshape(layout.statistic).nan_to_num()
            return
        self.mean, self.var = (s.detach().double() for s in stored)
        self.count = torch.tensor(0.0)
        numbers = [t.numpy() for t in (x, self.mean, self.var)]
        self.xhat = torch.from_numpy(definition.inference(*numbers, eps=eps))
        self.y = torch.from_numpy(definition.inference(*numbers, w.numpy(), b.numpy(), eps=eps))
        per_channel = [-1 if i == 1 else 1 for i in range(x.dim())]
        self.rstd = (self.var + eps).rsqrt().reshape(per_channel)
        self.place = self.mean.reshape(per_channel)

    def _name(self) -> tuple[Any, Any]:
        return self.norm.name, self.x.numpy()

    def _keywords(self) -> dict[str, Any]:
        if self.norm is spec.channels:
            return {"axes": (1,)}
        if self.norm.axes.features is not None:
            return {"axes": tuple(range(-self.norm.axes.features, 0))}
        return {} if self.norm.axes.groups is None else {"groups": self.norm.axes.groups}

    def back(self, dz: Tensor) -> dict[str, Tensor]:
        if self.stored is None:
            found = definition.backward(
                *self._name(),
                dz.numpy(),
                self.w.numpy(),
                eps=self.eps,
                mask=self.valid.numpy(),
                **self._keywords(),
            )
        else:
            arrays = [t.numpy() for t in (self.x, dz, self.mean, self.var, self.w)]
            found = definition.inference_backward(*arrays, eps=self.eps)
        return {name: torch.from_numpy(getattr(found, name)) for name in ("dx", "dweight", "dbias")}

    def size(self, dtype: torch.dtype) -> Tensor:
        """|x̂|, and in float64 what its mean is as coarse as; float32 keeps the mean as a pair."""
        size = self.xhat.reshape(self.layout.shape).abs()
        return size if dtype != torch.float64 else size + 1 + self.place.abs() * self.rstd

    def sizes(self, off: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        layout, off, xhat = self.layout, off.reshape(self.layout.shape), self.size(dtype)
        g = off * self.w.reshape(layout.parameter).abs()
        terms = g
        if self.stored is None:
            n = self.count.reshape(layout.statistic).clamp(min=1)
            terms = g + xhat * (g * xhat).sum(layout.reduce, keepdim=True) / n
            if self.norm.center:
                terms = terms + g.sum(layout.reduce, keepdim=True) / n
        shared = [i for i, extent in enumerate(layout.parameter) if extent == 1]
        summed = (off * xhat, off)
        dweight, dbias = ((v.sum(shared) if shared else v).reshape(layout.weight) for v in summed)
        dx = torch.where(self.valid, (self.rstd * terms).reshape(self.x.shape), 0.0)
        return {"dx": dx, "dweight": dweight, "dbias": dbias}


def a_mask(shape: tuple[int, ...], norm: spec.Norm, seed: int = 7) -> Tensor:
    """About two thirds of the places, and at least two values of every statistic."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.67
    layout = norm.axes.resolve(shape)
    corner = mask.view(layout.shape)
    longest = max(layout.reduce, key=lambda i: layout.shape[i])
    for i in layout.reduce:
        corner = corner.narrow(i, 0, 2 if i == longest else 1)
    mask.view(-1)[-1] = False
    corner.fill_(True)
    assert not mask.all()
    return mask


def spoiled(x: Tensor, mask: Tensor, junk: float) -> Tensor:
    """X with `junk` at every masked place."""
    return torch.where(mask, x.detach(), torch.tensor(junk, dtype=torch.float64).to(x.dtype))
