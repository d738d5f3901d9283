"""The right answers, from the float64 definition, and how far a result may be from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from firstday.subjects import Inputs, Subject, norm_of
from torch import Tensor

from normalcy import definition
from normalcy.testing import assert_close

STANDARD_ULPS = 16.0
"""For PyTorch's own operators in float32, whose mean is one float32 and whose sums are float32: about ten
roundings, each of the size that `Sizes` with `standard` gives."""


@dataclass(frozen=True)
class State:
    """Parameters and statistics of a layer at some moment, in float64; eps as used."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    batches: int
    eps: float
    momentum: float | None = None

    @staticmethod
    def of(layer: Any) -> State:
        """Copies."""
        norm = norm_of(layer)

        def copy(name: str) -> Tensor | None:
            value = getattr(norm, name, None)
            return None if value is None else value.detach().to(torch.float64, copy=True)

        batches = getattr(norm, "num_batches_tracked", None)
        eps = norm.eps
        if eps is None:  # RMS norm: the machine epsilon of the dtype it computes in
            dtype = torch.float64 if norm.weight.dtype == torch.float64 else torch.float32
            eps = torch.finfo(dtype).eps
        return State(
            copy("weight"),
            copy("bias"),
            copy("running_mean"),
            copy("running_var"),
            0 if batches is None else int(batches),
            eps,
            getattr(norm, "momentum", None),
        )


@dataclass(frozen=True)
class Answer:
    """Outputs, gradients and the state afterwards; `size` is what errors of y, dx, ... are measured by."""

    y: Tensor
    dx: Tensor
    dresidual: Tensor | None
    dweight: Tensor
    dbias: Tensor
    after: State
    size: dict[str, Tensor]
    coarse: dict[str, Tensor]


def cotangent(y: Tensor, seed: int = 2) -> Tensor:
    """A dy for y."""
    made = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(y.dtype)


def answer(
    subject: Subject, state: State, inputs: Inputs, *, training: bool, dy: Tensor | None = None
) -> Answer:
    """What `subject` in `state` gives for `inputs`, and the gradients for `dy` (default: `cotangent`)."""
    x, *rest = (t.detach() for t in inputs)
    residual = rest.pop(0).double().numpy() if subject.fused else None
    valid = np.broadcast_to(rest.pop(0).numpy(), x.shape) if rest else np.ones(x.shape, np.bool_)
    back = (cotangent(x) if dy is None else dy).detach().double().numpy()
    back = np.where(valid, back, 0.0)
    values = np.where(valid, x.double().numpy(), 0.0)
    made = _from_stored if subject.tracked and not training else _from_data
    normalized = made(subject, state, values, valid)
    y = normalized.y
    if residual is not None:
        z = y + residual
        back = np.where(z > 0, back, 0.0)
        y = np.where(valid, np.maximum(z, 0.0), 0.0)
    gradients = made(subject, state, values, valid, back)
    after = _updated(subject, state, normalized.forward, int(x.numel())) if training else state
    size, coarse = _sizes(subject, state, normalized, back, residual)
    dx, dweight, dbias = (torch.from_numpy(g) for g in gradients.gradients)
    dresidual = None if residual is None else torch.from_numpy(back)
    return Answer(torch.from_numpy(y), dx, dresidual, dweight, dbias, after, size, coarse)


@dataclass(frozen=True)
class _Made:
    y: np.ndarray
    xhat: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray
    forward: definition.Forward | None = None
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray] = ()  # type: ignore[assignment]


def _number(value: Tensor | None) -> np.ndarray | None:
    return None if value is None else value.numpy()


def _from_data(
    subject: Subject, state: State, x: np.ndarray, valid: np.ndarray, dy: np.ndarray | None = None
) -> _Made:
    weight, bias = _number(state.weight), _number(state.bias)
    keywords = {**subject.arguments, "mask": valid, "eps": state.eps}
    made = definition.forward(subject.norm, x, weight, bias, **keywords)
    gradients = ()
    if dy is not None:
        back = definition.backward(subject.norm, x, dy, weight, **keywords)
        gradients = (back.dx, back.dweight, back.dbias)
    spread, placed = (_over(subject, s, x.shape) for s in (made.rstd, made.mean))
    return _Made(made.y, made.xhat, placed, spread, made, gradients)


def _from_stored(
    subject: Subject, state: State, x: np.ndarray, valid: np.ndarray, dy: np.ndarray | None = None
) -> _Made:
    mean, var, weight, bias = (_number(v) for v in (state.mean, state.var, state.weight, state.bias))
    y = np.where(valid, definition.inference(x, mean, var, weight, bias, eps=state.eps), 0.0)
    xhat = np.where(valid, definition.inference(x, mean, var, eps=state.eps), 0.0)
    gradients = ()
    if dy is not None:
        back = definition.inference_backward(x, dy, mean, var, weight, eps=state.eps)
        dweight = (dy * xhat).sum(axis=tuple(i for i in range(x.ndim) if i != 1))
        gradients = (np.where(valid, back.dx, 0.0), dweight, back.dbias)
    along = [-1 if i == 1 else 1 for i in range(x.ndim)]
    rstd = np.broadcast_to(1 / np.sqrt(var + state.eps).reshape(along), x.shape)
    return _Made(y, xhat, np.broadcast_to(mean.reshape(along), x.shape), rstd, None, gradients)


