"""A constant feature has no spread: it becomes exactly the bias, whatever the constant."""

from __future__ import annotations

import pytest
import torch
from laws.tables import CENTRED, DTYPES, Row

from normalcy import nn as ours
from normalcy.testing import check_constant_gives_bias


@pytest.mark.parametrize("value", [0.1, 7.3, -1e4 / 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_constants_give_exactly_the_bias(row: Row, dtype: torch.dtype, value: float) -> None:
    check_constant_gives_bias(row.layer(dtype), row.shape, value, dtype=dtype)
    layer = row.layer(dtype)
    layout = row.norm.axes.resolve(row.shape)
    bias = layer.bias.detach().reshape(layout.parameter).expand(layout.shape).reshape(row.shape)
    assert torch.equal(layer(torch.full(row.shape, value, dtype=dtype)).detach(), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("build", [lambda: ours.LayerNorm(1000), lambda: ours.GroupNorm(1, 1000)])
def test_a_thousand_times_a_tenth_gives_exactly_the_bias(build: object, dtype: torch.dtype) -> None:
    layer = build().to(dtype)
    torch.nn.init.normal_(layer.bias)
    y = layer(torch.full((2, 1000), 0.1, dtype=dtype))
    assert torch.equal(y.detach(), layer.bias.detach().expand(2, 1000))


def test_an_offset_constant_beside_varying_channels_is_the_bias_too() -> None:
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    x[:, 1] = 7.3
    layer = ours.BatchNorm1d(3)
    torch.nn.init.normal_(layer.bias)
    y = layer(x).detach()
    assert (y[:, 1] == layer.bias[1]).all()
    assert y[:, 0].std() > 0.9
