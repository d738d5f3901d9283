"""A fused norm is activation(norm(x) + residual): in value, in gradients of any order, in what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from laws.masked import ACTIVATIONS, a_mask, right, spoiled
from laws.tables import BACKENDS, BATCH, NORMS, Row, cotangent, recording
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import normalcy
from normalcy import nn as ours
from normalcy import spec
from normalcy.kernels.activation import ACTIVATIONS as NAMES
from normalcy.nn import Fused

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OFFSETS = {torch.float64: 1e4, torch.float32: 1e4, torch.bfloat16: 10.0}
SMALL = {
    "batch-1d": (4, 3),
    "batch-1d-length": (2, 3, 3),
    "batch-2d": (2, 3, 2, 2),
    "batch-3d": (2, 3, 1, 2, 2),
    "instance-1d": (2, 4, 3),
    "instance-2d": (1, 4, 2, 2),
    "group": (2, 6, 2, 1),
    "layer": (1, 33),
    "layer-two-axes": (1, 5, 7),
    "layer-channels": (1, 6, 2, 1),
    "rms": (1, 33),
}

rows = pytest.mark.parametrize("row", NORMS, ids=str)
in_modes = pytest.mark.parametrize(
    ("row", "training"), [*((row, True) for row in NORMS), *((row, False) for row in BATCH)], ids=str
)
activations = pytest.mark.parametrize("activation", [None, *NAMES], ids=str)
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def a_residual(x: Tensor, seed: int = 4) -> Tensor:
    """Of the spread of what it is added to, and not centred."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(x.shape, generator=generator, dtype=torch.float64) + 0.3).to(x.dtype)


def results(
    fused: nn.Module, x: Tensor, dy: Tensor, residual: Tensor | None, mask: Tensor | None
) -> dict[str, Tensor]:
    """The output and every gradient that there is."""
    x = x.detach().requires_grad_()
    leaves = {"dx": x, **{f"d{name.removeprefix('norm.')}": p for name, p in fused.named_parameters()}}
    if residual is not None:
        residual = leaves["dresidual"] = residual.detach().requires_grad_()
    y = fused(x, residual, mask)
    return {
        "y": y.detach(),
        **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True)),
    }


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@activations
@rows
def test_a_fused_norm_is_the_definition_forward_and_backward(
    row: Row, activation: str | None, dtype: torch.dtype, backend: Any
) -> None:
    x = row.input(dtype, offset=OFFSETS[dtype])
    dy = cotangent(x)
    ran = 0
    with recording(backend) as calls:
        for training, with_residual, with_mask in product((True, False), repeat=3):
            layer = row.layer(dtype).train(training)
            residual = a_residual(x) if with_residual else None
            mask = a_mask(row.shape, row.norm) if with_mask else None
            stored = None
            if not training and row.norm.infer is spec.Origin.STORED:
                layer.running_mean += OFFSETS[dtype]
                stored = (layer.running_mean.clone(), layer.running_var.clone())
            extras: dict[str, Any] = {"mask": mask, "residual": residual, "activation": activation}
            parameters = (layer.weight, getattr(layer, "bias", None))
            exact = right(row.norm, x, dy, *parameters, eps=layer.eps, stored=stored, **extras)
            given = x
            if mask is not None:
                given = spoiled(x, mask, torch.nan)
                residual = None if residual is None else spoiled(residual, mask, torch.inf)
            exact.judge(results(Fused(layer, activation), given, dy, residual, mask))
            ran += 1
    assert calls["apply"] >= calls["apply_grad"] == ran == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@activations
@rows
def test_parameters_in_float32_get_gradients_of_float32_from_half_precision(
    row: Row, activation: str | None, with_residual: bool, dtype: torch.dtype
) -> None:
    """What goes into the activation is computed in float32 and not rounded on its way to them."""
    layer, x = row.layer(torch.float32), row.input(dtype, offset=10)
    dy, residual = cotangent(x), a_residual(x) if with_residual else None
    exact = right(
        *(row.norm, x, dy, layer.weight, getattr(layer, "bias", None)),
        eps=layer.eps,
        residual=residual,
        activation=activation,
    )
    found = results(Fused(layer, activation), x, dy, residual, None)
    assert found["dweight"].dtype == torch.float32
    exact.judge(found)


@activations
@rows
def test_functions_give_the_bits_of_the_fused_layer(row: Row, activation: str | None) -> None:
    layer, x, mask = row.layer(), row.input(offset=100), a_mask(row.shape, row.norm)
    weight, bias, residual = layer.weight, getattr(layer, "bias", None), a_residual(x)
    extras: dict[str, Any] = {"mask": mask, "residual": residual, "activation": activation}
    call: Callable[[], Tensor] = {
        "batch": lambda: normalcy.batch_norm(x, weight=weight, bias=bias, training=True, **extras),
        "instance": lambda: normalcy.instance_norm(x, weight=weight, bias=bias, **extras),
        "group": lambda: normalcy.group_norm(x, 2, weight, bias, **extras),
        "layer": lambda: normalcy.layer_norm(x, weight.shape, weight, bias, **extras),
        "rms": lambda: normalcy.rms_norm(x, weight.shape, weight, 1e-5, **extras),
    }[row.norm.name]
    by_rule = normalcy.normalize(x, row.norm, weight, bias, **extras)
    assert torch.equal(by_rule, Fused(layer, activation)(x, residual, mask))
    if row.norm is not spec.channels:
        assert torch.equal(by_rule, call())


