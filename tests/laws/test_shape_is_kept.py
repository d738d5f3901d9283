"""Normalizing changes location and scale and nothing else: it makes nothing Gaussian."""

from __future__ import annotations

import pytest
import torch
from laws.tables import CENTRED, NORMS, Row
from torch import Tensor, nn

import normalcy
from normalcy import nn as ours


def moments(x: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance, skewness and kurtosis of the values that share a statistic, by float64 sums."""
    layout = row.norm.axes.resolve(tuple(x.shape))
    x = x.double().reshape(layout.shape)
    mean = x.mean(layout.reduce, keepdim=True)
    var = (x - mean).square().mean(layout.reduce, keepdim=True)
    z = (x - mean) / var.sqrt()
    return mean, var, z.pow(3).mean(layout.reduce), z.pow(4).mean(layout.reduce)


def plain(row: Row, x: Tensor, eps: float) -> Tensor:
    """Without parameters."""
    return normalcy.normalize(x, row.norm, eps=eps)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_skewness_and_kurtosis_stay(row: Row, offset: float) -> None:
    x = row.input(torch.float64, offset=0).exp() + offset
    before, after = moments(x, row), moments(plain(row, x, 1e-5), row)
    assert before[2].abs().min() > 1e-3
    # float64 keeps 1e-13 of the spread of data this far off; skewness and kurtosis feel a few times that
    torch.testing.assert_close(after[2], before[2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after[3], before[3], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", [1e-5, 0.25])
@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_the_variance_after_normalizing_is_var_over_var_plus_eps(row: Row, eps: float) -> None:
    x = row.input(torch.float64, offset=1e3)
    _, var, _, _ = moments(x, row)
    mean, after, _, _ = moments(plain(row, x, eps), row)
    torch.testing.assert_close(after, var / (var + eps), rtol=1e-9, atol=0)
    assert mean.abs().max() < 1e-9


def test_after_scale_and_shift_neither_mean_nor_variance_is_standard() -> None:
    x = CENTRED[0].input(torch.float64)
    weight, bias = torch.tensor([2.0, 3.0, -1.5]).double(), torch.tensor([1.0, -4.0, 0.5]).double()
    y = normalcy.batch_norm(x, weight=weight, bias=bias, training=True, eps=1e-12)
    torch.testing.assert_close(y.mean(0), bias)
    torch.testing.assert_close(y.var(0, correction=0), weight.square())


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_scale_and_shift_can_restore_the_identity(offset: float) -> None:
    x = CENTRED[2].input(offset=offset)
    wide = x.double()
    weight = (wide.var((0, 2, 3), correction=0) + 1e-5).sqrt().float()
    y = normalcy.batch_norm(x, weight=weight, bias=wide.mean((0, 2, 3)).float(), training=True)
    # bias is rounded to half an ulp of the offset, and so is y
    torch.testing.assert_close(y, x, rtol=2 * torch.finfo(torch.float32).eps, atol=4e-6)


@pytest.mark.parametrize("layer", [ours.BatchNorm1d(4), ours.LayerNorm(4)], ids=["batch", "layer"])
def test_training_scale_and_shift_alone_finds_them(layer: nn.Module) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3 + 50
    target = 2 * type(layer)(4)(x).detach() + 0.5
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        (layer(x) - target).square().mean(0).sum().backward()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((4,), 2.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(layer.bias.detach(), torch.full((4,), 0.5), rtol=1e-4, atol=0)
