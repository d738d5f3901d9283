"""Recalibration pools the statistics of all batches, or refuses; nothing else changes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from unit.models import BATCH_NORMED, data_for, features, images, inputs_of, mlp, norms_of, resnet

from normalcy import nn as ours
from normalcy.conventions import KERAS, TORCH
from normalcy.doctor import examine
from normalcy.errors import ArgumentError, DataError, TooFewValuesError
from normalcy.surgery import debias, recalibrate

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "worked.json").read_text()) + json.loads(
    (Path(__file__).parents[2] / "golden" / "field.json").read_text()
)
ULP = 2.0**-23


def stored(norm: Any) -> np.ndarray:
    return np.stack([norm.running_mean.double().numpy(), norm.running_var.double().numpy()])


def assert_within(got: np.ndarray, right: np.ndarray, relative: float = ULP) -> None:
    """One rounding to float32; `right` is float64."""
    if not (np.abs(got - right) <= relative * np.abs(right)).all():
        raise AssertionError(f"{got} is not {right}")


@pytest.mark.parametrize("correction", [0, 1])
def test_two_batches_pool_to_the_population(correction: int) -> None:
    (case,) = [case for case in GOLDEN if case["id"] == "recalibration-pools"]
    norm = nn.BatchNorm1d(1)
    batches = [torch.tensor(b, dtype=torch.float32).unsqueeze(1) for b in case["given"]["batches"]]
    report = recalibrate(norm, iter(batches), correction=correction)
    right = case["right"]
    assert_within(stored(norm)[:, 0], np.array([right["mean"], right["stored"][f"correction {correction}"]]))
    assert [(item.where, item.why) for item in report.done] == [
        ("", "pooled over 4 values per channel, 2 calls")
    ]
    assert report.model is norm


@pytest.mark.parametrize("name", BATCH_NORMED)
@pytest.mark.parametrize("training", [True, False])
def test_every_norm_gets_the_definitions_statistics_of_uneven_batches(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = BATCH_NORMED[name]().train(training)
    x, _ = data_for(name, 60)
    batches = [x[:5], x[5:21], x[21:]]
    right = inputs_of(model, batches)
    report = recalibrate(model, iter(batches))
    assert [item.where for item in report.done] == list(norms_of(model))
    assert report.refused == []
    for path, norm in norms_of(model).items():
        values = torch.cat(right[path]).numpy()
        assert_within(stored(norm), np.stack([values.mean(0), values.var(0, ddof=1)]))
    assert all(module.training == training for module in model.modules())


def test_an_offset_of_ten_thousand_costs_nothing() -> None:
    x = features(200)[0].double() / 100 + 1e4
    norm = nn.BatchNorm1d(10).double()
    recalibrate(norm, iter(x.split(33)))
    assert_within(stored(norm), np.stack([x.numpy().mean(0), x.numpy().var(0, ddof=1)]), 1e-9)


def test_afterwards_evaluation_is_what_one_big_batch_gives() -> None:
    torch.manual_seed(0)
    model, (x, _) = mlp(), features(400)
    recalibrate(model.eval(), x, correction=0)
    with torch.no_grad():
        got = model(x)
        twin = copy.deepcopy(model)
        twin[1].train(), twin[5].train()
        right = twin(x)
    # float32 through three layers
    assert float((got - right).abs().max()) <= 1e-5 * float(right.abs().max())
    assert not examine(model, x).having("initial-statistics", "unwarmed-statistics", "stale-statistics")


def test_pytorchs_own_tool_agrees_where_both_mean_the_same() -> None:
    """`update_bn` averages variances of batches by batch: the same only for one batch.

    Its means are the same for batches of equal size; its variance lacks the spread between batches, and with
    unequal sizes its mean gives every batch the same weight.
    """
    x, _ = features(96)
    one, two = nn.BatchNorm1d(10), nn.BatchNorm1d(10)
    recalibrate(one, x)
    update_bn([x], two)
    assert_within(stored(one), stored(two), 4e-7 * 10)
    recalibrate(one, iter(x.split(32)))
    update_bn(x.split(32), two)
    np.testing.assert_allclose(stored(one)[0], stored(two)[0], rtol=1e-5, atol=1e-6)
    values = x.double().numpy().reshape(3, 32, 10)
    between = 32 * values.mean(1).var(0) * 3 / 95
    within = values.var(1, ddof=1).mean(0) * 93 / 95
    np.testing.assert_allclose(stored(one)[1], between + within, rtol=1e-5)
    np.testing.assert_allclose(stored(two)[1], values.var(1, ddof=1).mean(0), rtol=1e-5)


@pytest.mark.parametrize(("momentum", "count"), [(0.1, 349), (1.0, 1), (None, 3), (0.001, 36719)])
def test_the_counter_says_that_nothing_initial_is_left(momentum: float | None, count: int) -> None:
    norm = nn.BatchNorm1d(10, momentum=momentum)
    recalibrate(norm, iter(features(60)[0].split(20)))
    assert int(norm.num_batches_tracked) == count
    assert momentum is None or (1 - momentum) ** count < 2**-52
    assert examine(norm).findings == ()
    report = debias(norm)
    assert report.done == []
    assert len(report.refused) == 1


def test_a_higher_counter_stays() -> None:
    norm = nn.BatchNorm1d(10)
    norm.num_batches_tracked.fill_(5000)
    recalibrate(norm, features(20)[0])
    assert int(norm.num_batches_tracked) == 5000


def test_a_cumulative_average_goes_on_from_there() -> None:
    x, _ = features(90)
    norm = nn.BatchNorm1d(10, momentum=None)
    recalibrate(norm, iter(x[:60].split(20)))
    before = stored(norm)[0]
    norm.train()(x[60:])
    np.testing.assert_allclose(
        stored(norm)[0], (3 * before + x[60:].double().numpy().mean(0)) / 4, rtol=1e-5, atol=1e-6
    )


def test_a_cumulative_average_by_values_goes_on_as_if_it_had_seen_all() -> None:
    x, _ = features(90)
    norm = ours.BatchNorm1d(10, momentum=None, convention=replace(TORCH, cumulative="values"))
    recalibrate(norm, iter(x[:50].split(20)))
    assert int(norm.num_values_tracked) == 50
    norm.train()(x[50:])
    values = x.double().numpy()
    np.testing.assert_allclose(stored(norm), [values.mean(0), values.var(0, ddof=1)], rtol=1e-5, atol=1e-5)


def test_without_a_counter_the_statistics_are_pooled_all_the_same() -> None:
    norm = nn.BatchNorm1d(10)
    norm.num_batches_tracked = None
    x, _ = features(30)
    recalibrate(norm, x)
    assert_within(stored(norm)[0], x.double().numpy().mean(0))


def test_frozen_norms_are_left_and_said() -> None:
    model = resnet().train()
    model[4].bn1.eval()
    before = stored(model[4].bn1)
    report = recalibrate(model, images(8)[0])
    assert [item.where for item in report.refused] == ["4.bn1"]
    assert "frozen" in report.refused[0].why
    assert (stored(model[4].bn1) == before).all()
    assert len(report.done) == 6
    assert not model[4].bn1.training


class Odd(nn.Module):
    """One norm that is fine, one that gets an infinity, one never reached, and an instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.spoilt, self.never = nn.BatchNorm1d(10), nn.BatchNorm1d(10), nn.BatchNorm1d(4)
        self.tracked = nn.InstanceNorm1d(10, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fine(x)
        return y + self.spoilt(torch.where(torch.arange(10) == 3, torch.inf, x)).nan_to_num()


def test_what_cannot_be_recalibrated_is_refused_each_with_a_sentence() -> None:
    model = Odd()
    before = copy.deepcopy(model.state_dict())
    report = recalibrate(model, features(20)[0])
    assert [item.where for item in report.done] == ["fine"]
    said = {item.where: item.why for item in report.refused}
    assert said == {
        "spoilt": "its input is not finite in 1 of 10 channels",
        "never": "the data never reach it",
        "tracked": "an instance norm stores the average of its instances' variances, which pooling is not",
    }
    for name, value in model.state_dict().items():
        assert name.startswith("fine") or torch.equal(value, before[name])


def test_a_class_with_a_forward_of_its_own_is_refused() -> None:
    class Scaled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(100 * x)

    report = recalibrate(norm := Scaled(10), features(20)[0])
    assert [(item.where, "no batch norm that is known" in item.why) for item in report.refused] == [
        ("", True)
    ]
    assert (norm.running_mean == 0).all()
    assert report.done == []


def test_statistics_beyond_the_range_of_half_precision_are_refused() -> None:
    norm = nn.BatchNorm1d(10).half()
    x = features(50)[0].half() * 100
    report = recalibrate(norm, x)
    assert report.refused[0].why.startswith("running_var of torch.float16 cannot hold 2.")
    assert (norm.running_mean == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_pooled_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(10).to(dtype)
    x = features(100)[0].to(dtype)
    recalibrate(norm, iter(x.split(30)))
    values = x.double().numpy()
    assert norm.running_mean.dtype == dtype
    assert_within(
        stored(norm), np.stack([values.mean(0), values.var(0, ddof=1)]), torch.finfo(dtype).eps + 1e-12
    )


def test_no_statistic_has_changed_where_the_pass_fails() -> None:
    model, (x, _) = resnet().train(), images(8)
    model(x)
    before = copy.deepcopy(model.state_dict())

    def fails() -> Any:
        yield x
        yield x
        raise KeyboardInterrupt

    for data, error in (
        (fails(), KeyboardInterrupt),
        (iter([x, x[:, :2]]), DataError),
        (iter([x, x * torch.nan]), DataError),
        (iter([x[:1, :, :2, :2]] * 2), TooFewValuesError),
        ([], DataError),
    ):
        with pytest.raises(error):
            recalibrate(model, data)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(m.training for m in model.modules())
        assert all(m.track_running_stats for m in norms_of(model).values())


def test_dropout_does_not_spoil_what_comes_after_it() -> None:
    x, _ = features(500)
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(10)).train()
    recalibrate(model, x)
    assert_within(stored(model[1])[0], x.double().numpy().mean(0))


def test_progress_call_tuples_and_loaders() -> None:
    told: list[tuple[str, int, int | None]] = []
    x, y = features(50)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20)
    norm = nn.BatchNorm1d(10)
    recalibrate(norm, loader, progress=lambda *args: told.append(args))
    assert told == [("measuring statistics", n, 3) for n in (1, 2, 3)]
    assert_within(stored(norm)[0], x.double().numpy().mean(0))
    recalibrate(norm, {"a": x}, call=lambda model, batch: model(2 * batch["a"]))
    assert_within(stored(norm)[0], 2 * x.double().numpy().mean(0))


