"""Layer, RMS and group norm as layers: statistics are each example's own, in training and evaluation alike.

Layers that may keep running statistics are in `tracking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normalcy import spec
from normalcy.checks import check_input, trailing_shape
from normalcy.conventions import DEFAULT, TORCH, Convention, Default
from normalcy.errors import ShapeError
from normalcy.functional import normalized
from normalcy.kernels.contract import compute_dtype
from normalcy.statistics import Batch


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last axes: `torch.nn.LayerNorm`. The same in training and evaluation.

    Source: Ba, Kiros & Hinton, Layer Normalization, arXiv:1607.06450.

    Example:
        >>> from normalcy.conventions import FLAX
        >>> LayerNorm(4, convention=FLAX).eps
        1e-06
    """

    convention: Convention = TORCH

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | Default = DEFAULT,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        convention: Convention = TORCH,
    ) -> None:
        eps = convention.default_eps("layer", eps)  # type: ignore[assignment]
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        if convention is not TORCH:
            self.convention = convention

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; see the class."""
        shape = tuple(self.normalized_shape)
        trailing_shape(input, shape, type(self).__name__)
        norm = spec.layer(len(shape))
        return normalized(input, norm, Batch(), self.weight, self.bias, self.eps, type(self).__name__)


class RMSNorm(nn.RMSNorm):
    """RMS norm over the last axes: `torch.nn.RMSNorm`. y = x/√(E[x²] + eps)·weight.

    `eps=None` is the machine epsilon of the dtype computed in (float32 for half precision).

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> RMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

    convention: Convention = TORCH

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | Default | None = DEFAULT,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        convention: Convention = TORCH,
    ) -> None:
        eps = convention.default_eps("rms", eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if convention is not TORCH:
            self.convention = convention

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`; see the class."""
        shape = tuple(self.normalized_shape)
        trailing_shape(x, shape, type(self).__name__)
        eps = torch.finfo(compute_dtype(x)).eps if self.eps is None else self.eps
        return normalized(x, spec.rms(len(shape)), Batch(), self.weight, None, eps, type(self).__name__)


class GroupNorm(nn.GroupNorm):
    """Group norm over a group's channels and space: `torch.nn.GroupNorm`.

    Source: Wu & He, Group Normalization, arXiv:1803.08494.

    Example:
        >>> GroupNorm(2, 4)(torch.tensor([[1.0, 3.0, 5.0, 9.0]])).detach()
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

    convention: Convention = TORCH

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float | Default = DEFAULT,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        convention: Convention = TORCH,
    ) -> None:
        eps = convention.default_eps("group", eps)  # type: ignore[assignment]
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)  # type: ignore[arg-type]
        if not bias:
            self.register_parameter("bias", None)
        if convention is not TORCH:
            self.convention = convention

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; see the class."""
        who = f"GroupNorm({self.num_groups}, {self.num_channels})"
        norm = spec.group(self.num_groups)
        return normalized(input, norm, Batch(), self.weight, self.bias, self.eps, who)


class LayerNorm2d(nn.Module):
    """Layer norm over the channels of each position of (examples, channels, *space).

    Not group norm with one group, which averages over space too. PyTorch has no such layer; ConvNeXt's is
    of this kind. Parameters: `weight` and `bias`, (channels,).

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [5.0, 9.0]]).reshape(1, 2, 1, 2)
        >>> LayerNorm2d(2)(x).flatten().detach()
        tensor([-1.0000, -1.0000,  1.0000,  1.0000])
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        eps: float | Default = DEFAULT,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        convention: Convention = TORCH,
    ) -> None:
        super().__init__()
        self.num_channels, self.elementwise_affine = num_channels, elementwise_affine
        self.eps: float = convention.default_eps("layer", eps)  # type: ignore[assignment]
        self.convention = convention
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            values = torch.empty(num_channels, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; see the class."""
        who = f"LayerNorm2d({self.num_channels})"
        check_input(input, who)
        if input.dim() < 3 or input.shape[1] != self.num_channels:
            raise ShapeError(
                f"{who} got an input of shape {tuple(input.shape)}",
                f"(examples, {self.num_channels}, *space)",
            )
        return normalized(input, spec.channels, Batch(), self.weight, self.bias, self.eps, who)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_channels}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
