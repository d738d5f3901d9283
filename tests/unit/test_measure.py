"""Measured statistics are those of the definition, and measuring leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from unit.models import BATCH_NORMED, data_for, features, images, inputs_of, mlp, norms_of, resnet

from normalcy.errors import ArgumentError, DataError, TooFewValuesError
from normalcy.measure import gap, mean_loss, measure, sample, tracking
from normalcy.moments import Moments
from normalcy.undisturbed import must_have_values, on_batch_statistics, random_states_kept


def assert_near(got: Any, right: Any, relative: float = 1e-10) -> None:
    got, right = np.asarray(got, dtype=float), np.asarray(right, dtype=float)
    if not np.allclose(got, right, rtol=relative, atol=relative):
        raise AssertionError(f"{got} is not {right}")


def all_norms(model: nn.Module) -> dict[str, Any]:
    return tracking(model, norms_of(model))


@pytest.mark.parametrize("name", BATCH_NORMED)
def test_pooled_moments_are_the_definitions_over_all_batches(name: str) -> None:
    torch.manual_seed(1)
    model = BATCH_NORMED[name]().eval()
    x, _ = data_for(name, 50)
    batches = [x[:7], x[7:20], x[20:]]  # uneven
    measured = measure(model, all_norms(model), iter(batches))
    right = {path: torch.cat(parts).numpy() for path, parts in inputs_of(model, batches).items()}
    assert set(measured) == set(right)
    for path, values in right.items():
        actual = measured[path].actual
        assert int(actual.count.max()) == len(values)
        assert_near(actual.mean, values.mean(0))
        assert_near(actual.var(), values.var(0))
        assert measured[path].calls == 3


def test_a_norm_that_runs_twice_in_a_pass_pools_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[:, :3]) + self.norm(x[:, 3:6])

    model, (x, _) = Twice(), features(20)
    found = measure(model, all_norms(model), [x])["norm"]
    both = torch.cat([x[:, :3], x[:, 3:6]]).double().numpy()
    assert_near(found.actual.mean, both.mean(0))
    assert_near(found.actual.var(1), both.var(0, ddof=1))
    assert found.calls == 2


def test_a_norm_called_with_its_input_by_name_is_measured() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=x)

    x, _ = features(20)
    found = measure(model := Named(), all_norms(model), [x])["norm"]
    assert_near(found.actual.mean, x.double().numpy().mean(0))


def test_the_gap_is_the_actual_distance_of_normalized_values() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 4, generator=g, dtype=torch.float64) * 3 + torch.tensor([1e4, -2.0, 0.0, 30.0])
    mean, var = x.mean(0) + torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([9.0, 1.0, 20.0, 0.3])
    found = gap(Moments.of(x, dim=0), mean, var, 1e-3)
    values = x.numpy()
    with_batch = (values - values.mean(0)) / np.sqrt(values.var(0) + 1e-3)
    with_stored = (values - mean.numpy()) / np.sqrt(var.double().numpy() + 1e-3)
    squared = ((with_batch - with_stored) ** 2).mean(0)
    assert_near(found.rms, np.sqrt(squared.mean()), 1e-9)
    assert_near(found.worst, np.sqrt(squared.max()), 1e-9)
    assert found.channel == squared.argmax() == 3
    assert_near(found.mean_shift, 2.0 / np.sqrt(values.var(0)[3] + 1e-3), 1e-6)
    assert_near(found.var_ratio, 0.3 / values.var(0)[3], 1e-6)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -1.0])
def test_statistics_that_give_no_finite_output_have_an_infinite_gap(spoilt: float) -> None:
    x, _ = features(50)
    found = gap(Moments.of(x, dim=0), x.mean(0), torch.full((10,), spoilt), 1e-5)
    assert found.rms == found.worst == float("inf") or (spoilt == float("inf") and found.rms > 0.9)


def test_the_standard_error_counts_examples_where_their_places_are_alike() -> None:
    alike = torch.randn(40, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(40, 3, 8, 8) + 5
    apart = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 5
    norm = nn.BatchNorm2d(3)
    of_examples = measure(norm, {"": norm}, [alike[:10], alike[10:]])[""].standard_error
    of_places = measure(norm, {"": norm}, [apart[:10], apart[10:]])[""].standard_error
    assert abs(of_examples - 1 / np.sqrt(40)) < 1e-6
    assert abs(of_places * np.sqrt(40 * 64) - 1) < 0.3  # chi² of 3 × 39: ±13 % is one standard deviation


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [m.training for m in model.modules()],
        "flags": [getattr(m, "track_running_stats", None) for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "values": {k: v.clone() for k, v in model.state_dict().items()},
        "random": (torch.get_rng_state().clone(), random.getstate(), np.random.get_state()[1].copy()),  # noqa: NPY002 - that state is kept
    }


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    for key in ("modes", "flags", "hooks", "gradients", "identity"):
        assert before[key] == after[key], key
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name
    assert torch.equal(before["random"][0], after["random"][0])
    assert before["random"][1] == after["random"][1]
    assert (before["random"][2] == after["random"][2]).all()


def draining(x: Tensor, at: int, what: BaseException | None) -> Iterator[Tensor]:
    """Batches whose making draws random numbers, and which may fail."""
    for number in range(4):
        random.random()  # noqa: S311 - the global state is what is tested
        np.random.rand()  # noqa: NPY002 - the global state is what is tested
        if number == at and what is not None:
            raise what
        yield x + torch.randn(())


class Counts(nn.Module):
    """A layer that writes into one buffer and assigns another, in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(5.0))
        self.register_buffer("last", torch.tensor(7.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.last = x.mean()
        return x


@pytest.mark.parametrize(
    "what", [None, ValueError("broken file"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes_also_where_the_data_fail(what: BaseException | None, training: bool) -> None:
    x, _ = images(6)
    model = nn.Sequential(Counts(), resnet()).train(training)
    model[1][1].weight.requires_grad_(False)
    model[1][4].bn1.eval()
    before = snapshot(model)
    batches = draining(x, 2, what)
    if what is None:
        assert measure(model, all_norms(model), batches)
    else:
        with pytest.raises(type(what)):
            measure(model, all_norms(model), batches)
    assert_untouched(before, model)


@pytest.mark.parametrize("what", [ValueError("odd"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_nothing_changes_where_the_model_fails_in_the_third_batch(what: BaseException) -> None:
    calls = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise what
            return x

    model = nn.Sequential(Counts(), nn.BatchNorm1d(10), Fails(), nn.BatchNorm1d(10)).train()
    x, _ = features(12)
    before = snapshot(model)
    raised = DataError if isinstance(what, ValueError) else KeyboardInterrupt
    with pytest.raises(raised):
        measure(model, all_norms(model), [x + 1, x - 1, x, x])
    assert len(calls) == 3
    assert_untouched(before, model)


def test_dropout_stays_off_and_everything_else_evaluates() -> None:
    modes: dict[str, bool] = {}
    model = mlp().train()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, _, path=path: modes.__setitem__(path, m.training))
    measure(model, all_norms(model), [features(8)[0]])
    assert {path for path, training in modes.items() if training} == set(norms_of(model))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "call"])
def test_batches_of_every_form_are_measured(form: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)

        def forward(self, features: Tensor, scale: float = 1.0) -> Tensor:
            return self.norm(features * scale)

    x, y = features(30)
    given: dict[str, tuple[Any, Callable[[nn.Module, Any], Any] | None]] = {
        "tensor": (x, None),
        "tuple": ((x, y), None),
        "dict": ({"features": x}, None),
        "call": ({"x": x, "y": y}, lambda model, batch: model(batch["x"], 2.0)),
    }
    batch, call = given[form]
    model = Model()
    found = measure(model, all_norms(model), [batch], call=call)["norm"].actual
    assert_near(found.mean, x.double().numpy().mean(0) * (2 if form == "call" else 1))


def test_a_frozen_norm_is_not_tracked_but_one_in_an_evaluating_model_is() -> None:
    model = mlp().train()
    model[1].eval()
    assert list(all_norms(model)) == ["5"]
    assert list(all_norms(model.eval())) == ["1", "5"]
    untracked = nn.Sequential(
        nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3), nn.InstanceNorm1d(3)
    )
    assert tracking(untracked, ["0", "1", "2", "nowhere"]) == {}


def test_one_value_per_channel_is_refused_with_the_path() -> None:
    model = resnet()
    with pytest.raises(
        TooFewValuesError, match=r"^4\.bn1 \(BatchNorm2d\) gets one value per channel: shape \(1, 8, 1, 1\)"
    ):
        measure(model, all_norms(model), [images(1)[0][..., :2, :2]])


def test_no_batch_is_refused() -> None:
    model = mlp()
    with pytest.raises(DataError, match="no batch"):
        measure(model, all_norms(model), [])


def test_an_unreached_norm_is_missing() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.BatchNorm1d(10), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Spare()
    assert list(measure(model, all_norms(model), [features(5)[0]])) == ["used"]


def test_progress_is_told_after_each_batch() -> None:
    told: list[tuple[str, int, int | None]] = []
    x, _ = features(10)
    model = mlp()
    measure(model, all_norms(model), [x, x, x], progress=lambda *args: told.append(args))
    assert told == [("measuring statistics", n, 3) for n in (1, 2, 3)]
    told.clear()
    measure(model, all_norms(model), iter([x]), progress=lambda *args: told.append(args))
    assert told == [("measuring statistics", 1, None)]


def test_the_loss_is_weighted_by_examples_and_uses_the_source_that_is_asked_for() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(10)
    x, _ = features(50)
    batches = [x[:10], x[10:]]

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return (output - batch).square().mean()

    def by_hand(normalize: Callable[[np.ndarray], np.ndarray]) -> float:
        total = sum(len(b) * ((normalize(b) - b) ** 2).mean() for b in (p.double().numpy() for p in batches))
        return float(total) / 50

    stored = mean_loss(norm, batches, loss, norms={})
    own = mean_loss(norm, batches, loss, norms={"": norm})
    # float32 in the model: 1e-6 of the value
    assert_near(stored, by_hand(lambda b: b / np.sqrt(1 + 1e-5)), 1e-5)
    assert_near(own, by_hand(lambda b: (b - b.mean(0)) / np.sqrt(b.var(0) + 1e-5)), 1e-5)
    assert (norm.running_mean == 0).all()


def no_number(output: Tensor, _: Tensor) -> Tensor:
    return output


def wrong_shapes(output: Tensor, batch: Tensor) -> Tensor:
    return output @ batch


def one_argument(output: Tensor) -> Tensor:
    return output.mean()


def leaving(output: Tensor, _: Tensor) -> Tensor:
    raise SystemExit(0)


@pytest.mark.parametrize("loss", [no_number, wrong_shapes, one_argument, leaving])
def test_a_loss_that_fails_is_said_in_a_sentence(loss: Any) -> None:
    with pytest.raises(DataError, match=r"loss\(output, batch\) (raised|called sys\.exit)"):
        mean_loss(nn.BatchNorm1d(10), [features(5)[0]], loss, norms={})


def test_a_sample_holds_the_values_of_one_channel_normalized_with_both_sources() -> None:
    x, _ = images(40)
    norm = nn.BatchNorm2d(3)
    norm.running_mean.copy_(torch.tensor([3.0, 1.0, -2.0]))
    norm.running_var.copy_(torch.tensor([2.0, 5.0, 0.5]))
    taken = sample(norm, {"": norm}, {"": 1}, x)[""]
    values = x[:, 1].double().flatten().numpy()
    step = -(-len(values) // 2000)
    assert len(taken.before) == len(values[::step]) <= 2000
    assert_near(taken.before, values[::step])
    assert_near(taken.stored, ((values - 1) / np.sqrt(5 + 1e-5))[::step])
    assert_near(taken.batch, ((values - values.mean()) / np.sqrt(values.var() + 1e-5))[::step])
    shapes = taken.shape()
    for skewness, kurtosis in shapes.values():
        assert_near((skewness, kurtosis), shapes["before"], 1e-9)  # normalizing keeps the shape
    kept = values[::step]
    assert_near(shapes["before"][0], ((kept - kept.mean()) ** 3).mean() / kept.std() ** 3, 1e-9)


def test_random_states_are_put_back_after_an_error() -> None:
    model = nn.Identity()
    before = snapshot(model)

    def draw_and_fail() -> None:
        with random_states_kept():
            next(draining(torch.rand(3), 9, None))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert_untouched(before, model)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_scripted_model_is_measured_around() -> None:
    model = torch.jit.script(nn.Sequential(nn.BatchNorm1d(10)))
    with on_batch_statistics(model, {}):
        assert not model.training
    assert model.training


def test_what_has_no_values_is_refused() -> None:
    for model, said in (
        (nn.LazyLinear(3), "weight has no shape yet"),
        (nn.Sequential(nn.LazyBatchNorm1d()), "0.weight has no shape yet"),
        (nn.BatchNorm1d(3, device="meta"), "weight has no values"),
        (nn.Linear, "the model is the class Linear"),
        (3, "the model is a value of type int"),
    ):
        with pytest.raises(ArgumentError, match=said):
            must_have_values(model)
    must_have_values(mlp())
