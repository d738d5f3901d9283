"""Layer, RMS and group norm as layers: statistics are each example's own, in training and evaluation alike.

Layers that may keep running statistics are in `tracking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normalcy import spec
from normalcy.checks import check_input, trailing_shape
from normalcy.conventions import DEFAULT, TORCH, Convention, Default
from normalcy.errors import ShapeError
from normalcy.kernels.contract import compute_dtype
from normalcy.nn.base import Layer, TimeLayer
from normalcy.passes import Extras, normalized
from normalcy.statistics import Batch


class LayerNorm(Layer, nn.LayerNorm):
    """Layer norm over the last axes: `torch.nn.LayerNorm`. The same in training and evaluation.

    Source: Ba, Kiros & Hinton, Layer Normalization, arXiv:1607.06450.

    Example:
        >>> from normalcy.conventions import FLAX
        >>> LayerNorm(4, convention=FLAX).eps
        1e-06
    """

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

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around the norm in the same pass."""
        who, shape = type(self).__name__, tuple(self.normalized_shape)
        trailing_shape(input, shape, who)
        norm, parameters = spec.layer(len(shape)), (self.weight, self.bias)
        return normalized(input, norm, Batch(), *parameters, self.eps, who, extras, training=self.training)

    def _scripted(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Layer, nn.RMSNorm):
    """RMS norm over the last axes: `torch.nn.RMSNorm`. y = x/√(E[x²] + eps)·weight.

    `eps=None` is the machine epsilon of the dtype computed in (float32 for half precision).

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> RMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

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

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around the norm in the same pass."""
        who, shape = type(self).__name__, tuple(self.normalized_shape)
        trailing_shape(input, shape, who)
        eps = torch.finfo(compute_dtype(input)).eps if self.eps is None else self.eps
        norm, parameters = spec.rms(len(shape)), (self.weight, None)
        return normalized(input, norm, Batch(), *parameters, eps, who, extras, training=self.training)

    def _scripted(self, input: Tensor) -> Tensor:
        return functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class GroupNorm(TimeLayer, nn.GroupNorm):
    """Group norm over a group's channels and space: `torch.nn.GroupNorm`.

    Source: Wu & He, Group Normalization, arXiv:1803.08494.

    Example:
        >>> GroupNorm(2, 4)(torch.tensor([[1.0, 3.0, 5.0, 9.0]])).detach()
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """

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

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around the norm in the same pass."""
        who = f"GroupNorm({self.num_groups}, {self.num_channels})"
        norm, parameters = spec.group(self.num_groups), (self.weight, self.bias)
        return normalized(input, norm, Batch(), *parameters, self.eps, who, extras, training=self.training)

    def _scripted(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm2d(TimeLayer):
    """Layer norm over the channels of each position of (examples, channels, *space).

    Not group norm with one group, which averages over space too. PyTorch has no such layer; ConvNeXt's is
    of this kind. Parameters: `weight` and `bias`, (channels,).

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [5.0, 9.0]]).reshape(1, 2, 1, 2)
        >>> LayerNorm2d(2)(x).flatten().detach()
        tensor([-1.0000, -1.0000,  1.0000,  1.0000])
    """

    if TYPE_CHECKING:  # scripts read a class's annotations, and not these
        weight: Tensor | None
        bias: Tensor | None

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

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around the norm in the same pass."""
        who = f"LayerNorm2d({self.num_channels})"
        check_input(input, who)
        if input.dim() < 3 or input.shape[1] != self.num_channels:
            raise ShapeError(
                f"{who} got an input of shape {tuple(input.shape)}",
                f"(examples, {self.num_channels}, *space)",
            )
        norm, parameters = spec.channels, (self.weight, self.bias)
        return normalized(input, norm, Batch(), *parameters, self.eps, who, extras, training=self.training)

    def _scripted(self, input: Tensor) -> Tensor:
        y = functional.layer_norm(input.movedim(1, -1), [self.num_channels], self.weight, self.bias, self.eps)
        return y.movedim(-1, 1)

    def why_not_torch(self) -> str | None:
        """PyTorch has no layer of this kind."""
        return "PyTorch has no layer norm over the channels of NCHW"

    def __prepare_scriptable__(self) -> nn.Module:
        """Operators of PyTorch's serve where a layer is not there."""
        return self

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_channels}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