def test_norms_that_share_their_statistics_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 10), nn.BatchNorm1d(10), nn.BatchNorm1d(10))
    model[2].running_var = model[0].running_var
    report = recalibrate(model, features(30)[0])
    assert [item.where for item in report.done] == ["3"]
    assert [item.where for item in report.refused] == ["0", "2"]
    assert all("the same tensors" in item.why for item in report.refused)
    assert (model[0].running_mean == 0).all()


def test_bad_arguments_are_refused_with_a_sentence() -> None:
    x, _ = features(20)
    with pytest.raises(ArgumentError, match="correction=2"):
        recalibrate(mlp(), x, correction=2)
    with pytest.raises(ArgumentError, match="the model is a value of type str"):
        recalibrate("model", x)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no shape yet"):
        recalibrate(nn.LazyBatchNorm1d(), x)
    report = recalibrate(nn.Linear(10, 2), x)
    assert report.notes == ["no batch norm with running statistics to recalibrate"]
    assert report.done == report.refused == []


def test_a_list_of_tensors_of_one_kind_is_batches_and_of_two_kinds_one_batch() -> None:
    norm = nn.BatchNorm1d(1)
    recalibrate(norm, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    assert norm.running_mean.item() == 3
    assert norm.running_var.item() == pytest.approx(20 / 3)
    with pytest.raises(DataError, match="probably one batch"):
        recalibrate(norm, [torch.randn(4, 1), torch.randn(4)])


def test_without_a_correction_each_layer_stores_what_its_convention_stores() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(1), ours.BatchNorm1d(1, convention=KERAS)])
    x = torch.tensor([[0.0], [2.0]])
    for layer, variance in zip(model, (2.0, 1.0), strict=True):
        recalibrate(layer, x)
        assert layer.running_var.item() == variance
        recalibrate(layer, x, correction=1)
        assert layer.running_var.item() == 2.0


def test_a_pooled_layer_pools_on_from_what_was_recalibrated() -> None:
    pooled = replace(TORCH, cumulative="values")
    layer = ours.BatchNorm1d(1, momentum=None, convention=pooled)
    first, second = torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])
    assert "pools on" in recalibrate(layer, first, correction=0).refused[0].why
    recalibrate(layer, first)
    layer.train()(second)
    assert layer.running_mean.item() == 3
    assert layer.running_var.item() == pytest.approx(20 / 3)
