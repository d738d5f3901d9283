"""Which places of a norm's input are valid, by the arguments of its call.

Not for checking or making masks: that is `normalcy.masks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from normalcy import masks
from normalcy.nn.base import Layer, TimeLayer

_ARGUMENTS = ("input", "mask", "lengths")


def valid_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The valid places of the input of a norm that is called with these arguments; None where all are.

    Only the layers of this library take a mask, or lengths where the last axis is time. In a subclass with a
    `forward` of its own a mask may mean anything, so that None is returned.

    Returns:
        Bool, of the shape of the input, True = valid; or None.

    Raises:
        TypeMismatchError, ShapeError, ArgumentError: as the layer itself refuses a mask or lengths.

    Example:
        >>> import torch
        >>> from normalcy.nn import BatchNorm1d
        >>> x = torch.zeros(2, 1, 3)
        >>> valid_of(BatchNorm1d(1), (x,), {"lengths": torch.tensor([1, 3])}).int().tolist()
        [[[1, 0, 0]], [[1, 1, 1]]]
        >>> valid_of(nn.BatchNorm1d(1), (x,), {}) is None
        True
    """
    if type(module).forward not in (Layer.forward, TimeLayer.forward):
        return None
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    mask, lengths = given.get("mask"), given.get("lengths")
    if mask is None and lengths is not None:
        mask = masks.of_lengths(lengths, given["input"].shape)
    return None if mask is None else masks.checked(mask, given["input"])
