"""What a caller of a norm gave, checked before anything is computed or changed.

Every check raises with what was given, what is needed and what to do; `who` names the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normalcy import spec
from normalcy.axes import Layout
from normalcy.errors import ArgumentError, ShapeError, TooFewValuesError, TypeMismatchError

_HALF = (torch.float16, torch.bfloat16)

# what shares one statistic, and what to do where that is a single value
_TOO_FEW = {
    "batch": ("channel", "use a larger batch, drop_last=True, group or layer norm, or call .eval()"),
    "instance": ("channel and example", "use it where there is space left to average over, or layer norm"),
    "group": ("group", "use fewer groups"),
}


def unit_interval(what: str, value: Any) -> None:
    """A weight of the new value: a number from 0 to 1."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"{what}={value}", "a number from 0 to 1, the weight of the new value")


def trailing_shape(x: Tensor, normalized_shape: int | Sequence[int], who: str) -> tuple[int, ...]:
    """`normalized_shape` as a tuple, after checking that x ends in it."""
    check_input(x, who)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape:
        raise ShapeError(f"{who} got an empty normalized_shape", "at least one axis")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            f"{who} got an input of shape {tuple(x.shape)}", f"(..., {', '.join(map(str, shape))})"
        )
    return shape


def check_input(x: Any, who: str) -> None:
    """A floating tensor, and no tracing proxy."""
    if not isinstance(x, Tensor):
        if type(x).__module__.startswith("torch.fx"):
            raise TypeMismatchError(
                f"{who} is being traced by torch.fx, which would lose its parameters and mode",
                "PyTorch's own layer",
                "call normalcy.nn.release(model) before tracing",
            )
        raise TypeMismatchError(f"{who} got {type(x).__name__}", "a torch.Tensor")
    if x.layout != torch.strided:
        raise TypeMismatchError(
            f"{who} got an input of layout {x.layout}", "a dense tensor", "use x.to_dense()"
        )
    if not x.is_floating_point():
        raise TypeMismatchError(
            f"{who} got an input of {x.dtype}", "a floating dtype", "convert it, as with x.float()"
        )


def check_parameters(x: Tensor, layout: Layout, weight: Tensor | None, bias: Tensor | None, who: str) -> None:
    """Weight and bias have one value for each place of the layout's parameter axes, in a dtype that fits."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if tuple(parameter.shape) != layout.weight:
            raise ShapeError(
                f"{who} got {name} of shape {tuple(parameter.shape)} for an input of shape {tuple(x.shape)}",
                f"{layout.weight}",
            )
        _check_dtype(name, parameter, x, who)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeMismatchError(
            f"{who} got weight of {weight.dtype} and bias of {bias.dtype}", "one dtype for both"
        )


def _check_dtype(name: str, parameter: Tensor, x: Tensor, who: str) -> None:
    if parameter.dtype == x.dtype or (x.dtype in _HALF and parameter.dtype == torch.float32):
        return
    wide = " or torch.float32" if x.dtype in _HALF else ""
    raise TypeMismatchError(
        f"{who} got {name} of {parameter.dtype} for an input of {x.dtype}",
        f"{name} of {x.dtype}{wide}",
        "convert the input or the layer",
    )


def check_statistics(kept: tuple[Tensor, ...], x: Tensor, layout: Layout, who: str) -> None:
    """Running statistics have one value for each channel, in a dtype that fits."""
    channels = layout.shape[1]
    for name, buffer in zip(("running_mean", "running_var"), kept, strict=True):
        if tuple(buffer.shape) != (channels,):
            raise ShapeError(
                f"{who} got {name} of shape {tuple(buffer.shape)} for an input of shape {tuple(x.shape)}",
                f"({channels},), one for each channel (axis 1)",
                "is the input channels-last?" if buffer.shape[:1] == x.shape[-1:] else "",
            )
        _check_dtype(name, buffer, x, who)


def check_values(x: Tensor, norm: spec.Norm, layout: Layout, eps: float, who: str) -> None:
    """Enough values share a statistic that is computed from x, and eps can carry a constant channel."""
    if norm.name == "batch" and eps == 0 and x.numel():
        raise ArgumentError(
            f"{who} got eps=0 with statistics from the data", "eps > 0, since a channel may be constant"
        )
    few = _TOO_FEW.get(norm.name)
    examples = (
        x.shape[0] if norm.name == "group" else 1
    )  # as PyTorch: several examples pass, and give the bias
    if few and layout.values * examples == 1:
        per, do = few
        raise TooFewValuesError(
            f"{who} got one value per {per}: an input of shape {tuple(x.shape)}",
            f"at least two values per {per}, since one value is its own mean",
            do,
        )
