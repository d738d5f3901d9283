"""`torch.func`: derivatives and batching, judged by the float64 definition and its differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from firstday.answers import Answer, State, answer, check_gradients, check_output, check_statistics, cotangent
from firstday.facilities import facility
from firstday.subjects import ALL, Inputs, Subject
from torch import Tensor
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from normalcy.errors import NormalcyError

# raised inside PyTorch, where forward-mode differentiation is set up
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
WIDE = torch.float64


def small(subject: Subject) -> Subject:
    """The subject with fewer examples and less space, where that leaves its parameters alone."""
    batch = 3 if subject.norm == "batch" else 1
    shape, mask = (batch, *subject.shape[1:]), subject.mask
    return replace(subject, shape=shape, mask=None if mask is None else (batch, *mask[1:]))


SMALL = tuple(
    small(s)
    for s in ALL
    # 1d, 2d and 3d differ in a check of dimensions only
    if s.name.removesuffix(" masked")
    in {
        "BatchNorm1d",
        "InstanceNorm1d",
        "InstanceNorm1d tracked",
        "LayerNorm",
        "GroupNorm",
        "RMSNorm",
        "Fused",
    }
    or s.family == "LayerNorm2d"
)


def pure(layer: Any) -> Callable[..., Tensor]:
    """The layer as a function that changes nothing: training updates copies of the statistics."""

    def call(*inputs: Tensor) -> Tensor:
        copies = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        y: Tensor = functional_call(layer, copies, inputs)
        return y

    return call


def double(inputs: Inputs) -> Inputs:
    return tuple(t.detach().to(WIDE) if t.is_floating_point() else t for t in inputs)


def by_differences(
    subject: Subject,
    state: State,
    inputs: Inputs,
    value: Callable[[Answer], Tensor],
    along: Tensor,
    *,
    training: bool,
) -> Tensor:
    """d value / dx along `along`, by the central difference of the definition: an error of O(h²)."""
    h = 1e-4
    ends = []
    for step in (h, -h):
        moved = (inputs[0] + step * along, *inputs[1:])
        ends.append(value(answer(subject, state, moved, training=training)))
    return (ends[0] - ends[1]) / (2 * h)


def close(found: Tensor, right: Tensor) -> None:
    """To what a difference quotient with h = 1e-4 gives: h² of the third derivative, and rounding/h.

    Values at 1e4 carry 2e-12 in float64, divided by h 2e-8, times the few units of a derivative.
    """
    found = found.detach()
    assert found.shape == right.shape
    scale = float(right.abs().max())
    assert scale > 0
    assert torch.isfinite(found).all()
    assert float((found - right).abs().max()) <= 1e-5 * max(scale, 1.0)


@facility("`torch.func.grad` and `vjp`", ALL, note="in training the statistics are arguments, too")
@MODES
def test_func_grad_gives_the_gradient_and_counts_once(subject: Subject, training: bool) -> None:
    layer, inputs = subject.layer(training=training), tuple(t.detach() for t in subject.inputs())
    right = answer(subject, State.of(layer), inputs, training=training)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def loss(x: Tensor, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        y = functional_call(layer, (parameters, buffers), (x, *inputs[1:]))
        return (y * cotangent(x)).sum()

    dx, found = grad(loss, argnums=(0, 1))(inputs[0], parameters, buffers)
    check_statistics(layer, right.after)
    _, back = vjp(lambda x: pure(layer)(x, *inputs[1:]), inputs[0])
    assert torch.equal(back(cotangent(inputs[0]))[0], dx)
    check_statistics(layer, right.after)
    for name, parameter in parameters.items():
        parameter.grad = found[name]
    leaf = inputs[0].clone()
    leaf.grad = dx
    check_gradients(layer, (leaf, *inputs[1:]), replace(right, dresidual=None))


TRANSFORMS: dict[str, Callable[[Any, Inputs], Any]] = {
    "grad": lambda layer, inputs: grad(lambda x: layer(x, *inputs[1:]).sum())(inputs[0]),
    "jvp": lambda layer, inputs: jvp(lambda x: layer(x, *inputs[1:]), inputs[:1], inputs[:1]),
    "vmap": lambda layer, inputs: vmap(layer)(*[torch.stack([t, t]) for t in inputs]),
}


@facility(
    "`torch.func` in training, running statistics captured",
    [s for s in ALL if s.tracked],
    refuses=lambda _: True,
    note="as with PyTorch's layers: pass the statistics to `functional_call`, as for ensembles",
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_captured_statistics_are_not_updated_by_halves(subject: Subject, transform: str) -> None:
    layer, inputs = subject.layer(), tuple(t.detach() for t in subject.inputs())
    before = State.of(layer)
    with pytest.raises((RuntimeError, NormalcyError), match=r"statistics|captured Tensor|vmap"):
        TRANSFORMS[transform](layer, inputs)
    check_statistics(layer, before)


@facility("`torch.func.jvp` and forward-mode AD", ALL)
@MODES
def test_forward_mode_gives_the_directional_derivative(subject: Subject, training: bool) -> None:
    layer, inputs = subject.layer(dtype=WIDE, training=training), double(subject.inputs())
    state = State.of(layer)
    direction = cotangent(inputs[0], seed=9)
    y, slope = jvp(lambda x: pure(layer)(x, *inputs[1:]), (inputs[0],), (direction,))
    right = answer(subject, state, inputs, training=training)
    check_output(y, right)
    check_statistics(layer, state)
    close(slope, by_differences(subject, state, inputs, lambda a: a.y, direction, training=training))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], direction)
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual, *inputs[1:])).tangent
    check_statistics(layer, right.after)
    assert tangent is not None
    assert torch.allclose(tangent, slope, rtol=1e-9, atol=1e-12)


@facility("`torch.func.jacfwd` and `jacrev`", SMALL)
@MODES
def test_jacobians_agree_with_the_definition(subject: Subject, training: bool) -> None:
    layer, inputs = subject.layer(dtype=WIDE, training=training), double(subject.inputs())
    state, n = State.of(layer), inputs[0].numel()
    forward = jacfwd(lambda x: pure(layer)(x, *inputs[1:]).flatten())(inputs[0]).detach().reshape(n, n)
    reverse = jacrev(lambda x: pure(layer)(x, *inputs[1:]).flatten())(inputs[0]).detach().reshape(n, n)
    for j in range(0, n, max(1, n // 12)):  # a dozen columns and rows of each
        unit = torch.zeros(n, dtype=WIDE)
        unit[j] = 1
        unit = unit.reshape(inputs[0].shape)
        column = by_differences(subject, state, inputs, lambda a: a.y, unit, training=training).flatten()
        row = answer(subject, state, inputs, training=training, dy=unit).dx.flatten()
        scale = max(1.0, float(forward.abs().max()))
        assert float((forward[:, j] - column).abs().max()) <= 1e-5 * scale
        # the mean of float64 values at 1e4 is known to 2e-12 of their spread
        assert float((forward[j] - row).abs().max()) <= 1e-9 * scale
        assert float((reverse[j] - row).abs().max()) <= 1e-9 * scale
    assert forward.abs().max() > 0


@facility("`torch.func.hessian`", SMALL)
@MODES
def test_the_hessian_agrees_with_the_definition(subject: Subject, training: bool) -> None:
    layer, inputs = subject.layer(dtype=WIDE, training=training), double(subject.inputs())
    state, n = State.of(layer), inputs[0].numel()
    v = cotangent(inputs[0], seed=5)

    def loss(x: Tensor) -> Tensor:
        return (v * pure(layer)(x, *inputs[1:]).square()).sum() / 2

    def gradient(a: Answer, at: Inputs) -> Tensor:
        return answer(subject, state, at, training=training, dy=v * a.y).dx

    found = hessian(loss)(inputs[0]).detach().reshape(n, n)
    assert found.abs().max() > 0
    direction = cotangent(inputs[0], seed=6)
    h, ends = 1e-4, []
    for step in (h, -h):
        moved = (inputs[0] + step * direction, *inputs[1:])
        ends.append(gradient(answer(subject, state, moved, training=training), moved))
    right = ((ends[0] - ends[1]) / (2 * h)).flatten()
    close(found @ direction.flatten(), right)
    assert torch.allclose(found, found.T, rtol=1e-6, atol=1e-8 * float(found.abs().max()))
