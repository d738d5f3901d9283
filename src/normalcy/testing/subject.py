"""The layer under test: its copies, its float64 twin, its bias, and which values share a statistic.

Not for users, who have the checks; nothing here changes the layer that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normalcy.moments import Moments

WEIGHTS, BIASES = ("weight", "gamma", "scale"), ("bias", "beta")


class Shared(NamedTuple):
    """The values that share a statistic, one statistic a row: float64, (statistics, values)."""

    dx: Tensor
    scale: Tensor


def double(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A float64 copy that computes what `layer` does with inputs of `dtype`, exactly.

    An eps of None is the machine epsilon of the dtype computed in, which the copy must not change.
    """
    wide = copy.deepcopy(layer).double()
    for module in wide.modules():
        if getattr(module, "eps", 0.0) is None:
            module.eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps  # type: ignore[assignment]
    return wide


def run(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a copy of `layer`, which must be finite where the input is.

    Raises:
        AssertionError: it is not.
    """
    with torch.no_grad():
        y: Tensor = copy.deepcopy(layer)(x)
    if bool(x.isfinite().all()) and not bool(y.isfinite().all()):
        bad = int((~y.isfinite()).sum())
        raise AssertionError(f"{name(layer)}: a finite input gives {bad} values that are not finite.")
    return y


def name(layer: nn.Module) -> str:
    """What a sentence calls it."""
    return type(layer).__name__


def scale(x: Tensor, exact: Tensor) -> Tensor | None:
    """What an output for x is computed from, in float64; None where the output itself is the measure.

    Float64 has no wider type to keep a mean in: it is as coarse as x, and y by that times the slope of the
    layer, here the ratio of the spreads.
    """
    if x.dtype != torch.float64 or x.numel() < 2:
        return None
    wide = x.detach()
    slope = (exact.std() / wide.std()).nan_to_num(nan=0.0, posinf=0.0)
    return exact.abs() + exact.abs().mean() + wide.abs().max() * slope


def parameter(layer: nn.Module, names: Sequence[str]) -> tuple[nn.Module, Tensor] | None:
    """The one parameter of such a name, with the module whose it is; None where there is none, or several."""
    found = [
        (module, p)
        for module in layer.modules()
        for key, p in module.named_parameters(recurse=False)
        if key in names
    ]
    return found[0] if len(found) == 1 else None


def spread_out(owner: nn.Module, values: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A parameter at every place of an input of `shape`; None where it fits neither way.

    Along the last axes where its module has a `normalized_shape`, else along the channels (axis 1).
    """
    shape = tuple(shape)
    if hasattr(owner, "normalized_shape"):
        fits = shape[len(shape) - values.dim() :] == tuple(values.shape)
        return values.expand(shape) if fits else None
    if values.dim() == 1 and len(shape) > 1 and shape[1] == values.numel():
        return values.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
    return None


def shared(layer: nn.Module, x: Tensor, dx: Tensor, dy: Tensor) -> Shared:
    """`dx` by statistic, and the size of what each of its values was computed from.

        rstd·(|g| + mean|g| + |x̂|·mean|g·x̂|),   g = dy·weight

    Which values share a statistic is found by moving the first value of x: what changes with it.
    """
    wide = double(layer, x.dtype)
    moved = x.detach().double().clone()
    before = run(wide, moved)
    moved[(0,) * x.dim()] += 1 + moved.abs().max()
    changed = (run(wide, moved) != before).nonzero()
    extents = [int(i) + 1 for i in changed.max(0).values] if changed.numel() else [1] * x.dim()
    box = [b if s % b == 0 else s for b, s in zip(extents, x.shape, strict=True)]

    values, g = by_box(x.detach().double(), box), dy.double()
    gain = parameter(layer, WEIGHTS)
    weight = spread_out(gain[0], gain[1].detach().double(), x.shape) if gain else None
    g = by_box(g if weight is None else g * weight, box).abs()
    moments = Moments.of(values, 1, keepdim=True)
    named = (getattr(module, "eps", None) for module in wide.modules())
    eps = next((e for e in named if isinstance(e, float)), 0.0)
    rstd = (moments.var() + eps).rsqrt().nan_to_num(posinf=0.0)
    xhat = (values - moments.mean).abs() * rstd
    if x.dtype == torch.float64:  # there the mean is as coarse as x itself, and its sum as the spread
        xhat = xhat + 1 + moments.mean.abs() * rstd
    terms = g + g.mean(1, keepdim=True) + xhat * (g * xhat).mean(1, keepdim=True)
    found = by_box(dx.double(), box)
    return Shared(found, torch.maximum(rstd * terms, found.abs()))


def by_box(x: Tensor, box: Sequence[int]) -> Tensor:
    """Cut x into boxes of these extents: (boxes, values of one)."""
    for i, extent in enumerate(box):
        x = x.unfold(i, extent, extent)
    return x.flatten(0, len(box) - 1).flatten(1)
