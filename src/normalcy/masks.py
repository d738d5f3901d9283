"""Masks of valid places: checked, and made from lengths.

True is valid everywhere in this package. Not for sample weights: a place counts fully or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normalcy.errors import ArgumentError, ShapeError, TypeMismatchError


def checked(mask: Tensor, x: Tensor) -> Tensor:
    """`mask` broadcast to the shape of x: a view, nothing is copied.

    Raises:
        TypeMismatchError: not a bool tensor, or on another device than x.
        ShapeError: it does not broadcast to x.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = f"mask is {mask.dtype if isinstance(mask, Tensor) else type(mask).__name__}"
        raise TypeMismatchError(given, "torch.bool, True = valid", "use mask.bool()")
    if mask.device != x.device:
        raise TypeMismatchError(f"mask is on {mask.device}, the input on {x.device}", "one device for both")
    try:
        return mask.broadcast_to(x.shape)
    except RuntimeError:
        given = f"mask has shape {tuple(mask.shape)} for an input of shape {tuple(x.shape)}"
        places = x.dim() > 2 and tuple(mask.shape) == (x.shape[0], *x.shape[2:])
        do = "use mask[:, None], the same for all channels" if places else ""
        raise ShapeError(given, "a shape that broadcasts to the input's", do) from None


def has_values(t: Tensor) -> bool:
    """Whether the values can be read: not on the meta device, and no stand-in of a tracer."""
    return type(t) is Tensor and not t.is_meta


def of_lengths(lengths: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask of an input (examples, ..., time) whose i-th example is valid up to `lengths[i]`.

    Args:
        lengths: an integer tensor (examples,), from 0 to the last extent of `shape`.
        shape: the input's shape; its last axis is time.

    Returns:
        Bool, (examples, 1, ..., time), true where t < lengths[i].

    Raises:
        TypeMismatchError: lengths are not integers.
        ShapeError: not one length for each example. ArgumentError: a length below 0 or beyond the last axis.

    Example:
        >>> of_lengths(torch.tensor([1, 3]), (2, 4, 3)).int().tolist()
        [[[1, 0, 0]], [[1, 1, 1]]]
    """
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int64, torch.int32, torch.int16):
        given = f"lengths is {lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__}"
        raise TypeMismatchError(given, "a tensor of integers, one for each example")
    if len(shape) < 3 or tuple(lengths.shape) != (shape[0],):
        raise ShapeError(
            f"lengths has shape {tuple(lengths.shape)} for an input of shape {tuple(shape)}",
            "one length for each example of (examples, channels, ..., time)",
        )
    if not torch.compiler.is_compiling() and has_values(lengths):
        outside = (lengths < 0) | (lengths > shape[-1])
        if bool(outside.any()):
            wrong = lengths[outside][0].item()
            raise ArgumentError(
                f"{wrong} is among the lengths", f"0 to {shape[-1]}, the extent of the last axis"
            )
    elif torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        fits = ((lengths >= 0) & (lengths <= shape[-1])).all()
        torch._assert_async(fits, "lengths outside 0 to the extent of the last axis")  # noqa: SLF001 - no public name
    time = torch.arange(shape[-1], device=lengths.device)
    return (time < lengths.unsqueeze(-1)).reshape(shape[0], *([1] * (len(shape) - 2)), shape[-1])
