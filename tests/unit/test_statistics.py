"""Running statistics: each rule against the average that it stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import normalcy
from normalcy import Moments, definition
from normalcy.conventions import FLAX, KERAS, TORCH, Convention, replace
from normalcy.errors import ArgumentError
from normalcy.statistics import Running, debiased, weight_left, weight_of_new

POOLED = replace(TORCH, cumulative="values")
BATCHES = [
    torch.tensor(values, dtype=torch.float64)[:, None] + 1e4
    for values in ([2.0, 4.0, 6.0, 8.0], [1.0, 1.0, 3.0], [0.0, 7.0], [5.0, -3.0, 2.0, 2.5, 9.0])
]


def running(
    momentum: float | None, convention: Convention = TORCH, dtype: torch.dtype = torch.float64
) -> Running:
    count = torch.tensor(0) if convention.cumulative == "values" else None
    mean, var = torch.full((1,), -3.0, dtype=dtype), torch.full((1,), 2.0, dtype=dtype)
    return Running(mean, var, torch.tensor(0), momentum, convention, count)


def means() -> list[float]:
    return [batch.mean().item() for batch in BATCHES]


def variances(correction: int) -> list[float]:
    return [batch.var(correction=correction).item() for batch in BATCHES]


@pytest.mark.parametrize("convention", [TORCH, KERAS, FLAX], ids=lambda convention: convention.name)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_exponential_averages_are_those_of_the_definition(momentum: float, convention: Convention) -> None:
    kept = running(convention.weight_of_new(momentum), convention)
    mean, var = -3.0, 2.0
    for batch, new_mean, new_var in zip(BATCHES, means(), variances(convention.correction), strict=True):
        kept.update(Moments.of(batch, 0))
        mean = definition.running_update(mean, new_mean, momentum, weighs=convention.weighs)
        var = definition.running_update(var, new_var, momentum, weighs=convention.weighs)
        assert kept.mean.item() == pytest.approx(float(mean), rel=1e-14)
        assert kept.var.item() == pytest.approx(float(var), rel=1e-11)
    assert kept.batches == len(BATCHES)


def test_a_cumulative_average_by_batches_is_the_mean_of_what_was_seen() -> None:
    kept = running(None)
    for batch in BATCHES:
        kept.update(Moments.of(batch, 0))
    assert kept.mean.item() == pytest.approx(sum(means()) / 4, rel=1e-14)
    assert kept.var.item() == pytest.approx(sum(variances(1)) / 4, rel=1e-11)


@pytest.mark.parametrize("correction", [0, 1])
def test_a_cumulative_average_by_values_is_the_statistic_of_all_values(correction: int) -> None:
    kept = running(None, replace(POOLED, correction=correction))
    for batch in BATCHES:
        kept.update(Moments.of(batch, 0))
    whole = torch.cat(BATCHES)
    assert kept.values == len(whole)
    assert kept.mean.item() == pytest.approx(whole.mean().item(), rel=1e-14)
    assert kept.var.item() == pytest.approx(whole.var(correction=correction).item(), rel=1e-10)
    assert abs(kept.var.item() - sum(variances(correction)) / 4) > 0.5


@pytest.mark.parametrize("momentum", [0.001, 0.1, 0.5])
def test_a_debiased_average_is_the_weighted_mean_of_what_was_seen(momentum: float) -> None:
    kept, plain = running(momentum, replace(TORCH, debias=True)), running(momentum)
    for k, batch in enumerate(BATCHES, start=1):
        kept.update(Moments.of(batch, 0))
        plain.update(Moments.of(batch, 0))
        weights = [momentum * (1 - momentum) ** (k - 1 - i) for i in range(k)]
        expected = sum(w * m for w, m in zip(weights, means(), strict=False)) / sum(weights)
        assert kept.mean.item() == pytest.approx(expected, rel=1e-12)
        left = weight_left(momentum, k)
        assert debiased(plain.mean, -3.0, left).item() == pytest.approx(expected, rel=1e-9)
        assert debiased(plain.var, 2.0, left).item() == pytest.approx(kept.var.item(), rel=1e-8)


def test_a_momentum_of_one_forgets_even_a_nan() -> None:
    kept = running(1.0)
    kept.mean.fill_(math.nan)
    kept.update(Moments.of(BATCHES[0], 0))
    assert kept.mean.item() == BATCHES[0].mean().item()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_values_are_no_update(momentum: float | None) -> None:
    kept = running(momentum)
    kept.update(Moments.of(torch.empty(0, 1), 0))
    kept.update(Moments.of(torch.empty(0, 0), 0))
    assert (kept.mean.item(), kept.var.item(), kept.batches.item()) == (-3.0, 2.0, 0)


def test_the_average_over_examples_enters_where_each_has_its_own_statistics() -> None:
    x = torch.stack([batch[:2, 0] for batch in BATCHES[:2]])[:, None]  # (examples, channels, length)
    kept = running(1.0)
    kept.update(Moments.of(x, 2))
    assert kept.mean.item() == pytest.approx(x.mean().item(), rel=1e-14)
    assert kept.var.item() == pytest.approx(x.var(2).mean().item(), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stored_value_is_rounded_once(dtype: torch.dtype) -> None:
    kept = running(0.3, dtype=dtype)
    kept.update(Moments.of(BATCHES[0] - 9990, 0))
    assert kept.mean.item() == torch.tensor(0.7 * -3 + 0.3 * 15.0, dtype=torch.float64).to(dtype).item()


def test_pooling_without_a_count_is_refused() -> None:
    kept = Running(torch.zeros(1), torch.ones(1), momentum=None, convention=POOLED)
    with pytest.raises(ArgumentError, match="without a count of values"):
        kept.update(Moments.of(BATCHES[0], 0))


@pytest.mark.parametrize(
    ("momentum", "k", "weight"), [(0.1, 5, 0.1), (None, 5, 0.2), (None, 0, 1.0), (0, 3, 0)]
)
def test_the_weight_of_the_new_value(momentum: float | None, k: int, weight: float) -> None:
    assert weight_of_new(momentum, k) == weight
    assert 0 <= weight_of_new(momentum, max(k, 1), debias=True) <= 1


def test_an_average_of_standard_deviations_is_not_the_root_of_an_average_of_variances() -> None:
    kept = running(None)
    for std in (1.0, 3.0):
        kept.update(Moments.of(torch.tensor([[-std], [std]]) / math.sqrt(2), 0))
    assert kept.var.sqrt().item() == pytest.approx(math.sqrt(5), rel=1e-6)
    assert kept.var.sqrt().item() > 2.2


@pytest.mark.parametrize("rule", [{"momentum": None}, {"convention": replace(TORCH, debias=True)}])
def test_channels_that_a_mask_leaves_behind_are_refused_where_one_count_serves_all(
    rule: dict[str, Any],
) -> None:
    layer = normalcy.nn.BatchNorm1d(2, **rule)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)) + 10
    mask = torch.ones(8, 2, dtype=torch.bool)
    mask[:, 0] = False
    with pytest.raises(ArgumentError, match="leaves some channels no values"):
        layer(x, mask=mask)
    assert (layer.running_mean.tolist(), int(layer.num_batches_tracked)) == ([0, 0], 0)
    layer(x, mask=torch.zeros(8, 2, dtype=torch.bool))
    assert int(layer.num_batches_tracked) == 0
    layer(x)
    torch.testing.assert_close(layer.running_mean, x.mean(0))


def test_a_tiny_momentum_is_debiased_to_the_mean_of_what_was_seen() -> None:
    kept = Running(torch.zeros(1), torch.ones(1), torch.tensor(0), 1e-17, replace(TORCH, debias=True))
    for mean in (1.0, 3.0):
        kept.update(Moments.of(torch.tensor([[mean - 1], [mean + 1]]), 0))
    assert kept.mean.item() == pytest.approx(2.0)
    assert weight_of_new(1e-17, 2, debias=True) == pytest.approx(0.5)
