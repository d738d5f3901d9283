"""What a caller of a norm gave, checked before anything is computed or changed.

Every check raises with what was given, what is needed and what to do; `who` names the caller.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from normalcy import spec
from normalcy.axes import OVER_SPACE, Layout
from normalcy.errors import ArgumentError, ShapeError, TooFewValuesError, TypeMismatchError
from normalcy.kernels.activation import ACTIVATIONS

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)

# what shares one statistic, and what to do where that is a single value
_OF_BATCH = ("channel", "use a larger batch, drop_last=True, group or layer norm, or call .eval()")
_OF_INSTANCE = ("channel and example", "use it where there is space left to average over, or layer norm")
_OF_GROUP = ("group", "use fewer groups")


def unit_interval(what: str, value: Any) -> None:
    """A weight of the new value: a number from 0 to 1."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ArgumentError(f"{what}={value}", "a number from 0 to 1, the weight of the new value")


def whole(what: str, value: Any, who: str) -> int:
    """A whole number, of whatever integer type; True is none."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a SymInt stands for an int
    try:
        if not isinstance(value, (bool, Tensor)):
            return operator.index(value)
    except TypeError:
        pass
    raise ArgumentError(f"{who} got {what}={value!r}", "a whole number")


def trailing_shape(x: Tensor, normalized_shape: int | Sequence[int], who: str) -> tuple[int, ...]:
    """`normalized_shape` as a tuple, after checking that x ends in it."""
    check_input(x, who)
    many = isinstance(normalized_shape, Sequence)
    extents: Any = normalized_shape if many else (normalized_shape,)
    shape = tuple(whole("normalized_shape", extent, who) for extent in extents)
    if not shape:
        raise ShapeError(f"{who} got an empty normalized_shape", "at least one axis")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            f"{who} got an input of shape {tuple(x.shape)}", f"(..., {', '.join(map(str, shape))})"
        )
    return shape


def check_eps(eps: Any, who: str) -> None:
    """A finite number, zero or more."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < inf:
        raise ArgumentError(f"{who} got eps={eps!r}", "a finite number, zero or more")


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
    if x.is_nested:
        raise TypeMismatchError(f"{who} got a nested tensor", "a padded one", "pad it, and give a mask")
    if x.layout != torch.strided:
        raise TypeMismatchError(
            f"{who} got an input of layout {x.layout}", "a dense tensor", "use x.to_dense()"
        )
    if x.dtype not in _FLOATING:
        raise TypeMismatchError(
            f"{who} got an input of {x.dtype}",
            "float64, float32, bfloat16 or float16",
            "convert it, as with x.float()",
        )


def check_parameters(x: Tensor, layout: Layout, weight: Tensor | None, bias: Tensor | None, who: str) -> None:
    """Weight and bias have one value for each place of the layout's parameter axes, in a dtype that fits."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            raise TypeMismatchError(f"{who} got {name} as {type(parameter).__name__}", "a torch.Tensor")
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
    if parameter.device != x.device:
        raise TypeMismatchError(
            f"{who} got {name} on {parameter.device} for an input on {x.device}",
            "one device for both",
            f"move the layer, as with .to({str(x.device)!r})",
        )
    if parameter.dtype == x.dtype or (x.dtype in _HALF and parameter.dtype == torch.float32):
        return
    wide = " or torch.float32" if x.dtype in _HALF else ""
    raise TypeMismatchError(
        f"{who} got {name} of {parameter.dtype} for an input of {x.dtype}",
        f"{name} of {x.dtype}{wide}",
        "convert the input or the layer",
    )


def check_statistics(kept: tuple[Tensor, ...], x: Tensor, who: str, *, written: bool) -> None:
    """Running statistics have one value for each channel, in a dtype that fits, and memory of their own."""
    channels = x.shape[1]
    for name, buffer in zip(("running_mean", "running_var"), kept, strict=True):
        if not isinstance(buffer, Tensor):
            raise TypeMismatchError(f"{who} got {name} as {type(buffer).__name__}", "a torch.Tensor")
        if tuple(buffer.shape) != (channels,):
            raise ShapeError(
                f"{who} got {name} of shape {tuple(buffer.shape)} for an input of shape {tuple(x.shape)}",
                f"({channels},), one for each channel (axis 1)",
                "is the input channels-last?" if buffer.shape[:1] == x.shape[-1:] else "",
            )
        _check_dtype(name, buffer, x, who)
        if written and channels > 1 and buffer.stride(0) == 0:
            raise ArgumentError(
                f"{who} got an expanded {name}, whose channels are one number",
                "a number each",
                "use .clone()",
            )


def check_activation(activation: Any, who: str) -> None:
    """None, or a name that there is."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"{who} got activation={activation!r}", ", ".join(ACTIVATIONS))


def check_after(x: Tensor, residual: Any, activation: Any, who: str) -> None:
    """A residual of the shape and dtype of x, and an activation by a name that there is."""
    check_activation(activation, who)
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise TypeMismatchError(f"{who} got residual as {type(residual).__name__}", "a torch.Tensor")
    if residual.shape != x.shape:
        raise ShapeError(
            f"{who} got a residual of shape {tuple(residual.shape)} for an input of shape {tuple(x.shape)}",
            "the shape of the input",
        )
    if residual.dtype != x.dtype or residual.device != x.device:
        raise TypeMismatchError(
            f"{who} got a residual of {residual.dtype} on {residual.device} for {x.dtype} on {x.device}",
            "the dtype and device of the input",
        )


def check_counts(count: Tensor, who: str) -> None:
    """No channel has a single valid value: that would be its own mean, and of no variance."""
    single = count == 1
    if bool(single.any()):
        channels = int(single.sum())
        raise TooFewValuesError(
            f"{who} got a mask that leaves {channels} channel{'s' if channels > 1 else ''} one valid value",
            "at least two, or none",
            "mask that value too, use a larger batch, or call .eval()",
        )


def assert_counts(count: Tensor, who: str) -> None:
    """The same for a compiler, whose program raises when it runs; a program that is exported does not ask."""
    if not torch.compiler.is_exporting():
        given = f"{who} got a mask that leaves a channel one valid value; needed: at least two, or none"
        torch._assert_async((count != 1).all(), given)  # noqa: SLF001 - no public name


def check_values(x: Tensor, norm: spec.Norm, layout: Layout, eps: float, who: str) -> None:
    """Enough values share a statistic that is computed from x, and eps can carry a constant channel."""
    axes = norm.axes
    if axes.outlives_example and eps == 0 and x.numel():
        raise ArgumentError(
            f"{who} got eps=0 with statistics from the data", "eps > 0, since a channel may be constant"
        )
    few, values = None, layout.values
    if axes.outlives_example:
        few = _OF_BATCH
    elif axes == OVER_SPACE:
        few = _OF_INSTANCE
    elif axes.groups is not None:  # as PyTorch: several examples pass, and give the bias
        few, values = _OF_GROUP, values * x.shape[0]
    if few is not None and values == 1:
        per, do = few
        raise TooFewValuesError(
            f"{who} got one value per {per}: an input of shape {tuple(x.shape)}",
            f"at least two values per {per}, since one value is its own mean",
            do,
        )
