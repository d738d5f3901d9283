"""The autograd boundary where a composition of PyTorch's own operations is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normalcy
from normalcy.errors import NormalcyError, TypeMismatchError

X = torch.tensor(
    [[[3.0, -1.0, 7.5], [0.5, 2.0, 4.0]], [[1.0, 7.0, 2.5], [-2.0, 0.25, 9.0]]], dtype=torch.float64
)
X = X + 1e3


def plain(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last axis as PyTorch's differentiable operations."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normalcy.layer_norm(x, 3, weight, bias)


def hangs_on_x(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0, 0] / 1e3, x[1, 1].sin()


def one_tensor_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    both = x[0, 1] * 2 - 1e3
    return both, both


def x_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0, 0], x[0, 0]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("made", [hangs_on_x, one_tensor_twice, x_itself])
def test_gradients_are_right_where_parameters_hang_on_the_input(made: Any, create_graph: bool) -> None:
    found = []
    for norm in (ours, plain):
        x = X.clone().requires_grad_()
        y = norm(x, *made(x))
        found.append(torch.autograd.grad((y * X.cos()).sum(), x, create_graph=create_graph)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_a_graph_of_the_backward_pass_calls_a_tensors_hook_once() -> None:
    calls = []
    x = X.clone().requires_grad_()
    weight = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight.register_hook(calls.append)
    y = normalcy.layer_norm(x, 3, weight * 1.0)
    torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    assert len(calls) == 1


def test_derivatives_reach_stored_statistics() -> None:
    x = X.clone()
    mean = torch.tensor([1001.0, 1002.0], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([4.0, 9.0], dtype=torch.float64, requires_grad=True)
    y = normalcy.batch_norm(x, mean, var)
    right = (x - mean.reshape(1, 2, 1)) * (var.reshape(1, 2, 1) + 1e-5).rsqrt()
    got = torch.autograd.grad((y * X.cos()).sum(), (mean, var))
    wanted = torch.autograd.grad((right * X.cos()).sum(), (mean, var))
    torch.testing.assert_close(got, wanted)
    transformed = torch.func.grad(lambda m: (normalcy.batch_norm(x, m, var.detach()) * X.cos()).sum())(
        mean.detach()
    )
    torch.testing.assert_close(transformed, wanted[0])


@pytest.mark.parametrize("mask", [None, X.median() < X])
def test_a_batch_of_gradients_goes_back_at_once(mask: Tensor | None) -> None:
    x = X.clone().requires_grad_()
    weight = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = normalcy.layer_norm(x, 3, weight, mask=mask, activation="silu", residual=X.sin())
    many = torch.stack([X.cos(), X.sin(), X.cos() * 2])
    at_once = torch.autograd.grad(y, (x, weight), many, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, (x, weight), one, retain_graph=True) for one in many]
    for k in range(2):
        torch.testing.assert_close(at_once[k], torch.stack([one[k] for one in apart]))


def test_a_batch_of_gradients_goes_back_through_groups() -> None:
    x = torch.cat([X, X.cos() * 3], 1).requires_grad_()
    y = normalcy.group_norm(x, 2)
    many = torch.stack([x.detach().cos(), x.detach().sin()])
    (at_once,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(at_once, torch.stack(apart))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 2, 0)])
def test_an_empty_input_has_derivatives_of_any_order(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    y = normalcy.batch_norm(x, weight=weight, training=True)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    assert dx.shape == shape
    assert dweight.tolist() == [0.0, 0.0]
    through = torch.func.grad(lambda w: normalcy.batch_norm(x.detach(), weight=w, training=True).sum())
    assert through(weight.detach()).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("eps", [1e-80, 1e-300, 5e-324])
def test_a_tiny_eps_still_gives_beta_for_a_constant_and_the_definition_elsewhere(eps: float) -> None:
    x = torch.stack([X.float()[0, 0], torch.full((3,), 0.1)])
    bias = torch.tensor([0.25, -1.0, 2.0])
    y = normalcy.layer_norm(x, 3, None, bias, eps)
    assert y[1].tolist() == bias.tolist()
    torch.testing.assert_close(
        y[0].double(), plain(x[0].double(), 1.0, bias.double(), eps), rtol=1e-6, atol=1e-6
    )


def test_small_values_with_a_tiny_eps_are_normalized_in_float32() -> None:
    x = torch.tensor([[1e-40, 3e-40, -2e-40, 7e-40]])
    y = normalcy.layer_norm(x, 4, eps=1e-100)
    wide = x.double()
    right = (wide - wide.mean()) / wide.var(correction=0).sqrt()
    torch.testing.assert_close(y.double(), right, rtol=1e-6, atol=1e-6)


def test_a_variance_beyond_float64_is_not_silently_zero() -> None:
    x = torch.tensor([[1e200, -1e200, 3e200]], dtype=torch.float64)
    assert normalcy.layer_norm(x, 3).isnan().all()
    assert normalcy.rms_norm(x, 3).isnan().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda x, meta: normalcy.layer_norm(x, 3, meta(3)),
        lambda x, meta: normalcy.layer_norm(x, 3, None, meta(3)),
        lambda x, meta: normalcy.batch_norm(x, meta(2), meta(2)),
        lambda x, meta: normalcy.batch_norm(x, meta(2), meta(2), training=True),
        lambda x, meta: normalcy.batch_norm(x, training=True, mask=meta(3).bool()),
        lambda x, meta: normalcy.batch_norm(x, training=True, residual=meta(*x.shape)),
    ],
)
def test_tensors_of_two_devices_are_refused(make: Any) -> None:
    with pytest.raises(TypeMismatchError, match=r"device|meta"):
        make(X.float(), lambda *shape: torch.ones(*shape, device="meta"))


def test_statistics_that_cannot_be_written_are_refused_before_either_changes() -> None:
    mean, var = torch.zeros(2), torch.ones(1).expand(2)
    with pytest.raises(NormalcyError, match="expanded running_var"):
        normalcy.batch_norm(X.float(), mean, var, training=True)
    assert mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "silu"])
def test_other_devices_get_pytorchs_operators_and_our_higher_derivatives(name: str) -> None:
    """The way that other devices take, walked on the CPU: its first and second derivatives."""
    from normalcy import autograd, spec
    from normalcy.autograd import Form
    from normalcy.kernels import standard
    from normalcy.kernels.contract import Given

    x = (X - 1e3).requires_grad_()
    weight = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    residual = X.sin().requires_grad_()
    norm = spec.layer(1)
    form = Form(norm.axes.resolve(tuple(x.shape)), 1e-5, True, name)

    def elsewhere(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        def run(given: Given) -> Tensor:
            return standard.call(given, norm, eps=1e-5, activation=name)

        return autograd.through(run, Given(x, weight, None, residual), None, form)

    def here(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return normalcy.layer_norm(x, 3, weight, residual=residual, activation=name)

    torch.testing.assert_close(elsewhere(x, weight, residual), here(x, weight, residual))
    assert torch.autograd.gradcheck(elsewhere, (x, weight, residual))
    assert torch.autograd.gradgradcheck(elsewhere, (x, weight, residual))
    y = elsewhere(x, weight, residual)
    twice = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)


def test_a_meta_input_is_given_to_pytorchs_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layers: list[tuple[nn.Module, tuple[int, ...], str]] = [
        (normalcy.nn.BatchNorm2d(3), (4, 3, 5, 5), "native_batch_norm"),
        (normalcy.nn.LayerNorm(5), (4, 5), "native_layer_norm"),
        (normalcy.nn.GroupNorm(3, 6), (4, 6, 5), "native_group_norm"),
    ]
    for layer, shape, operator in layers:
        layer.to("meta")
        with Listen():
            y = layer(torch.empty(shape, device="meta", requires_grad=True))
            y.sum().backward()
        assert any(operator in name for name in seen), seen
        assert any(f"{operator}_backward" in name for name in seen), seen
        assert not any("var" in name.split(".")[1] for name in seen), seen
        seen.clear()


@pytest.mark.parametrize(
    "extra", [{}, {"lengths": torch.tensor([3, 1])}, {"mask": torch.ones(1, 1, 3).bool()}]
)
def test_what_has_no_values_is_normalized_without_reading_any(extra: dict[str, Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = normalcy.nn.BatchNorm1d(2)
    meta = {name: value.to("meta") for name, value in extra.items()}
    assert layer.to("meta")(torch.empty(2, 2, 3, device="meta"), **meta).shape == (2, 2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) for name, value in extra.items()}
        assert normalcy.nn.BatchNorm1d(2)(torch.empty(2, 2, 3), **fake).shape == (2, 2, 3)


def test_vmap_over_batches_of_one_layers_statistics_is_refused_in_a_sentence() -> None:
    layer = normalcy.nn.BatchNorm1d(2)
    batches = torch.stack([X.float(), X.float() * 2])
    with pytest.raises(NormalcyError, match=r"functional_call"):
        torch.vmap(layer)(batches)
    assert layer.running_mean.tolist() == [0.0, 0.0]
    names = {name: torch.stack([value, value]) for name, value in layer.named_buffers()}
    torch.vmap(lambda b, x: torch.func.functional_call(layer, b, (x,)))(names, batches)
    torch.testing.assert_close(names["running_mean"][1], 2 * names["running_mean"][0])
    assert names["num_batches_tracked"].tolist() == [1, 1]


def test_a_masked_nan_in_the_residual_reaches_no_derivative_of_any_order() -> None:
    mask = torch.tensor([True, True, False])
    x, weight = X.clone().requires_grad_(), torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True)
    residual = X.sin().masked_fill(~mask, torch.nan).requires_grad_()
    y = normalcy.batch_norm(x, weight=weight, training=True, mask=mask, residual=residual, activation="gelu")
    first = torch.autograd.grad(y.square().sum(), (x, weight, residual), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight, residual))
    assert all(g.isfinite().all() for g in (*first, *second))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.compile(f, backend="aot_eager")])
def test_a_variance_beyond_float64_is_nan_in_the_composition_too(transform: Any) -> None:
    x = torch.tensor([[1.0, -1.0, 3.0]], dtype=torch.float64) * 1e200
    norm = transform(lambda t: normalcy.layer_norm(t, 3))
    assert norm(x.requires_grad_()).isnan().all()


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (normalcy.nn.BatchNorm1d(2), {"mask": torch.tensor([[True], [False]])}),
        (normalcy.nn.GroupNorm(1, 2), {"lengths": torch.tensor([9, -3])}),
    ],
)
def test_what_eager_refuses_a_compiled_layer_refuses_when_it_runs(
    layer: nn.Module, given: dict[str, Tensor]
) -> None:
    x = torch.randn(2, 2) if "mask" in given else torch.randn(2, 2, 4)
    compiled = torch.compile(layer, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"one valid value|lengths outside"):
        compiled(x, **given)
    assert int(getattr(layer, "num_batches_tracked", 0)) == 0
