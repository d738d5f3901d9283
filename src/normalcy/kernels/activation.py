"""What may follow a norm in the same pass, by name, with what its gradient needs.

Not a collection of activations: these are the ones that a pass can carry without keeping its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Activation(NamedTuple):
    """y = function(z); its gradient is dz = derivative(dy, z), or dy·(1 or `below`) by the sign of z."""

    function: Callable[[Tensor], Tensor]
    below: float | None = None
    derivative: Callable[[Tensor, Tensor], Tensor] | None = None


ACTIVATIONS = {
    "relu": Activation(functional.relu, below=0.0),
    "leaky_relu": Activation(functional.leaky_relu, below=0.01),
    "gelu": Activation(functional.gelu, derivative=torch.ops.aten.gelu_backward),
    "silu": Activation(functional.silu, derivative=torch.ops.aten.silu_backward),
}


def activated(z: Tensor, name: str | None) -> Tensor:
    """The activation of that name; z itself where there is none."""
    return z if name is None else ACTIVATIONS[name].function(z)


def positive(z: Tensor) -> Tensor:
    """Where the gradient passes whole: z > 0, and NaN, which is to stay seen."""
    return ~(z <= 0)


def pack(flags: Tensor) -> Tensor:
    """A bool tensor as one bit per element: uint8, ⌈n/8⌉ long."""
    flat = flags.reshape(-1)
    padded = functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).reshape(-1, 8)
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=flags.device)
    return (padded * places).sum(-1, dtype=torch.uint8)


def unpack(bits: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack`."""
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    flat = (bits.unsqueeze(-1) & places).ne(0).reshape(-1)
    return flat[: shape.numel()].reshape(shape)
