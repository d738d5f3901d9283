"""The norms as functions, with `torch.nn.functional`'s positional arguments.

Layers with parameters and buffers are in `nn`. Every function refuses what it cannot do right, with a
sentence, before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from normalcy import autograd, checks, spec
from normalcy.errors import ArgumentError
from normalcy.kernels.contract import compute_dtype
from normalcy.passes import Extras, normalized
from normalcy.statistics import Batch, Running, Source, Stored

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize", "rms_norm"]

_P = ParamSpec("_P")


def _overridable(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Let tensor subclasses and torch-function modes see the call, as PyTorch's own functions do."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(tensors):
            seen: Tensor = handle_torch_function(call, tensors, *args, **kwargs)
            return seen
        return function(*args, **kwargs)

    return call


@_overridable
def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize each channel over the batch and space.

        y = (x − mean)/√(var + eps)·weight + bias,   var = Σ(x − mean)²/n over all axes but 1

    With `training` the statistics are the batch's, and `running_mean` and `running_var` (if given) take
    them in, in place: running ← (1 − momentum)·running + momentum·new, the variance unbiased. Without it
    they are the running ones and nothing changes.

    Args:
        x: (examples, channels, *space), floating; half precision may have float32 parameters.
        running_mean: (channels,).
        running_var: (channels,).
        weight: γ, (channels,).
        bias: β, (channels,).
        training: use the batch's statistics.
        momentum: the weight of the new value, from 0 to 1.
        eps: added to the variance, inside the root; positive where statistics come from the batch.
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        lengths: instead of a mask, where the last axis is time: example i is valid up to lengths[i].
        residual: added after bias; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Returns:
        y in the shape, memory format and dtype of x. Statistics are summed in float64. An empty batch
        gives an empty output and updates nothing. A constant channel gives exactly β.

    Raises:
        ArgumentError: neither statistics nor `training=True`, or a number out of its range.
        ShapeError: a shape does not fit. TooFewValuesError: one value per channel in training.
        TypeMismatchError: x is not floating, or dtypes do not go together.

    Source: Ioffe & Szegedy, Batch Normalization, arXiv:1502.03167.

    Example:
        >>> x = torch.tensor([[2.0], [4.0], [6.0], [8.0]])
        >>> batch_norm(x, training=True, eps=1e-12).flatten()
        tensor([-1.3416, -0.4472,  0.4472,  1.3416])
    """
    source = _source(running_mean, running_var, momentum, "batch_norm", training=training)
    extras = Extras(mask, lengths, residual, activation)
    return normalized(x, spec.batch, source, weight, bias, eps, "batch_norm", extras, training=training)


@_overridable
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize each example over its last axes.

        y = (x − mean)/√(var + eps)·weight + bias,   mean and var over the axes of `normalized_shape`

    Args:
        x: (..., *normalized_shape), floating.
        normalized_shape: the extents of the last axes, which are averaged over.
        weight: of shape `normalized_shape`.
        bias: of shape `normalized_shape`.
        eps: added to the variance, inside the root.
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        residual: added after bias; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Raises:
        ShapeError: the last axes of x are not `normalized_shape`, or a parameter's shape differs.

    Source: Ba, Kiros & Hinton, Layer Normalization, arXiv:1607.06450.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0, 5.0, 7.0]]), 4, eps=1e-12)
        tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """
    shape = checks.trailing_shape(x, normalized_shape, "layer_norm")
    extras = Extras(mask, None, residual, activation)
    return normalized(
        x, spec.layer(len(shape)), Batch(), weight, bias, eps, "layer_norm", extras, training=_training()
    )


@_overridable
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Divide each example by its root mean square over the last axes.

        y = x/√(E[x²] + eps)·weight

    Args:
        x: (..., *normalized_shape), floating.
        normalized_shape: the extents of the last axes, which are averaged over.
        weight: of shape `normalized_shape`.
        eps: inside the root; None: the machine epsilon of the dtype computed in (float32 for half).
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        residual: added after weight; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Raises:
        ShapeError: the last axes of x are not `normalized_shape`, or the weight's shape differs.

    Source: Zhang & Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), 2)
        tensor([[0.8485, 1.1314]])
    """
    shape = checks.trailing_shape(x, normalized_shape, "rms_norm")
    if eps is None:
        eps = torch.finfo(compute_dtype(x)).eps
    extras = Extras(mask, None, residual, activation)
    return normalized(
        x, spec.rms(len(shape)), Batch(), weight, None, eps, "rms_norm", extras, training=_training()
    )


