"""Debiasing recovers the weighted average of what was seen, once, or says why not."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from unit.models import features, mlp

from normalcy import nn as ours
from normalcy.conventions import TORCH
from normalcy.doctor import examine
from normalcy.errors import ArgumentError
from normalcy.surgery import debias, recalibrate


def batches(updates: int) -> list[Tensor]:
    """Batches of different location and scale, means from −20 to 25."""
    g = torch.Generator().manual_seed(3)
    return [features(48, seed=k)[0] * (1 + torch.rand(10, generator=g)) + k for k in range(updates)]


def average(seen: list[Tensor], momentum: float) -> np.ndarray:
    """Σ wᵢ·(mean, unbiased var)ᵢ/Σ wᵢ with wᵢ = (1 − m)^(k − i), by hand in float64."""
    weights = np.array([(1 - momentum) ** (len(seen) - 1 - i) for i in range(len(seen))])
    values = np.array([[b.double().numpy().mean(0), b.double().numpy().var(0, ddof=1)] for b in seen])
    return (weights[:, None, None] * values).sum(0) / weights.sum()


def stored(norm: Any) -> np.ndarray:
    return np.stack([norm.running_mean.double().numpy(), norm.running_var.double().numpy()])


def rounding(momentum: float, updates: int, largest: float) -> float:
    """One float32 rounding in each update, of values up to `largest`, divided by what is not initial."""
    return updates * 2.0**-23 * largest / (1 - (1 - momentum) ** updates)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, ours.BatchNorm1d])
@pytest.mark.parametrize(("momentum", "updates"), [(0.1, 1), (0.1, 10), (0.001, 40), (0.01, 100), (0.9, 3)])
def test_what_remains_is_the_weighted_average_of_what_was_seen(
    layer: Any, momentum: float, updates: int
) -> None:
    norm, seen = layer(10, momentum=momentum), batches(updates)
    for batch in seen:
        norm(batch)
    report = debias(norm)
    right = average(seen, momentum)
    left = (1 - momentum) ** updates
    assert [item.why for item in report.done] == [
        f"the initial state weighed {left:.3g} after {updates} updates with momentum {momentum}"
    ]
    assert np.abs(stored(norm) - right).max() <= rounding(momentum, updates, float(np.abs(right).max()))


def test_the_same_batch_again_and_again_gives_its_own_statistics() -> None:
    norm, (x, _) = nn.BatchNorm1d(10, momentum=0.1), features(64)
    for _ in range(7):
        norm(x)
    debias(norm)
    values = x.double().numpy()
    np.testing.assert_allclose(stored(norm), [values.mean(0), values.var(0, ddof=1)], rtol=3e-6)


def test_twice_is_once_also_after_saving_and_loading() -> None:
    model = mlp(momentum=0.01).train()
    for batch in batches(20):
        model(batch)
    first = debias(model)
    assert [item.where for item in first.done] == ["1", "5"]
    kept = copy.deepcopy(model.state_dict())
    fresh = mlp(momentum=0.01)
    fresh.load_state_dict(kept)
    for again in (model, fresh):
        report = debias(again)
        assert report.done == []
        assert [item.where for item in report.refused] == ["1", "5"]
        assert all("nothing is left of the initial state" in item.why for item in report.refused)
        assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())
    assert examine(model).findings == ()


def test_training_goes_on_as_an_ordinary_average() -> None:
    norm, seen = nn.BatchNorm1d(10, momentum=0.1), batches(6)
    for batch in seen[:5]:
        norm(batch)
    debias(norm)
    before = stored(norm)
    norm(seen[5])
    last = seen[5].double().numpy()
    right = 0.9 * before + 0.1 * np.stack([last.mean(0), last.var(0, ddof=1)])
    np.testing.assert_allclose(stored(norm), right, rtol=1e-6)
    assert debias(norm).done == []


def test_after_recalibration_there_is_nothing_to_debias() -> None:
    model = mlp(momentum=0.001).train()
    for batch in batches(5):
        model(batch)
    recalibrate(model, iter(batches(5)))
    kept = copy.deepcopy(model.state_dict())
    assert debias(model).done == []
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_the_momentum_that_was_used_can_be_given() -> None:
    norm, seen = nn.BatchNorm1d(10, momentum=0.05), batches(8)
    for batch in seen:
        norm(batch)
    norm.momentum = 0.5
    debias(norm, momentum=0.05)
    right = average(seen, 0.05)
    assert np.abs(stored(norm) - right).max() <= rounding(0.05, 8, float(np.abs(right).max()))
    for wrong in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ArgumentError, match="momentum="):
            debias(norm, momentum=wrong)


def test_a_feature_that_never_varies_does_not_have_its_layer_refused() -> None:
    for constant in (0.0, 7.3):
        for layer in (nn.BatchNorm1d, ours.BatchNorm1d):
            norm = layer(3, momentum=0.001)
            for k in range(300):
                x = torch.randn(32, 3, generator=torch.Generator().manual_seed(k)) + 2
                x[:, 1] = constant
                norm(x)
            report = debias(norm)
            assert len(report.done) == 1
            assert abs(float(norm.running_mean[1]) - constant) <= rounding(0.001, 300, 7.3)
            assert 0 <= float(norm.running_var[1]) <= rounding(0.001, 300, 1.0)


def made(momentum: float | None = 0.1, updates: int = 3, **changes: Any) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(10, momentum=momentum)
    for batch in batches(updates):
        norm(batch)
    for name, value in changes.items():
        getattr(norm, name).copy_(torch.tensor(value).expand_as(getattr(norm, name)))
    return norm


def uncounted() -> nn.BatchNorm1d:
    norm = made()
    norm.num_batches_tracked = None
    return norm


def debiased_already() -> nn.BatchNorm1d:
    norm = ours.BatchNorm1d(10, convention=replace(TORCH, debias=True))
    norm(features(20)[0])
    return norm


def coarse() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(10, momentum=0.001).bfloat16()
    for batch in batches(100):
        norm(batch.bfloat16())
    return norm


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (uncounted, "does not count its updates"),
        (debiased_already, "debiased already"),
        (lambda: made(None), "cumulative average"),
        (lambda: made(updates=0), "nothing was taken in"),
        (lambda: made(0.0), "nothing was taken in"),
        (lambda: made(1.0), "nothing is left"),
        (lambda: made(0.1, num_batches_tracked=500), "nothing is left"),
        (lambda: made(running_mean=math.nan), "not finite"),
        (lambda: made(running_var=math.inf), "not finite"),
        (
            lambda: made(running_var=0.5),
            "no average with momentum 0.1 over 3 updates from 1",
        ),
        (coarse, "bfloat16 rounded the 100 updates too coarsely"),
    ],
)
def test_what_cannot_be_debiased_is_left_and_refused_with_a_sentence(norm: Any, why: str) -> None:
    model = nn.Sequential(norm(), made())
    before = copy.deepcopy(model[0].state_dict())
    report = debias(model)
    assert [item.where for item in report.done] == ["1"]
    (item,) = report.refused
    assert item.where == "0"
    assert why in item.why
    for name, value in model[0].state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_a_tracked_instance_norm_is_refused_since_its_count_may_be_of_a_part_only() -> None:
    """PyTorch's instance norm never counts; adopted, it is counted from then on."""
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.InstanceNorm1d(3, momentum=0.1, track_running_stats=True))
    for _ in range(20):
        model(torch.randn(4, 3, 20, generator=g) + 10)
    ours.adopt(model)
    model(torch.randn(4, 3, 20, generator=g) + 10)
    assert int(model[0].num_batches_tracked) == 1
    before = stored(model[0])
    (item,) = debias(model).refused
    assert "does not count" in item.why
    assert (stored(model[0]) == before).all()


def test_norms_that_share_their_statistics_are_refused() -> None:
    model = nn.Sequential(made(), made(), made())
    model[2].running_mean = model[0].running_mean
    before = stored(model[0])
    report = debias(model)
    assert [item.where for item in report.done] == ["1"]
    assert [item.why.split()[-1] for item in report.refused] == ["2", "0"]
    assert (stored(model[0]) == before).all()


def test_only_layers_with_statistics_are_spoken_of() -> None:
    report = debias(
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False))
    )
    assert report.notes == ["no layer with running statistics to debias"]
    with pytest.raises(ArgumentError, match="is a value of type NoneType"):
        debias(None)  # type: ignore[arg-type]