def _over(subject: Subject, statistic: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A statistic of the definition at every place of x."""
    n, channels, *space = shape
    flat = [1] * len(space)
    if subject.norm == "batch":
        return np.broadcast_to(statistic.reshape(1, channels, *flat), shape)
    if subject.norm == "instance":
        return np.broadcast_to(statistic.reshape(n, channels, *flat), shape)
    if subject.norm == "group":
        return np.broadcast_to(
            np.repeat(statistic, channels // statistic.shape[1], 1).reshape(n, channels, *flat), shape
        )
    return np.broadcast_to(np.expand_dims(statistic, subject.arguments.get("axes", (-1,))), shape)


def _updated(subject: Subject, state: State, made: definition.Forward | None, values: int) -> State:
    """Running statistics after one more batch: averages over examples of means and unbiased variances."""
    if not subject.tracked or made is None or not values:
        return state
    assert state.mean is not None
    assert state.var is not None
    mean, var = made.mean, definition.stored_variance(made.var, made.count)
    if subject.norm == "instance":
        mean, var = mean.mean(0), var.mean(0)
    blended = [
        torch.from_numpy(definition.running_update(old.numpy(), new, state.momentum, updates=state.batches))
        for old, new in ((state.mean, mean), (state.var, var))
    ]
    return replace(state, mean=blended[0], var=blended[1], batches=state.batches + 1)


def _sizes(
    subject: Subject, state: State, made: _Made, dy: np.ndarray, residual: np.ndarray | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By element, what rounding errors scale with: here, and for operators whose mean is one float32."""
    axes = subject.arguments.get("axes", (-1,)) if subject.norm in {"layer", "rms"} else (1,)
    along = [n if i in {a % dy.ndim for a in axes} else 1 for i, n in enumerate(dy.shape)]
    weight = np.ones(along) if state.weight is None else np.abs(state.weight.numpy()).reshape(along)
    bias = np.zeros(along) if state.bias is None else np.abs(state.bias.numpy()).reshape(along)
    xhat, g = np.abs(made.xhat), np.abs(dy) * weight
    shared = tuple(i for i, n in enumerate(along) if n == 1)
    far = 1 + np.abs(np.nan_to_num(made.mean) * np.nan_to_num(made.rstd))

    def sized(xhat: np.ndarray, far: np.ndarray | float) -> dict[str, Tensor]:
        terms = g + (g.max() * (1 + xhat) if made.forward is not None else 0.0)
        found = {
            "y": weight * xhat + bias + (0.0 if residual is None else np.abs(residual)),
            "dx": made.rstd * terms * far,
            "dweight": (np.abs(dy) * xhat).sum(shared),
            "dbias": np.abs(dy).sum(shared),
            "dresidual": np.abs(dy),
        }
        return {name: torch.from_numpy(np.broadcast_to(v, v.shape).copy()) for name, v in found.items()}

    return sized(xhat, 1.0), sized((1 + xhat) * far, far)


def check_step(
    subject: Subject,
    layer: Any,
    *,
    call: Callable[..., Tensor] | None = None,
    inputs: Inputs | None = None,
    training: bool = True,
    standard: bool = False,
) -> Tensor:
    """Run `call` (default: the layer) forward and backward; raise unless all that came of it is right."""
    inputs = subject.inputs() if inputs is None else inputs
    right = answer(subject, State.of(layer), inputs, training=training)
    y = (layer if call is None else call)(*inputs)
    check_output(y, right, standard=standard)
    y.backward(cotangent(y))
    check_gradients(layer, inputs, right, standard=standard)
    check_statistics(layer, right.after)
    return y.detach()


def check_output(y: Tensor, right: Answer, *, standard: bool = False) -> None:
    """Raise unless y is right; `standard`: as right as PyTorch's operators are that far from zero."""
    _check("y", y, right.y, right, standard=standard)


def check_gradients(layer: Any, inputs: Inputs, right: Answer, *, standard: bool = False) -> None:
    """Raise unless the inputs and the layer's parameters have the right `.grad`."""
    norm = norm_of(layer)
    found = {"dx": inputs[0].grad, "dweight": _grad(norm, "weight"), "dbias": _grad(norm, "bias")}
    if right.dresidual is not None:
        found["dresidual"] = inputs[1].grad
    for name, gradient in found.items():
        if gradient is not None:
            _check(name, gradient, getattr(right, name), right, standard=standard)
    assert inputs[0].grad is not None


def check_statistics(layer: Any, after: State) -> None:
    """Raise unless the running statistics are `after`, to a few roundings of the dtype they are kept in."""
    norm = norm_of(layer)
    if after.mean is None or after.var is None:
        assert getattr(norm, "running_mean", None) is None
        return
    for name, right in (("running_mean", after.mean), ("running_var", after.var)):
        assert_close(getattr(norm, name), right, ulps=2, what=name)
    assert int(norm.num_batches_tracked) == after.batches


def _grad(norm: Any, name: str) -> Tensor | None:
    parameter = getattr(norm, name, None)
    if parameter is None:
        return None
    assert parameter.grad is not None, f"the {name} has no gradient"
    return parameter.grad


def _check(name: str, found: Tensor, right: Tensor, whole: Answer, *, standard: bool) -> None:
    size = (whole.coarse if standard else whole.size)[name]
    ulps = STANDARD_ULPS if standard else None
    if name != "y" and not standard:
        # sums of hundreds of terms and their product: each a rounding more than in the output
        ulps = 8 if found.dtype in {torch.float32, torch.float64} else 2
    if found.dtype == torch.float64 and not standard:
        # in float64 the mean is as coarse as x itself
        size, ulps = whole.coarse[name], STANDARD_ULPS
    assert_close(found, right.reshape(found.shape), ulps=ulps, scale=size.reshape(found.shape), what=name)
