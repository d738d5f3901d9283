"""Which values are measured: no batch with a single value, said where one is left out; no masked place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from unit.models import data_for, images, inputs_of, norms_of, resnet

from normalcy import nn as ours
from normalcy.case.valid import valid_of
from normalcy.doctor import examine
from normalcy.errors import DataError, ShapeError, TooFewValuesError
from normalcy.measure import Measurements, Skipped, mean_loss, measure, sample, tracking
from normalcy.surgery import recalibrate


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 40


def assert_near(got: Any, right: Any, relative: float = 1e-10) -> None:
    got, right = np.asarray(got, dtype=float), np.asarray(right, dtype=float)
    if not np.allclose(got, right, rtol=relative, atol=relative):
        raise AssertionError(f"{got} is not {right}")


def all_norms(model: nn.Module) -> dict[str, Any]:
    return tracking(model, norms_of(model))


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("at", [{3}, {0}, {1, 2}], ids=["last", "first", "middle"])
def test_batches_with_one_value_per_channel_are_left_out_and_said(kind: str, at: set[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3), nn.BatchNorm1d(3))
    if kind == "ours":
        ours.adopt(model)
    batches = [drawn(1 if n in at else 5 + n, 4, seed=n) for n in range(4)]
    told: list[int] = []
    found = measure(model, all_norms(model), iter(batches), progress=lambda _, done, __: told.append(done))
    kept = [batch for n, batch in enumerate(batches) if n not in at]
    for path, values in inputs_of(model, kept).items():
        right = torch.cat(values).numpy()
        assert int(found[path].actual.count.max()) == len(right) == sum(map(len, kept))
        assert_near(found[path].actual.mean, right.mean(0))
        assert_near(found[path].actual.var(), right.var(0))
    assert [each.batch for each in found.skipped] == sorted(n + 1 for n in at)
    cls = "BatchNorm1d"
    assert {each.why for each in found.skipped} == {f"1 ({cls}) gets one value per channel: shape (1, 6)"}
    assert (found.batches, told) == (4, [1, 2, 3, 4])


def test_nothing_of_a_batch_that_is_left_out_counts_in_the_norms_before() -> None:
    model, (x, _) = resnet(), images(9)
    small = x[:1, :, :4, :4] * 50  # several values in the first norm, one in the later ones
    found = measure(model, all_norms(model), [x, small])
    alone = measure(model, all_norms(model), [x])
    assert [each.batch for each in found.skipped] == [2]
    assert found.keys() == alone.keys()
    for path in alone:
        assert torch.equal(found[path].actual.mean, alone[path].actual.mean)
        assert torch.equal(found[path].actual.m2, alone[path].actual.m2)


def test_a_norm_that_keeps_no_statistics_leaves_a_batch_out_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    x = drawn(6, 4)
    found = measure(model, {"0": model[0]}, [x, x[:1]])
    assert [each.batch for each in found.skipped] == [2]
    # here the tracked norm refuses first; alone, the other one does, in PyTorch's words
    assert (
        measure(model, {}, [x, x[:1]]).skipped[0].why.startswith("the model (Sequential) raised ValueError")
    )


def test_if_every_batch_has_one_value_it_is_refused_with_the_path() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    for n in (1, 3):
        with pytest.raises(TooFewValuesError, match=r"^1 \(BatchNorm1d\) gets one value per channel"):
            measure(model, all_norms(model), [drawn(1, 4, seed=s) for s in range(n)])


def test_an_error_of_another_kind_is_no_reason_to_leave_a_batch_out() -> None:
    model, x = nn.BatchNorm1d(4), drawn(6, 4)
    with pytest.raises(DataError, match="the model"):
        measure(model, {"": model}, [x, x[:, :3]])
    with pytest.raises(ShapeError, match="3 channels"):
        measure(ours.BatchNorm1d(4), {}, [x, x[:, :3]])


def test_what_was_left_out_is_one_sentence_of_bounded_length() -> None:
    assert Measurements({}, [], 3).left_out() == ""
    many = Measurements({}, [Skipped(n, "bn gets one value") for n in range(1, 90)], 100)
    assert (
        many.left_out()
        == "left out of 100 batches: numbers 1, 2, 3, 4, 5 and 84 more, since bn gets one value"
    )


def test_losses_with_either_source_can_be_over_the_same_batches() -> None:
    norm = nn.BatchNorm1d(4)
    batches = [drawn(8, 4), drawn(1, 4, seed=1) + 500, drawn(5, 4, seed=2)]

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean()

    norms = {"": norm}
    kept = [batches[0], batches[2]]
    assert mean_loss(norm, batches, loss, norms=norms) == mean_loss(norm, kept, loss, norms=norms)
    assert mean_loss(norm, batches, loss, norms={}, among=norms) == mean_loss(norm, kept, loss, norms={})
    assert mean_loss(norm, batches, loss, norms={}) > 2 * mean_loss(norm, kept, loss, norms={})
    with pytest.raises(TooFewValuesError, match="one value per channel"):
        mean_loss(norm, batches[1:2], loss, norms=norms)


def test_samples_are_taken_up_to_the_norm_that_gets_one_value() -> None:
    model, (x, _) = resnet(), images(3)
    norms = all_norms(model)
    taken = sample(model, norms, dict.fromkeys(norms, 0), x[:1, :, :4, :4])
    assert list(taken) == ["1", "4.bn1", "4.bn2", "4.down.1"]


def test_recalibration_goes_on_without_such_a_batch_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    x = drawn(33, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    report = recalibrate(model, loader)
    got = model[1].running_mean.clone()
    assert [item.where for item in report.done] == ["1"]
    assert report.notes == [
        "left out of 3 batches: number 3, since 1 (BatchNorm1d) gets one value per channel: shape (1, 6)"
    ]
    assert recalibrate(model, x[:32]).notes == []
    # the halves are merged in another order than one batch of 32: a few ulps of float32
    assert_near(got, model[1].running_mean, 1e-6)


def test_a_norm_that_only_a_left_out_batch_reaches_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rare(self.always(x) if len(x) > 1 else x) if len(x) == 1 else self.always(x)

    report = recalibrate(Sometimes(), iter([drawn(6, 4), drawn(1, 4)]))
    assert [(item.where, item.why) for item in report.refused] == [
        ("rare", "the data never reach it in a batch that was not left out")
    ]


def test_the_doctor_speaks_where_the_last_batch_has_one_example() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    x = drawn(65, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    found = examine(model, loader, loss=lambda output, _: output.square().mean())
    assert found.having("initial-statistics")
    assert found["1"].gap is not None


# Masks

Masked = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
LENGTHS = torch.tensor([7, 1, 0, 4, 6])
MASK = torch.arange(7) < LENGTHS[:, None, None]
WAYS: dict[str, Masked] = {
    "by place": lambda x: ((x, MASK), {}),
    "by name": lambda x: ((x,), {"mask": MASK}),
    "whole": lambda x: ((x, MASK.expand(x.shape)), {}),
    "input by name": lambda x: ((), {"input": x, "mask": MASK}),
    "lengths": lambda x: ((x,), {"lengths": LENGTHS}),
}


class Padded(nn.Module):
    """A norm of sequences that are padded with what must not count."""

    def __init__(self, norm: nn.Module, way: str) -> None:
        super().__init__()
        self.norm, self.way = norm, way

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = WAYS[self.way](torch.where(MASK, x, torch.nan))
        return self.norm(*args, **kwargs)


def valid_values(x: Tensor) -> np.ndarray:
    return np.concatenate([row[:, :n].T for row, n in zip(x.double().numpy(), LENGTHS.tolist(), strict=True)])


@pytest.mark.parametrize("way", WAYS)
def test_masked_places_count_nowhere(way: str) -> None:
    model = Padded(ours.BatchNorm1d(3), way)
    x, y = drawn(5, 3, 7), drawn(5, 3, 7, seed=1) * 2
    found = measure(model, {"norm": model.norm}, [x, y])["norm"]
    right = np.concatenate([valid_values(x), valid_values(y)])
    assert found.actual.count.tolist() == [36, 36, 36]
    assert_near(found.actual.mean, right.mean(0))
    assert_near(found.actual.var(), right.var(0))
    # examples without a valid place are none
    means = [b.double().numpy()[i, :, :n].mean(1) for b in (x, y) for i, n in enumerate(LENGTHS) if n]
    assert found.examples.count.tolist() == [8, 8, 8]
    assert_near(found.examples.mean, np.mean(means, 0))
    taken = sample(model, {"norm": model.norm}, {"norm": 1}, x)["norm"]
    assert_near(sorted(taken.before), sorted(valid_values(x)[:, 1]))


@pytest.mark.parametrize("way", WAYS)
def test_recalibrated_with_masks_is_recalibrated_on_the_valid_values(way: str) -> None:
    model, plain = Padded(ours.BatchNorm1d(3), way), ours.BatchNorm1d(3)
    x = drawn(5, 3, 7)
    assert recalibrate(model, x).done[0].why == "pooled over 18 values per channel, 1 call"
    recalibrate(plain, torch.from_numpy(valid_values(x)).float())
    # both are float64 results rounded once to float32
    assert_near(model.norm.running_mean, plain.running_mean, 2**-23)
    assert_near(model.norm.running_var, plain.running_var, 2**-22)
    model.eval()
    assert_near(model(x).detach().masked_fill(MASK, 0), 0)


def test_a_mask_that_leaves_one_value_leaves_the_batch_out() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ours.BatchNorm1d(2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(x, mask)

    model, x = Given(), drawn(4, 2)
    few = torch.tensor([[True, True], [False, True], [False, True], [False, True]])
    batches = [(x, torch.ones_like(few)), (x, few)]
    found = measure(model, {"norm": model.norm}, batches, call=lambda m, b: m(*b))
    assert [(s.batch, s.why) for s in found.skipped] == [
        (2, "norm (BatchNorm1d) gets one value per channel: shape (4, 2), masked")
    ]
    assert found["norm"].actual.count.tolist() == [4, 4]


def test_a_channel_without_any_valid_value_is_refused_by_recalibration() -> None:
    class HalfHidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ours.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, mask=torch.tensor([True, False]))

    model = HalfHidden()
    report = recalibrate(model, drawn(4, 2))
    assert [(item.where, item.why) for item in report.refused] == [
        ("norm", "1 of 2 channels have no valid value")
    ]
    assert model.norm.running_mean.tolist() == [0, 0]


def test_a_mask_means_nothing_known_to_layers_that_are_not_ours() -> None:
    class Inverted(ours.BatchNorm1d):
        def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input, ~mask)

    x, mask = drawn(5, 3, 7), MASK
    assert valid_of(Inverted(3), (x, mask), {}) is None
    assert valid_of(nn.BatchNorm1d(3), (x,), {}) is None
    assert valid_of(ours.BatchNorm1d(3), (x, None), {"lengths": None}) is None
    for way in WAYS.values():
        args, kwargs = way(x)
        for layer in (ours.BatchNorm1d(3), ours.GroupNorm(1, 3)):
            assert torch.equal(valid_of(layer, args, kwargs), mask.expand(x.shape))
    assert torch.equal(valid_of(ours.LayerNorm(7), (x, mask), {}), mask.expand(x.shape))


def test_a_fused_norm_is_measured_with_its_mask() -> None:
    block = ours.Fused(ours.BatchNorm1d(3), "relu")
    x = drawn(5, 3, 7)
    found = measure(
        block, {"norm": block.norm}, [x], call=lambda m, b: m(torch.where(MASK, b, torch.nan), mask=MASK)
    )["norm"]
    assert_near(found.actual.mean, valid_values(x).mean(0))


def test_data_for_models_without_masks_are_measured_as_before() -> None:
    x, _ = data_for("mlp", 20)
    model = nn.Sequential(ours.BatchNorm1d(10))
    found = measure(model, {"0": model[0]}, [x])["0"]
    assert_near(found.actual.mean, x.double().numpy().mean(0))
    assert found.examples.count.tolist() == [20] * 10
