"""The neighbours' noise: against brute force, against theory, and what must not change it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import normalcy
from normalcy import doctor, example, neighbours
from normalcy.errors import ArgumentError
from normalcy.moments import Moments


def values(kind: str, rows: int = 256, channels: int = 32, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    if kind == "gaussian":
        return draws.normal(3.0, 2.0, (rows, channels))
    return draws.gamma(2.0, 1.5, (rows, channels)) - 1.0


def noise(x: np.ndarray, *sizes: int, eps: float = 1e-5, seed: int = 0) -> list[neighbours.Noise]:
    return list(neighbours.noise(Moments.of(torch.from_numpy(x), dim=()), sizes, eps, seed))


def by_force(x: np.ndarray, size: int, draws: int = 300, eps: float = 1e-5) -> float:
    """Batches made and normalized one by one; for the same examples, with other draws."""
    generator = np.random.default_rng(99)
    variances = []
    for one in x[:: len(x) // 16]:
        found = []
        for _ in range(draws):
            batch = np.concatenate([one[None], x[generator.integers(0, len(x), size - 1)]])
            found.append((one - batch.mean(0)) / np.sqrt(batch.var(0) + eps))
        variances.append(np.var(found, axis=0, ddof=1))
    return float(np.sqrt(np.mean(variances)))


@pytest.mark.parametrize("kind", ["gaussian", "gamma"])
@pytest.mark.parametrize("size", [2, 5, 32])
def test_it_is_what_batches_made_one_by_one_give(kind, size):
    x = values(kind)
    # 64 draws × 32 channels on one side, 300 × 32 on the other: a standard deviation of 2048 values is good
    # to 1/√(2·2048) = 1.6 %; heavy tails may double that.
    assert noise(x, size)[0].total == pytest.approx(by_force(x, size), rel=0.08)


def test_two_values_become_minus_one_or_one_so_that_two_thirds_of_the_variance_is_noise():
    # x̂ = sign(x − neighbour) has variance 1 − (2F(x) − 1)², and F(x) is uniform, whatever the distribution
    for kind in ("gaussian", "gamma"):
        x = values(kind, rows=256, channels=32, seed=4)
        assert noise(x, 2, eps=1e-9)[0].total == pytest.approx(math.sqrt(2 / 3), rel=0.06)


@pytest.mark.parametrize("kind", ["gaussian", "gamma"])
def test_the_means_part_falls_as_one_over_the_root_of_the_batch(kind):
    for point in noise(values(kind, seed=5), 8, 32, 128, 512):
        assert point.by_mean == pytest.approx(math.sqrt(point.batch - 1) / point.batch, rel=0.08)
        assert point.by_mean < point.total


def test_it_falls_with_the_size_of_the_batch_and_is_nothing_alone():
    curve = noise(values("gamma", seed=6), 1, 2, 4, 16, 64, 256)
    assert curve[0].total < 1e-9  # rounding only: every draw is the example itself
    totals = [point.total for point in curve[1:]]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 4 * totals[-1]


def test_offset_and_scale_of_the_data_do_not_matter():
    x = values("gaussian", seed=7)
    x[:, 3] = x[0, 3]  # one channel is constant
    near = noise(x, 2, 32, eps=0.0)
    far = noise(4096.0 * x + 1e6, 2, 32, eps=0.0)
    for one, other in zip(near, far, strict=True):
        # the moments of values at 1e6/4096 ≈ 120 σ carry 120·2⁻⁵² in each mean; a millionth is far above
        assert other.total == pytest.approx(one.total, rel=1e-6)


def test_places_of_one_example_are_not_taken_for_neighbours():
    draws = np.random.default_rng(8)
    x = draws.normal(5.0, 1.0, (64, 6, 1)) + draws.normal(0.0, 1.0, (64, 6, 40))
    model = nn.Sequential(nn.BatchNorm1d(6))
    model.double()
    found = neighbours.of_model(model, {"0": model[0]}, [torch.from_numpy(x)])["0"]
    assert (found.examples, found.batch) == (64, 64)
    # half of the variance lies between examples: Var(mean) = (1/2 + 1/80)·(n − 1)/n² in units of the whole
    assert found.here.by_mean == pytest.approx(math.sqrt(0.51 * 63) / 64, rel=0.25)  # six channels only
    alone = noise(x[:, :, 0], 64)[0]
    assert found.here.by_mean < alone.by_mean


def test_channels_that_are_not_finite_are_left_out_and_none_finite_is_refused():
    x = values("gaussian", channels=4)
    spoilt = np.concatenate([x, np.full((256, 2), np.nan)], axis=1)
    assert noise(spoilt, 16) == noise(x, 16)
    with pytest.raises(ArgumentError, match="no channel"):
        noise(np.full((8, 2), np.inf), 4)
    with pytest.raises(ArgumentError, match="at least two examples"):
        noise(x[:1], 4)


def test_masked_places_count_nowhere():
    model = nn.Sequential(normalcy.nn.BatchNorm1d(5))
    x = 3 + torch.randn(48, 5, 12, generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(48) % 9 + 3
    mask = torch.arange(12) < lengths[:, None, None]
    spoilt = torch.where(mask, x, 1e6)

    def found(data: torch.Tensor) -> neighbours.Neighbours:
        batches = [(data, mask)]
        return neighbours.of_model(model, {"0": model[0]}, batches, call=lambda m, b: m[0](b[0], b[1]))["0"]

    assert found(x) == found(spoilt)
    plain = neighbours.of_model(model, {"0": model[0]}, [spoilt])["0"]
    assert plain != found(x)


def test_lengths_count_however_they_are_given():
    model = nn.Sequential(normalcy.nn.BatchNorm1d(5))
    x = 3 + torch.randn(48, 5, 12, generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(48) % 9 + 3
    spoilt = torch.where(torch.arange(12) < lengths[:, None, None], x, 1e6)
    calls = (lambda m, b: m[0](b, lengths=lengths), lambda m, b: m[0](b, None, lengths))
    for call in calls:
        clean, found = (neighbours.of_model(model, {"0": model[0]}, [b], call=call)["0"] for b in (x, spoilt))
        assert clean == found


def test_the_model_and_the_random_state_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = neighbours.of_model(model, {"1": model[1]}, [torch.randn(32, 4) + 2 for _ in range(3)] * 4)
    torch.set_rng_state(state)
    again = neighbours.of_model(model, {"1": model[1]}, [torch.randn(32, 4) + 2 for _ in range(3)] * 4)
    assert found == again
    assert model.training
    assert model[2].training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_batches_of_one_are_passed_over():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    x = torch.randn(65, 4, generator=torch.Generator().manual_seed(2)) - 3
    found = neighbours.of_model(model, {"1": model[1]}, [x[:1], x[1:]])["1"]
    assert found.examples == 64
    assert neighbours.of_model(model, {"1": model[1]}, [x[:1]]) == {}


def test_an_examination_reports_it_for_batch_norm_and_for_nothing_else():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))
    found = doctor.examine(model, iter([torch.randn(16, 4) + 3 for _ in range(16)]))
    measured = {site.where: site.neighbours for site in found.sites}
    assert measured["2"] is None
    assert measured["1"] is not None
    assert measured["1"].batch == 16
    assert measured["1"].at(2).total > measured["1"].here.total > measured["1"].at(128).total > 0


def test_in_the_embedded_example_two_neighbours_matter_seven_times_as_much_as_a_batch_of_128(monkeypatch):
    monkeypatch.setattr(example, "STEPS", 60)
    trained = example.train()
    norms = {n: m for n, m in trained.model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    found = neighbours.of_model(trained.model, norms, trained.batches)
    assert set(found) == {"hidden.norm1", "hidden.norm2"}
    for one in found.values():
        assert one.at(2).total > one.at(8).total > one.at(32).total > one.at(128).total
        assert one.at(2).total / one.at(128).total == pytest.approx(7, rel=0.2)
        assert one.here == one.at(128)
        assert 1 / math.sqrt(128) < one.here.total < 2 / math.sqrt(128)