@pytest.mark.parametrize(
    "needed", [("x",), ("residual",), ("weight",), ("x", "residual"), ("residual", "bias")], ids=str
)
@pytest.mark.parametrize("activation", [None, "relu", "silu"], ids=str)
def test_gradients_of_any_part_of_the_inputs_are_those_of_all(
    activation: str | None, needed: tuple[str, ...]
) -> None:
    row = NORMS[2]
    fused, x = Fused(row.layer(), activation), row.input(offset=100)
    tensors = {"x": x, "residual": a_residual(x), "weight": fused.norm.weight, "bias": fused.norm.bias}
    dy = cotangent(x)
    for tensor in tensors.values():
        tensor.requires_grad_()
    y = fused(x, tensors["residual"])
    whole = dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), dy), strict=True))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in needed)
    y = fused(x, tensors["residual"])
    for name, found in zip(needed, torch.autograd.grad(y, [tensors[n] for n in needed], dy), strict=True):
        assert torch.equal(found, whole[name]), name


@activations
def test_an_input_that_is_its_own_residual_gets_both_gradients(activation: str | None) -> None:
    row = NORMS[2]
    fused, x = Fused(row.layer(torch.float64), activation), row.input(torch.float64)
    dy, leaf = cotangent(x), x.clone().requires_grad_()
    (both,) = torch.autograd.grad(fused(leaf, leaf), leaf, dy)
    apart = results(fused, x, dy, x, None)
    torch.testing.assert_close(both, apart["dx"] + apart["dresidual"], rtol=1e-12, atol=1e-12)
    (again,) = torch.autograd.grad(fused(leaf, leaf), leaf, dy, create_graph=True)
    torch.testing.assert_close(again, both, rtol=1e-10, atol=1e-12)


# --- any order ----------------------------------------------------------------------------------------------


def point(row: Row) -> tuple[Tensor, Tensor, Tensor | None]:
    shape = SMALL[row.name]
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(shape, generator=generator, dtype=torch.float64) + 1 for _ in range(2))
    return x + 1, residual, a_mask(shape, row.norm)


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@activations
@in_modes
def test_first_and_second_derivatives_agree_with_finite_differences(
    row: Row, activation: str | None, training: bool, with_residual: bool
) -> None:
    fused = Fused(row.layer(torch.float64).train(training), activation)
    x, residual, mask = point(row)
    names = [name for name, _ in fused.named_parameters()]

    def function(x: Tensor, residual: Tensor | None, *parameters: Tensor) -> Any:
        return torch.func.functional_call(
            fused, dict(zip(names, parameters, strict=True)), (x, residual, mask)
        )

    third = residual.requires_grad_() if with_residual else None
    inputs = (x.requires_grad_(), third, *(p.detach().requires_grad_() for p in fused.parameters()))
    # along random directions where there are many values, and for the second derivative
    assert torch.autograd.gradcheck(function, inputs, fast_mode=x.numel() > 30)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@activations
@in_modes
def test_derivatives_up_to_the_third_are_those_of_the_composition(
    row: Row, activation: str | None, with_residual: bool, training: bool
) -> None:
    layer = row.layer(torch.float64).train(training)
    fused = Fused(layer, activation)
    function = NAMES[activation].function if activation else lambda z: z
    x, residual, mask = point(row)
    inputs = [x.requires_grad_(), *layer.parameters()] + (
        [residual.requires_grad_()] if with_residual else []
    )
    along = [cotangent(t, seed) for seed, t in enumerate(inputs, 20)]

    def composed() -> Tensor:
        z = layer(x, mask) + residual if with_residual else layer(x, mask)
        return torch.where(mask, function(z), 0.0)

    found = []
    for compute in (lambda: fused(x, residual if with_residual else None, mask), composed):
        value, values = (compute().sin() * cotangent(x)).sum(), []
        for _ in range(3):
            gradients = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
            value = sum((g * a).sum() for g, a in zip(gradients, along, strict=True))
            values.append((value.detach(), *[g.detach() for g in gradients]))
        found.append(values)
    for order, (mine, theirs) in enumerate(zip(*found, strict=True), start=1):
        for one, two in zip(mine, theirs, strict=True):
            # sums of a few dozen terms, each a product of up to four factors of a few units
            torch.testing.assert_close(
                one, two, rtol=1e-9, atol=1e-9, msg=lambda m, o=order: f"order {o}: {m}"
            )


