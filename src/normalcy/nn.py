"""The norms as layers: drop-in subclasses of PyTorch's own, with one body for each family.

`adopt` and `release` change a model's layers to these and back, in place. For functions see `functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from normalcy import spec
from normalcy.conventions import DEFAULT, TORCH, Convention, Default
from normalcy.errors import ArgumentError, ShapeError
from normalcy.functional import normalized
from normalcy.kernels.contract import compute_dtype
from normalcy.report import Item, Report
from normalcy.statistics import Batch, Running, Source, Stored

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNorm2d",
    "RMSNorm",
    "adopt",
    "release",
]

Momentum = float | None | Default


class _Tracking(_NormBase):
    """What batch and instance norm share: running statistics, and the choice between them and the data."""

    convention: Convention = TORCH
    num_values_tracked: Tensor
    _norm: spec.Norm
    _dims: tuple[int, ...]

    def __init__(
        self,
        num_features: int,
        eps: float | Default = DEFAULT,
        momentum: Momentum = DEFAULT,
        affine: bool | None = None,
        track_running_stats: bool | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        convention: Convention = TORCH,
    ) -> None:
        batch = self._norm is spec.batch
        super().__init__(
            num_features,
            convention.default_eps(self._norm.name, eps),  # type: ignore[arg-type]
            convention.weight_of_new(momentum),
            batch if affine is None else affine,
            batch if track_running_stats is None else track_running_stats,
            device,
            dtype,
        )
        if not bias:  # a keyword of PyTorch's own constructor only since 2.13
            self.register_parameter("bias", None)
        if convention is not TORCH:
            self.convention = convention
        if self.running_mean is not None and self.momentum is None and convention.cumulative == "values":
            self.register_buffer("num_values_tracked", torch.zeros((), dtype=torch.int64, device=device))

    def reset_running_stats(self) -> None:
        """Set the statistics to their initial values: mean 0, variance 1, nothing counted."""
        super().reset_running_stats()
        if hasattr(self, "num_values_tracked"):
            self.num_values_tracked.zero_()

    def _source(self) -> Source:
        """The whole of train and eval. As in PyTorch, evaluation uses the buffers if there are any."""
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None or (self.training and not self.track_running_stats):
            return Batch()
        if not self.training:
            return Stored(mean, var)
        values = getattr(self, "num_values_tracked", None)
        batches = self.num_batches_tracked
        return Batch(Running(mean, var, batches, self.momentum, self.convention, values))

    def _named(self) -> str:
        return f"{type(self).__name__}({self.num_features})"

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; see the class."""
        unbatched = self._norm is spec.instance and input.dim() == self._dims[0]
        if input.dim() not in self._dims:
            wanted = " or ".join(f"{d}-D" for d in self._dims)
            raise ShapeError(
                f"{self._named()} got a {input.dim()}-D input of shape {tuple(input.shape)}", wanted
            )
        x = input.unsqueeze(0) if unbatched else input
        if x.shape[1] != self.num_features and (self.affine or self.running_mean is not None):
            raise ShapeError(
                f"{self._named()} got {x.shape[1]} channels: an input of shape {tuple(input.shape)}",
                f"{self.num_features} channels on axis {0 if unbatched else 1}",
                "is the input channels-last?" if input.shape[-1] == self.num_features else "",
            )
        y = normalized(x, self._norm, self._source(), self.weight, self.bias, self.eps, self._named())
        return y.squeeze(0) if unbatched else y

    def extra_repr(self) -> str:
        """PyTorch's, and the convention where it is another."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.convention is TORCH else f"{text}, convention={_describe(self.convention)}"


class _Batch(_Tracking):
    _norm = spec.batch


class BatchNorm1d(_Batch, nn.BatchNorm1d):
    """Batch norm over (examples, channels) or (examples, channels, length): `torch.nn.BatchNorm1d`.

        y = (x − mean)/√(var + eps)·weight + bias

    In training mean and population variance are each channel's over the batch and space, and the running
    ones take them in; in evaluation the running ones serve. The arguments are PyTorch's, and `convention`:
    one record that says what momentum weighs, which variance is stored, how `momentum=None` averages,
    whether statistics are debiased, and the defaults of eps and momentum. `.momentum` always holds the
    weight of the new value. Differences from PyTorch are listed in docs/differences.md.

    Raises (in forward):
        ShapeError: dimensions or channels do not fit.
        TooFewValuesError: one value per channel in training; no statistic was touched.

    Source: Ioffe & Szegedy, Batch Normalization, arXiv:1502.03167.

    Example:
        >>> from normalcy.conventions import KERAS
        >>> BatchNorm1d(3, momentum=0.9, convention=KERAS)  # doctest: +ELLIPSIS
        BatchNorm1d(3, eps=0.001, momentum=0.1, affine=True, ..., convention=Keras 3)
    """

    _dims = (2, 3)


class BatchNorm2d(_Batch, nn.BatchNorm2d):
    """Batch norm over (examples, channels, height, width); otherwise as `BatchNorm1d`.

    Example:
        >>> BatchNorm2d(8)(torch.rand(2, 8, 5, 5)).mean().abs() < 1e-6
        tensor(True)
    """

    _dims = (4,)


class BatchNorm3d(_Batch, nn.BatchNorm3d):
    """Batch norm over (examples, channels, depth, height, width); otherwise as `BatchNorm1d`."""

    _dims = (5,)


class _Instance(_Tracking):
    _norm = spec.instance


class InstanceNorm1d(_Instance, nn.InstanceNorm1d):
    """Instance norm over (examples, channels, length) or (channels, length): `torch.nn.InstanceNorm1d`.

    Mean and variance are each channel's of each example. With `track_running_stats` their averages over
    examples are kept, and evaluation uses them as batch norm does. Parameters and statistics are off by
    default, as in PyTorch.

    Source: Ulyanov, Vedaldi & Lempitsky, Instance Normalization, arXiv:1607.08022.

    Example:
        >>> InstanceNorm1d(2)(torch.tensor([[[2.0, 4.0], [1.0, 9.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [-1.0000,  1.0000]]])
    """

    _dims = (2, 3)


class InstanceNorm2d(_Instance, nn.InstanceNorm2d):
    """Instance norm over ([examples,] channels, height, width); otherwise as `InstanceNorm1d`."""

    _dims = (3, 4)


class InstanceNorm3d(_Instance, nn.InstanceNorm3d):
    """Instance norm over ([examples,] channels, depth, height, width); otherwise as `InstanceNorm1d`."""

    _dims = (4, 5)


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
        _check_trailing(input, shape, type(self).__name__)
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
        _check_trailing(x, shape, type(self).__name__)
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
        if input.dim() < 3 or input.shape[1] != self.num_channels:
            raise ShapeError(
                f"{who} got an input of shape {tuple(input.shape)}",
                f"(examples, {self.num_channels}, *space)",
            )
        return normalized(input, spec.channels, Batch(), self.weight, self.bias, self.eps, who)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_channels}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
    nn.InstanceNorm3d: InstanceNorm3d,
    nn.LayerNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
    nn.RMSNorm: RMSNorm,
}
_TORCHS = {ours: torchs for torchs, ours in _OURS.items()}


def adopt(model: nn.Module) -> Report:
    """Make PyTorch's norm layers in `model` these, in place.

    Only where the type is exactly PyTorch's: then the object stays the same, and with it parameters, hooks,
    references and the optimizer. Subclasses, SyncBatchNorm and parametrized layers are left and reported.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> [item.where for item in adopt(model).done], type(model[1]).__module__
        (['1'], 'normalcy.nn')
    """
    report = Report(model)
    for path, module in _modules(model):
        kind = type(module)
        if kind in _OURS:
            module.__class__ = _OURS[kind]
            report.done.append(Item(path, f"torch.nn.{kind.__name__} → normalcy.nn.{kind.__name__}"))
        elif isinstance(module, (*_OURS, nn.SyncBatchNorm)) and kind not in _TORCHS:
            report.refused.append(Item(path, _why_not_exact(module)))
    return report


def release(model: nn.Module) -> Report:
    """Make these layers in `model` PyTorch's own again, in place: the inverse of `adopt`.

    A layer that PyTorch's cannot express (a `LayerNorm2d`, another stored variance, debiased or pooled
    statistics) is refused by name and left as it is.

    Example:
        >>> model = nn.Sequential(BatchNorm1d(8), LayerNorm2d(4))
        >>> report = release(model)
        >>> type(model[0]).__module__, [item.where for item in report.refused]
        ('torch.nn.modules.batchnorm', ['1'])
    """
    report = Report(model)
    for path, module in _modules(model):
        kind = type(module)
        if kind in _TORCHS:
            why = _why_torch_cannot(module)
            if why:
                report.refused.append(Item(path, why))
                continue
            module.__dict__.pop("convention", None)
            module.__class__ = _TORCHS[kind]
            report.done.append(Item(path, f"normalcy.nn.{kind.__name__} → torch.nn.{kind.__name__}"))
        elif isinstance(module, LayerNorm2d):
            report.refused.append(Item(path, "PyTorch has no layer norm over the channels of NCHW"))
        elif isinstance(module, tuple(_TORCHS)):
            report.refused.append(Item(path, _why_not_exact(module)))
    return report


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, under its first path."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a {type(model).__name__}", "a torch.nn.Module")
    return list(model.named_modules())


def _why_not_exact(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm reduces over ranks, which a plain layer does not"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized, which makes it a class of its own"
    return f"{type(module).__name__} is a subclass, and may compute something else"


def _why_torch_cannot(module: nn.Module) -> str | None:
    if not isinstance(module, _Tracking):
        return None
    convention = module.convention
    if module.running_mean is not None and convention.correction != TORCH.correction:
        return f"it stores the biased variance ({convention.name}), PyTorch's layer the unbiased one"
    if convention.debias and module.running_mean is not None and module.momentum is not None:
        return "its statistics are debiased, which PyTorch's layer cannot continue"
    if hasattr(module, "num_values_tracked"):
        return "its cumulative average pools values, PyTorch's layer averages batches"
    return None


def _describe(convention: Convention) -> str:
    extras = [] if not convention.debias else ["debiased"]
    return " ".join([convention.name, *extras])


def _check_trailing(x: Tensor, shape: tuple[int, ...], who: str) -> None:
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            f"{who} got an input of shape {tuple(x.shape)}", f"(..., {', '.join(map(str, shape))})"
        )
