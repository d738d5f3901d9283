"""Gradients of every order, of any part of the inputs, and what autograd keeps."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest
import torch
from laws.tables import BACKENDS, BATCH, CENTRED, NORMS, Row, cotangent, recording
from laws.truth import truth
from torch import Tensor

from normalcy.kernels import eager
from normalcy.kernels.contract import Given, Needs
from normalcy.passes import finish
from normalcy.testing import assert_close, check_gradient_sums_to_zero, check_gradients

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
SMALL = {
    "batch-1d": (4, 3),
    "batch-1d-length": (2, 3, 2),
    "batch-2d": (2, 3, 2, 1),
    "batch-3d": (2, 3, 1, 2, 1),
    "instance-1d": (2, 4, 3),
    "instance-2d": (1, 4, 2, 2),
    "group": (2, 6, 2, 1),
    "layer": (1, 33),
    "layer-two-axes": (1, 5, 7),
    "layer-channels": (1, 6, 2, 1),
    "rms": (1, 33),
}


def small(row: Row, offset: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SMALL[row.name], generator=generator, dtype=torch.float64) + offset


@backends
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_dx_sums_to_zero_where_the_mean_came_from_the_data(row: Row, offset: float, backend: Any) -> None:
    with recording(backend) as calls:
        check_gradient_sums_to_zero(row.layer(), row.input(offset=offset))
    assert calls["apply_grad"] == 1


def test_dx_does_not_sum_to_zero_where_statistics_are_constants() -> None:
    with pytest.raises(AssertionError, match="dx sums to"):
        check_gradient_sums_to_zero(BATCH[0].layer().eval(), BATCH[0].input())


@backends
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_dx_has_no_part_along_xhat_as_eps_goes_to_zero(row: Row, backend: Any) -> None:
    layer, x = row.layer(torch.float64), row.input(torch.float64)
    layer.eps = 1e-12
    exact = truth(row.norm, x, cotangent(x), layer.weight, getattr(layer, "bias", None), eps=1e-12)
    leaf = x.requires_grad_()
    with recording(backend) as calls:
        layer(leaf).backward(cotangent(x))
    assert calls["apply_grad"] == 1
    layout = row.norm.axes.resolve(row.shape)
    product = (leaf.grad * exact.xhat).reshape(layout.shape)
    # exactly eps/(var + eps) of what cancels, which is 1e-12 here, and float64 rounding
    assert (product.sum(layout.reduce).abs() <= 1e-10 * product.abs().sum(layout.reduce)).all()


@backends
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_first_and_second_derivatives_agree_with_finite_differences(
    row: Row, training: bool, backend: Any
) -> None:
    with recording(backend) as calls:
        check_gradients(row.layer(torch.float64).train(training), small(row))
    assert calls["apply_grad"] > 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_the_third_derivative_agrees_with_differences_of_the_second(row: Row, training: bool) -> None:
    layer, x = row.layer(torch.float64).train(training), small(row)
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]
    generator = torch.Generator().manual_seed(6)
    along = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (x, *parameters)]
    dy = cotangent(x)

    def second(t: float, *, more: bool = False) -> Tensor:
        """Of Σ dy·sin(y), twice along a fixed direction in x and the parameters, at t further along it."""
        at = [(p + t * a).detach().requires_grad_() for p, a in zip((x, *parameters), along, strict=True)]
        y = torch.func.functional_call(layer, dict(zip(names, at[1:], strict=True)), (at[0],))
        value = (dy * y.sin()).sum()
        for _ in range(3 if more else 2):
            found = torch.autograd.grad(value, at, create_graph=True, materialize_grads=True)
            value = sum((g * a).sum() for g, a in zip(found, along, strict=True))
        return value.detach()

    h = 1e-4
    quotient = (8 * (second(h) - second(-h)) - (second(2 * h) - second(-2 * h))) / (12 * h)
    # the quotient misses by O(h⁴) and by rounding of 1e-16/h
    torch.testing.assert_close(second(0.0, more=True), quotient, rtol=1e-6, atol=1e-6)


@backends
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_gradients_of_any_part_of_the_inputs_are_those_of_all(row: Row, backend: Any) -> None:
    layer, x = row.layer(), row.input(offset=100)
    dy = cotangent(x)
    tensors = {"x": x, **dict(layer.named_parameters())}
    for tensor in tensors.values():
        tensor.requires_grad_()
    whole = dict(zip(tensors, torch.autograd.grad(layer(x), list(tensors.values()), dy), strict=True))
    subsets = chain.from_iterable(combinations(tensors, k) for k in range(1, len(tensors) + 1))
    for wanted in subsets:
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in wanted)
        with recording(backend) as calls:
            found = torch.autograd.grad(layer(x), [tensors[name] for name in wanted], dy)
        assert calls["apply_grad"] == ("x" in wanted)
        for name, gradient in zip(wanted, found, strict=True):
            assert torch.equal(gradient, whole[name]), (wanted, name)


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_a_layer_used_twice_gets_the_sum_of_both_gradients(row: Row) -> None:
    layer, x, other = row.layer(torch.float64), row.input(torch.float64), row.input(torch.float64, seed=9)
    dy = cotangent(x)
    parts = [torch.autograd.grad(layer(use), list(layer.parameters()), dy) for use in (x, other)]
    both = torch.autograd.grad(layer(x) + layer(other), list(layer.parameters()), dy)
    for sum_of_both, one, two in zip(both, *parts, strict=True):
        torch.testing.assert_close(sum_of_both, one + two, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_an_output_used_twice_gets_the_sum_of_both_gradients(row: Row) -> None:
    layer, x = row.layer(torch.float64), row.input(torch.float64).requires_grad_()
    dy = cotangent(x)
    y = layer(x)
    (twice,) = torch.autograd.grad((y * dy + 2 * y * dy).sum(), x)
    (once,) = torch.autograd.grad(layer(x), x, 3 * dy)
    torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_no_graph_is_kept_where_nothing_needs_a_gradient(row: Row) -> None:
    layer, x = row.layer(), row.input()
    with torch.no_grad():
        assert layer(x.clone().requires_grad_()).grad_fn is None
    assert layer(x).grad_fn is not None
    layer.requires_grad_(False)
    assert layer(x).grad_fn is None
    assert not layer(x).requires_grad
    with torch.inference_mode():
        assert layer(x).is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("row", BATCH, ids=str)
def test_a_training_step_between_forward_and_backward_does_not_change_the_gradient(
    row: Row, dtype: torch.dtype
) -> None:
    layer, x = row.layer(dtype).eval(), row.input(dtype).requires_grad_()
    dy = cotangent(x)
    exact = truth(
        row.norm,
        x,
        dy,
        layer.weight,
        layer.bias,
        eps=layer.eps,
        stored=(layer.running_mean.clone(), layer.running_var.clone()),
    )
    y = layer(x)
    layer.train()(x.detach() * 100 + 5)
    assert layer.num_batches_tracked == 1
    dx, dweight, _ = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    assert_close(dx, exact.dx, scale=exact.scale["dx"], what="dx")
    assert_close(dweight, exact.dweight, scale=exact.scale["dweight"], what="dweight")


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_changing_what_was_saved_for_the_backward_pass_is_an_error_and_never_a_wrong_gradient(
    changed: str,
) -> None:
    layer, leaf = BATCH[0].layer(), BATCH[0].input().requires_grad_()
    x = leaf * 1
    y = layer(x).sum()
    with torch.no_grad():
        (x if changed == "x" else layer.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_a_gradient_through_a_gradient_penalty_reaches_every_parameter(row: Row) -> None:
    layer, x = row.layer(torch.float64), row.input(torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad((layer(x) * cotangent(x)).sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("row", BATCH, ids=str)
def test_the_sums_of_batch_norms_backward_are_weight_times_the_parameters_gradients(row: Row) -> None:
    """S₁ = Σg = weight·dbias and S₂ = Σg·x̂ = weight·dweight, also where a weight is 0."""
    layer, x = row.layer(torch.float64), row.input(torch.float64, offset=50)
    weight = layer.weight.detach().clone()
    weight[1] = 0
    layout = row.norm.axes.resolve(row.shape)
    stats = finish(eager.collect(x, layout, None), layout.values, 1e-5, center=True)
    needs = Needs(x=True, weight=True, bias=True)
    sums = eager.collect_grad(cotangent(x), Given(x, weight), layout, stats, needs)
    torch.testing.assert_close(sums.s1.flatten(), weight * sums.dbias.flatten(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.s2.flatten(), weight * sums.dweight.flatten(), rtol=1e-12, atol=1e-12)
    assert sums.s2.flatten()[1] == 0
    assert sums.dweight.flatten()[1] != 0