@activations
@pytest.mark.parametrize("row", [NORMS[0], NORMS[6], NORMS[7], NORMS[10]], ids=str)
def test_transforms_see_one_function(row: Row, activation: str | None) -> None:
    fused = Fused(row.layer(torch.float64).eval(), activation)
    x, residual, mask = point(row)
    dy = cotangent(x)

    def loss(x: Tensor, residual: Tensor, mask: Tensor) -> Tensor:
        return (fused(x, residual, mask) * dy).sum()

    leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
    right_one = torch.autograd.grad(loss(leaf, other, mask), (leaf, other))
    found = torch.func.grad(loss, argnums=(0, 1))(x, residual, mask)
    many = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(
        torch.stack([x, 2 * x]), torch.stack([residual, residual]), torch.stack([mask, ~mask])
    )
    for one, two, three in zip(right_one, found, many, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(one, three[0], rtol=1e-11, atol=1e-11)


# --- what is kept -------------------------------------------------------------------------------------------


def kept(compute: Callable[[], Tensor]) -> dict[int, Tensor]:
    """The tensors that a forward pass saves, each once."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compute()
    node = y.grad_fn
    hidden = [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, Tensor)]
    assert not hidden, "a tensor hangs on the node, out of sight of autograd"
    compute.y = y  # type: ignore[attr-defined] - alive as long as what is counted
    return saved


def bytes_of(saved: dict[int, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in saved.values())


@pytest.mark.parametrize("with_mask", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@activations
@rows
def test_what_is_saved_is_what_the_norm_saves_and_a_bit_for_each_element_at_most(
    row: Row, activation: str | None, dtype: torch.dtype, with_mask: bool
) -> None:
    layer, x = row.layer(dtype), row.input(dtype).requires_grad_()
    mask = a_mask(row.shape, row.norm) if with_mask else None
    residual = a_residual(x).requires_grad_()
    alone = kept(lambda: layer(x, mask))
    without = kept(lambda: Fused(layer, activation)(x, None, mask))
    with_one = kept(lambda: Fused(layer, activation)(x, residual, mask))
    assert bytes_of(without) == bytes_of(alone)
    more = bytes_of(with_one) - bytes_of(alone)
    if activation in ("relu", "leaky_relu"):
        assert more == -(-x.numel() // 8)
    elif activation is None:
        assert more == 0
    else:  # the residual is the caller's: nothing new lives on
        added = set(with_one) - set(alone)
        assert residual.untyped_storage().data_ptr() in added
        assert more == residual.numel() * residual.element_size()
    statistics = [
        t
        for t in alone.values()
        if t.dtype == torch.float64 and t.dim() == len(row.shape) + (row.norm.axes.groups is not None)
    ]
    assert statistics, "mean and rstd should be among what is saved, in float64"
    named = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters(), *([mask] if with_mask else []))}
    extra = [t for key, t in alone.items() if key not in named]
    assert all(t.numel() <= x.numel() // row.norm.axes.resolve(row.shape).values for t in extra)


def test_the_composition_saves_more() -> None:
    row = NORMS[2]
    layer, x = row.layer(), row.input().requires_grad_()
    residual = a_residual(x).requires_grad_()
    composed = kept(lambda: torch.relu(layer(x) + residual))
    fused = kept(lambda: Fused(layer, "relu")(x, residual))
    assert bytes_of(composed) - bytes_of(fused) == x.numel() * 4 - -(-x.numel() // 8)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_changing_a_residual_that_was_saved_is_an_error_and_never_a_wrong_gradient(activation: str) -> None:
    row = NORMS[2]
    x = row.input().requires_grad_()
    residual = a_residual(x)
    y = Fused(row.layer(), activation)(x, residual).sum()
    residual.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu"], ids=str)
def test_a_residual_that_was_not_saved_may_be_changed(activation: str | None) -> None:
    row = NORMS[2]
    x = row.input()
    residual, dy = a_residual(x), cotangent(x)
    expected = results(Fused(row.layer(), activation), x, dy, residual, None)
    leaf, changed = x.clone().requires_grad_(), residual.clone()
    y = Fused(row.layer(), activation)(leaf, changed)
    changed.zero_()
    y.backward(dy)
    assert torch.equal(leaf.grad, expected["dx"])


@pytest.mark.parametrize("activation", NAMES)
def test_a_value_that_is_not_a_number_stays_seen(activation: str) -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)) + 2
    residual = a_residual(x)
    residual[1, 2, 3] = torch.nan
    found = results(Fused(ours.BatchNorm1d(3), activation), x, cotangent(x), residual, None)
    assert found["y"].isnan().sum() == 1
    assert found["y"][1, 2, 3].isnan()


@pytest.mark.parametrize("activation", NAMES)
def test_activations_are_pytorchs_and_their_formulas(activation: str) -> None:
    z = torch.linspace(-9, 9, 1001, dtype=torch.float64).requires_grad_()
    y = NAMES[activation].function(z)
    (dz,) = torch.autograd.grad(y.sum(), z)
    ours_too = ACTIVATIONS[activation]
    torch.testing.assert_close(y, ours_too.function(z), rtol=1e-13, atol=1e-15)
    away = z.detach().abs() > 1e-9
    torch.testing.assert_close(dz[away], ours_too.derivative(z.detach())[away], rtol=1e-13, atol=1e-15)