@_overridable
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize each group of channels of each example, over the group's channels and space.

        y = (x − mean)/√(var + eps)·weight + bias,   mean and var over one group of one example

    Args:
        x: (examples, channels, *space), floating.
        num_groups: how many groups; must divide the channels.
        weight: (channels,).
        bias: (channels,).
        eps: added to the variance, inside the root.
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        lengths: instead of a mask, where the last axis is time: example i is valid up to lengths[i].
        residual: added after bias; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Raises:
        ShapeError: the channels do not divide into the groups, or a parameter's shape differs.

    Source: Wu & He, Group Normalization, arXiv:1803.08494.

    Example:
        >>> group_norm(torch.tensor([[1.0, 3.0, 5.0, 9.0]]), 2)
        tensor([[-1.0000,  1.0000, -1.0000,  1.0000]])
    """
    extras = Extras(mask, lengths, residual, activation)
    return normalized(
        x,
        spec.group(checks.whole("num_groups", num_groups, "group_norm")),
        Batch(),
        weight,
        bias,
        eps,
        "group_norm",
        extras,
        training=_training(),
    )


@_overridable
def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize each channel of each example over space.

        y = (x − mean)/√(var + eps)·weight + bias,   mean and var over one channel of one example

    With `use_input_stats`, running statistics (if given) take in the batch's average of the examples'
    means and unbiased variances. Without it the running ones serve, as they do for batch norm.

    Args:
        x: (examples, channels, *space), floating.
        running_mean: (channels,).
        running_var: (channels,).
        weight: (channels,).
        bias: (channels,).
        use_input_stats: each instance's own statistics; False: the running ones.
        momentum: the weight of the new value, from 0 to 1.
        eps: added to the variance, inside the root.
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        lengths: instead of a mask, where the last axis is time: example i is valid up to lengths[i].
        residual: added after bias; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Raises:
        ArgumentError: neither running statistics nor `use_input_stats`.
        ShapeError: a shape does not fit. TooFewValuesError: one value per channel and example.

    Source: Ulyanov, Vedaldi & Lempitsky, Instance Normalization, arXiv:1607.08022.

    Example:
        >>> instance_norm(torch.tensor([[[2.0, 4.0], [1.0, 9.0]]]))
        tensor([[[-1.0000,  1.0000],
                 [-1.0000,  1.0000]]])
    """
    source = _source(running_mean, running_var, momentum, "instance_norm", use_input_stats=use_input_stats)
    extras = Extras(mask, lengths, residual, activation)
    return normalized(
        x, spec.instance, source, weight, bias, eps, "instance_norm", extras, training=use_input_stats
    )


@_overridable
def normalize(
    x: Tensor,
    norm: spec.Norm,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    source: Source | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Normalize by any `spec.Norm`: what every other function here is a row of.

        y = (x − mean)/√(var + eps)·weight + bias,   without centring y = x/√(E[x²] + eps)·weight + bias

    Args:
        x: floating, of a shape that `norm.axes` resolves.
        norm: axes × sources × centred or not.
        weight: as many values as the parameter axes have.
        bias: the same.
        source: `statistics.Batch` (default) or `statistics.Stored`.
        eps: added to the variance, inside the root.
        mask: bool, broadcastable to x, True = valid: other places count nowhere, whatever they hold.
        residual: added after bias; the shape and dtype of x.
        activation: then "relu", "leaky_relu" (slope 0.01), "gelu" or "silu".

    Raises:
        ShapeError: the axes do not resolve, or a parameter's shape differs.
        TooFewValuesError: one value for each statistic, where batch, instance or group norm refuse it.

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [5.0, 9.0]]).reshape(1, 2, 1, 2)
        >>> normalize(x, spec.channels).flatten()
        tensor([-1.0000, -1.0000,  1.0000,  1.0000])
    """
    extras = Extras(mask, None, residual, activation)
    return normalized(x, norm, source or Batch(), weight, bias, eps, f"{norm.name} norm", extras)


def _source(mean: Tensor | None, var: Tensor | None, momentum: float, who: str, **from_data: bool) -> Source:
    """The data's statistics, recorded where there are buffers; or the stored ones."""
    checks.unit_interval("momentum", momentum)
    ((name, wanted),) = from_data.items()
    if wanted and mean is None and var is None:
        return Batch()
    if wanted and (mean is None or var is None):
        raise ArgumentError(f"{who} got one of running_mean and running_var", "both, or neither")
    if mean is None or var is None:
        raise ArgumentError(
            f"{who} got {name}=False and no running statistics",
            f"either {name}=True (the data's statistics) or running_mean and running_var",
            "say which of the two is meant",
        )
    return Batch(Running(mean, var, momentum=momentum)) if wanted else Stored(mean, var)


def _training() -> bool:
    """Whether a norm without a mode is to be taken as training: not where a program is exported."""
    return torch.is_grad_enabled() and not torch.compiler.is_exporting() and not autograd.tracing()
