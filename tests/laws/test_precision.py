"""Against the float64 definition, on data far from zero, forward and backward, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.tables import BACKENDS, CENTRED, DTYPES, NORMS, Row, cotangent, recording
from laws.truth import truth

from normalcy import nn as ours
from normalcy import spec
from normalcy.testing import assert_close, check_shift_invariance, errors_in_ulps

# Half precision cannot hold data whose mean is 1e4 spreads away: 100 leaves eight steps within a spread.
OFFSETS = {
    torch.float64: (0.0, 1e2, 1e4),
    torch.float32: (0.0, 1e2, 1e4, -1e4),
    torch.bfloat16: (0.0, 10.0),
    torch.float16: (0.0, 100.0),
}
CASES = [(dtype, offset) for dtype in DTYPES for offset in OFFSETS[dtype]]


def errors(row: Row, dtype: torch.dtype, offset: float, backend: Any, *, training: bool) -> dict[str, Any]:
    """(result, exact, scale) of the output and each gradient."""
    layer, x = row.layer(dtype).train(training), row.input(dtype, offset=offset)
    dy = cotangent(x)
    stored = None
    if not training and getattr(layer, "running_mean", None) is not None:
        layer.running_mean += offset
        stored = (layer.running_mean.clone(), layer.running_var.clone())
    exact = truth(row.norm, x, dy, layer.weight, getattr(layer, "bias", None), eps=layer.eps, stored=stored)
    leaf = x.requires_grad_()
    with recording(backend) as calls:
        y = layer(leaf)
        found = torch.autograd.grad(y, [leaf, *layer.parameters()], dy)
    assert calls.keys() >= {"apply", "collect_grad", "apply_grad"}
    assert ("collect" in calls) == (stored is None)
    results = {"y": y, **dict(zip(("dx", "dweight", "dbias"), found, strict=False))}
    return {name: (got, getattr(exact, name), exact.scale[name]) for name, got in results.items()}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("dtype", "offset"), CASES, ids=str)
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_offset_data_keep_a_few_ulps_forward_and_backward(
    row: Row, dtype: torch.dtype, offset: float, training: bool, backend: Any
) -> None:
    for name, (got, exact, scale) in errors(row, dtype, offset, backend, training=training).items():
        assert_close(got, exact, scale=scale, what=name)


@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_a_mean_of_ten_thousand_spreads_costs_float32_next_to_nothing(row: Row) -> None:
    check_shift_invariance(row.layer(), row.input(offset=0), 1e4)


def test_pytorchs_layer_norm_fails_the_same_check() -> None:
    with pytest.raises(AssertionError, match=r"LayerNorm of x \+ 10000 at .* ulps from"):
        check_shift_invariance(torch.nn.LayerNorm(33), NORMS[7].input(offset=0), 1e4)


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**16 + 1])
def test_the_error_does_not_grow_with_the_number_of_values(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, size, generator=generator) + 1e4
    dy = torch.randn(2, size, generator=generator)
    leaf = x.clone().requires_grad_()
    y = ours.LayerNorm(size)(leaf)
    y.backward(dy)
    exact = truth(spec.layer(1), x, dy)
    assert_close(y, exact.y, scale=exact.scale["y"], what="y")
    assert_close(leaf.grad, exact.dx, scale=exact.scale["dx"], what="dx")


def test_one_far_value_among_many_costs_nothing() -> None:
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)) + 1e4
    x[0, 0] = 0.0
    exact = truth(spec.layer(1), x, x)
    y = ours.LayerNorm(4096)(x)
    assert_close(y, exact.y, scale=exact.scale["y"], what="y")


def test_the_gradient_of_a_bias_before_batch_norm_is_zero_to_the_rounding_of_what_cancelled() -> None:
    x = torch.randn(256, 5, generator=torch.Generator().manual_seed(0)) + 1e3
    bias = torch.zeros(5, requires_grad=True)
    dy = torch.randn(256, 5, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(ours.BatchNorm1d(5)(x + bias), bias, dy)
    # each of the 256 addends was rounded by two ulps at most, and their float32 sum adds a few more
    assert (gradient.abs() <= 4 * torch.finfo(torch.float32).eps * dy.abs().sum(0)).all()


if __name__ == "__main__":  # prints the table of the worst errors
    for dtype, offset in CASES:
        worst: dict[str, float] = {}
        for row in NORMS:
            for training in (True, False):
                for name, triple in errors(row, dtype, offset, BACKENDS[0], training=training).items():
                    worst[name] = max(worst.get(name, 0.0), errors_in_ulps(*triple).max().item())
        print(f"{dtype!s:16} {offset:8g}", {name: round(value, 2) for name, value in worst.items()})
