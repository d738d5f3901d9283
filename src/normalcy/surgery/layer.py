"""One folded layer: its numbers in float64, what makes them unusable, and the bound they are proved by.

Not for wiring: whether a layer and a norm belong together was decided before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.errors import ArgumentError
from normalcy.surgery.proof import Gap, gap

M = TypeVar("M", bound=nn.Module)
Affine = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True)
class Edge:
    """A norm and the layer before it, by path."""

    layer: str
    norm: str


@dataclass(frozen=True, slots=True)
class Folded:
    """The folded layer's weight and bias, and |a·b| + |a·mean| + |β|, which their rounding is measured by."""

    weight: Tensor
    bias: Tensor
    magnitude: Tensor


def folded(layer: Affine, norm: _BatchNorm) -> Folded:
    """W′ = a·W and b′ = a·(b − mean) + β, in float64, rounded once to the layer's dtype."""
    if norm.running_mean is None or norm.running_var is None:
        raise ArgumentError("the norm has no running statistics", "a norm that tracks them")
    mean, var = norm.running_mean.double(), norm.running_var.double()
    gamma = torch.ones_like(mean) if norm.weight is None else norm.weight.detach().double()
    beta = torch.zeros_like(mean) if norm.bias is None else norm.bias.detach().double()
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.detach().double()
    a = gamma / (var + norm.eps).sqrt()
    dtype = layer.weight.dtype
    weight = a.reshape(-1, *[1] * (layer.weight.ndim - 1)) * layer.weight.detach().double()
    magnitude = (a * bias).abs() + (a * mean).abs() + beta.abs()
    return Folded(weight.to(dtype), (a * (bias - mean) + beta).to(dtype), magnitude)


def apply(model: nn.Module, edge: Edge) -> None:
    """Fold one edge of `model` in place, with the numbers of `model` itself."""
    layer, norm = pair(model, edge)
    install(layer, folded(layer, norm))
    parent, _, name = edge.norm.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Identity().train(norm.training))


@torch.no_grad()
def prove_layer(layer: Affine, norm: _BatchNorm, after: Affine, x: Tensor, y: Tensor | None = None) -> Gap:
    """Compare the folded layer `after` with `norm(layer(x))` on one input, element by element.

    Two comparisons. In the layer's own precision, within 2(k + 3)·u·M; this one is returned. And both in
    float64, where only the rounding of W′ and b′ is left, within u·M; this one is returned where it does not
    hold. M = |W′||x| + |a·b| + |a·mean| + |β|. Below the smallest normal number rounding is absolute, which
    adds the smallest number there is times |x| + 1.

    Args:
        layer: the layer before folding.
        norm: the norm before folding, in evaluation mode.
        after: the folded layer.
        x: input of the layer.
        y: what the norm gave for it in the running model; computed here when left out.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer, norm, x = nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), torch.randn(8, 4)
        >>> right, wrong = copy.deepcopy(layer), copy.deepcopy(layer)
        >>> install(right, folded(layer, norm))
        >>> prove_layer(layer, norm, right, x).holds, prove_layer(layer, norm, wrong, x).holds
        (True, False)
    """
    wide_layer, wide_norm, wide_x = copy.deepcopy(layer).double(), copy.deepcopy(norm).double(), x.double()
    exact = folded(wide_layer, wide_norm)
    info, k = torch.finfo(x.dtype), layer.weight[0].numel()
    u, u64 = info.eps / 2, 2.0**-53
    size = _with(layer, exact.weight.abs(), exact.magnitude)(wide_x.abs())
    tiny = info.tiny * info.eps * (_with(layer, torch.ones_like(exact.weight), None)(wide_x.abs()) + 1)
    own = gap(norm(layer(x)) if y is None else y, after(x), 2 * (k + 3) * u * size + tiny)
    rounded = copy.deepcopy(after).double()(wide_x)
    wide = gap(wide_norm(wide_layer(wide_x)), rounded, (u + 2 * (k + 3) * u64) * size + tiny)
    return own if wide.holds or not own.holds else wide


def refusal(layer: Affine, norm: _BatchNorm) -> str | None:
    """Why these numbers cannot be folded, or None."""
    held = {"weight": layer.weight, "bias": layer.bias, "γ": norm.weight, "β": norm.bias}
    held |= {"running mean": norm.running_mean, "running variance": norm.running_var}
    for name, value in held.items():
        if isinstance(value, Tensor) and value.is_meta:
            return f"the {name} has no values (meta device)"
        if isinstance(value, Tensor) and not bool(value.isfinite().all()):
            return f"the {name} is not finite in {int((~value.isfinite()).sum())} places"
    var = norm.running_var
    if var is not None and bool((var.double() + norm.eps <= 0).any()):
        return (
            f"running variance + eps is not positive in {int((var.double() + norm.eps <= 0).sum())} channels"
        )
    new = folded(layer, norm)
    if not bool(new.weight.isfinite().all() & new.bias.isfinite().all()):
        dtype = str(new.weight.dtype).removeprefix("torch.")
        largest = torch.finfo(new.weight.dtype).max
        return f"the folded weight or bias exceeds the range of {dtype} (±{largest:.6g})"
    return None


def pair(model: nn.Module, edge: Edge) -> tuple[Affine, _BatchNorm]:
    """The layer and the norm of an edge; `sites` has judged what classes they are."""
    return cast("Affine", model.get_submodule(edge.layer)), cast("_BatchNorm", model.get_submodule(edge.norm))


def _with(layer: Affine, weight: Tensor, bias: Tensor | None) -> Affine:
    """The same layer with other numbers."""
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(weight, requires_grad=False)
    other.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return other


def bare(module: M) -> M:
    """A copy without the hooks that the proof itself has put on."""
    other = copy.deepcopy(module)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        vars(other)[name].clear()
    return other


def install(layer: Affine, new: Folded) -> None:
    """Give the layer the folded numbers in place; a layer without a bias gets one."""
    with torch.no_grad():
        layer.weight.copy_(new.weight)
        if layer.bias is None:
            layer.bias = nn.Parameter(new.bias.clone(), requires_grad=layer.weight.requires_grad)
        else:
            layer.bias.copy_(new.bias)
