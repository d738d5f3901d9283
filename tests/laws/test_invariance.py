"""What must not change the answer: the order of the batch, the place in memory, a shift, a positive scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.tables import BACKENDS, CENTRED, DTYPES, NORMS, Row, cotangent, recording
from laws.truth import truth

from normalcy.testing import (
    assert_close,
    check_batch_order,
    check_layouts,
    check_scale_invariance,
    check_shift_invariance,
    layouts,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_every_layout_gives_the_same_answer_and_gradients(row: Row, dtype: torch.dtype, backend: Any) -> None:
    layer, x = row.layer(dtype), row.input(dtype)
    dy = cotangent(x)
    bias = getattr(layer, "bias", None)
    exact = truth(row.norm, x, dy, layer.weight, bias, eps=layer.eps)
    seen = {}
    for name, laid in layouts(x):
        leaf = laid.detach().requires_grad_()
        with recording(backend) as calls:
            y = layer(leaf)
            wanted = [leaf, *layer.parameters()]
            found = torch.autograd.grad(y, wanted, dy)
        assert calls.keys() >= {"collect", "apply", "collect_grad", "apply_grad"}
        seen[name] = laid.stride()
        assert_close(y, exact.y, scale=exact.scale["y"], what=f"y of {name}")
        for what, gradient in zip(("dx", "dweight", "dbias"), found, strict=False):
            assert_close(gradient, getattr(exact, what), scale=exact.scale[what], what=f"{what} of {name}")
        assert [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1] == [
            s for s, n in zip(torch.empty_like(laid).stride(), y.shape, strict=True) if n > 1
        ]
    assert len(set(seen.values())) >= 3


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_an_expanded_input_is_normalized_as_its_copy(row: Row, backend: Any) -> None:
    x = row.input()[:1].expand(row.shape)
    layer = row.layer()
    assert 0 in x.stride()
    with recording(backend) as calls:
        assert torch.equal(layer(x), row.layer()(x.contiguous()))
    assert calls["apply"] == 2


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_the_order_of_the_batch_does_not_matter(row: Row, offset: float, backend: Any) -> None:
    with recording(backend) as calls:
        check_batch_order(row.layer(), row.input(offset=offset))
        check_layouts(row.layer(), row.input(offset=offset))
    assert calls["apply"] > 2


@pytest.mark.parametrize("shift", [-7.0, 1e2, 1e4])
@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_shifting_the_input_changes_nothing(row: Row, shift: float, backend: Any) -> None:
    with recording(backend) as calls:
        check_shift_invariance(row.layer(), row.input(), shift)
    assert calls["apply"] == 2


@pytest.mark.parametrize("scale", [2.0**-10, 3.0, 1e4])
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_a_positive_scale_changes_nothing_as_eps_scales_along(row: Row, scale: float, backend: Any) -> None:
    with recording(backend) as calls:
        check_scale_invariance(row.layer(), row.input(offset=50), scale)
    assert calls["apply"] == 2


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_as_eps_goes_to_zero_a_positive_scale_changes_nothing(row: Row, backend: Any) -> None:
    layer = row.layer(torch.float64)
    x = row.input(torch.float64)
    gaps = []
    with recording(backend) as calls:
        for eps in (1e-2, 1e-5, 1e-8):
            layer.eps = eps
            gaps.append((layer(x) - layer(4 * x)).abs().max().item())
    assert calls["apply"] == 6
    assert gaps[0] > 100 * gaps[1] > 1e4 * gaps[2]
    assert gaps[2] < 1e-6
