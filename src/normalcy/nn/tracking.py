"""Batch and instance norm as layers: the two that may keep running statistics.

Layers whose statistics are each example's own are in `features`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from normalcy import spec
from normalcy.checks import check_input, unit_interval
from normalcy.conventions import DEFAULT, TORCH, Convention, Default
from normalcy.errors import ArgumentError, ShapeError
from normalcy.nn.base import TimeLayer
from normalcy.passes import Extras, normalized
from normalcy.statistics import Batch, Running, Source, Stored

Momentum = float | None | Default


class Tracking(TimeLayer, _NormBase):
    """What batch and instance norm share: running statistics, and the choice between them and the data."""

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
        batch = isinstance(self, _Batch)
        super().__init__(
            num_features,
            convention.default_eps("batch" if batch else "instance", eps),  # type: ignore[arg-type]
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
            if not batch:
                raise ArgumentError(
                    f"{type(self).__name__} with statistics pooled by values",
                    'cumulative="batches": instances have statistics of their own, which pooling is not',
                )
            self.register_buffer("num_values_tracked", torch.zeros((), dtype=torch.int64, device=device))

    def reset_running_stats(self) -> None:
        """Set the statistics to their initial values: mean 0, variance 1, nothing counted."""
        super().reset_running_stats()
        if hasattr(self, "num_values_tracked"):
            self.num_values_tracked.zero_()

    def _source(self) -> Source:
        """The whole of train and eval."""
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            return Batch()
        if (self._norm.train if self.training else self._norm.infer) is spec.Origin.STORED:
            return Stored(mean, var)
        if not (self.training and self.track_running_stats):
            return Batch()
        if self.momentum is not None:
            unit_interval(f"{self._named()}.momentum", self.momentum)
        values = getattr(self, "num_values_tracked", None)
        return Batch(Running(mean, var, self.num_batches_tracked, self.momentum, self.convention, values))

    def _named(self) -> str:
        return f"{type(self).__name__}({self.num_features})"

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around the norm in the same pass."""
        check_input(input, self._named())
        unbatched = self._norm is not spec.batch and input.dim() == self._dims[0]
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
        if unbatched:
            extras = extras.unbatched(input)
        y = normalized(
            x,
            self._norm,
            self._source(),
            self.weight,
            self.bias,
            self.eps,
            self._named(),
            extras,
            training=self.training,
        )
        return y.squeeze(0) if unbatched else y

    def why_not_torch(self) -> str | None:
        """A sentence why PyTorch's own layer cannot be what this one is, or None if it can."""
        convention = self.convention
        if self.running_mean is not None and convention.correction != TORCH.correction:
            return f"it stores the biased variance ({convention.name}), PyTorch's layer the unbiased one"
        if convention.debias and self.running_mean is not None and self.momentum is not None:
            return "its statistics are debiased, which PyTorch's layer cannot continue"
        if hasattr(self, "num_values_tracked"):
            return "its cumulative average pools values, PyTorch's layer averages batches"
        return None

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        missing, unexpected, errors = lists
        counted = state_dict.get(f"{prefix}num_batches_tracked")
        pooled = hasattr(self, "num_values_tracked") and f"{prefix}num_values_tracked" not in state_dict
        if pooled and counted is not None and not counted.is_meta and int(counted) > 0:
            errors.append(
                f"{prefix}num_values_tracked is not in the state: the next batch would forget statistics; "
                'add how many values each channel has seen, or use cumulative="batches".'
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        """PyTorch's, and the convention where it is another."""
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.convention is TORCH else f"{text}, convention={_describe(self.convention)}"


class _Batch(Tracking):
    _norm = spec.batch

    def _scripted(self, input: Tensor) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            momentum,
            self.eps,
        )


class BatchNorm1d(_Batch, nn.BatchNorm1d):
    """Batch norm over (examples, channels) or (examples, channels, length): `torch.nn.BatchNorm1d`.

        y = (x − mean)/√(var + eps)·weight + bias

    In training mean and population variance are each channel's over the batch and space, and the running
    ones take them in; in evaluation the running ones serve. The arguments are PyTorch's, and `convention`:
    one record that says what momentum weighs, which variance is stored, how `momentum=None` averages,
    whether statistics are debiased, and the defaults of eps and momentum. `.momentum` always holds the
    weight of the new value. Differences from PyTorch are listed in docs/differences.md.
    `SyncBatchNorm.convert_sync_batchnorm` takes this layer for PyTorch's own and drops a convention.

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


class _Instance(Tracking):
    __constants__ = [*_NormBase.__constants__, "_dims"]  # noqa: RUF012 - as scripts read it
    __jit_unused_properties__ = ("_norm",)  # not for scripts to compile

    def why_not_torch(self) -> str | None:
        """As for batch norm; and PyTorch's instance norm does not average cumulatively."""
        if self.running_mean is not None and self.momentum is None:
            return "its momentum is None, with which PyTorch's instance norm never updates its statistics"
        return super().why_not_torch()

    def _scripted(self, input: Tensor) -> Tensor:
        one = input.dim() == self._dims[0]
        batched = input.unsqueeze(0) if one else input
        momentum = 0.0 if self.momentum is None else self.momentum
        y = functional.instance_norm(
            batched,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            momentum,
            self.eps,
        )
        return y.squeeze(0) if one else y

    @property
    def _norm(self) -> spec.Norm:  # type: ignore[override]
        return spec.tracked_instance if self.track_running_stats else spec.instance


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


def _describe(convention: Convention) -> str:
    extras = [] if not convention.debias else ["debiased"]
    return " ".join([convention.name, *extras])
