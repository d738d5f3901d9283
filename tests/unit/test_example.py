"""The embedded example: right data, honest training, and faults that recalibration really cures."""

from __future__ import annotations

import copy
from math import log

import pytest
import torch
from torch import nn

from normalcy import example
from normalcy.errors import ArgumentError, DataError


@pytest.fixture(scope="module")
def trained() -> example.Trained:
    return example.train()


@pytest.fixture(scope="module")
def again() -> tuple[example.Trained, list[tuple[int, int]], bool]:
    """A second training, in surroundings that a caller may have and that must not matter."""
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        torch.rand(3, device="cpu")  # a caller's callback may draw numbers of its own

    torch.random.default_generator.manual_seed(12345)
    expected = torch.random.default_generator.clone_state()
    for _ in range(example.STEPS):
        torch.rand(3, generator=expected)
    with torch.device("meta"), torch.no_grad():
        result = example.train(seed=0, progress=progress)
    return result, calls, torch.equal(torch.get_rng_state(), expected.get_state())


def with_pooled_statistics(model: nn.Module, batches: list[example.Batch]) -> nn.Module:
    """A copy whose norms hold mean and variance of everything that entered them, on batch statistics."""
    model = copy.deepcopy(model).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    entered: dict[nn.Module, list[torch.Tensor]] = {norm: [] for norm in norms}
    for norm in norms:
        norm.train()
        norm.register_forward_pre_hook(lambda module, inputs: entered[module].append(inputs[0].detach()))
    for contexts, _ in batches:
        model(contexts)
    for norm in norms:
        values = torch.cat(entered[norm]).double().numpy()
        norm.running_mean.copy_(torch.from_numpy(values.mean(axis=0)))
        norm.running_var.copy_(torch.from_numpy(values.var(axis=0, ddof=1)))
    return model.eval()


def test_evaluation_is_worse_than_a_bigram_before_recalibration_and_better_after(trained):
    before = example.evaluation_loss(trained.model, trained.held_out)
    after = example.evaluation_loss(with_pooled_statistics(trained.model, trained.batches), trained.held_out)
    assert trained.bigram + 0.03 <= before <= trained.uniform
    assert after <= trained.bigram - 0.03


def test_half_of_the_batches_would_do_for_recalibration(trained):
    whole = with_pooled_statistics(trained.model, trained.batches)
    half = with_pooled_statistics(trained.model, trained.batches[::2])
    losses = [example.evaluation_loss(model, trained.held_out) for model in (whole, half)]
    assert abs(losses[0] - losses[1]) < 0.01  # a third of the margin that is promised


def test_the_same_seed_gives_the_same_bits(trained, again):
    first, second = trained.model.state_dict(), again[0].model.state_dict()
    assert list(first) == list(second)
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert all(torch.equal(a[0], b[0]) for a, b in zip(trained.batches, again[0].batches, strict=True))
    assert trained.bigram == again[0].bigram


def test_the_callers_random_state_is_left_alone(again):
    assert again[2]


def test_another_seed_gives_another_split_and_other_weights(trained, monkeypatch):
    monkeypatch.setattr(example, "STEPS", 2)
    other = example.train(seed=1)
    assert other.seed == 1
    assert other.steps == 2
    assert other.bigram != trained.bigram
    weights = [result.model.get_parameter("hidden.linear1.weight") for result in (trained, other)]
    assert not torch.equal(*weights)


def test_progress_is_called_after_every_step_to_the_end(again):
    assert again[1] == [(done, 300) for done in range(1, 301)]


def test_the_faults_are_there_and_nothing_else_is_wrong_with_the_norms(trained):
    norms = {name: m for name, m in trained.model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    assert list(norms) == ["hidden.norm1", "hidden.norm2"]
    for norm in norms.values():
        assert norm.momentum == 0.001
        assert int(norm.num_batches_tracked) == 300
        assert bool(torch.isfinite(norm.running_mean).all() & (norm.running_var > 0.999**300).all())
    for name in ("hidden.linear1", "hidden.linear2"):
        bias = trained.model.get_submodule(name).bias
        assert bias is not None
        assert float(bias.detach().std()) > 0.01
    (group,) = trained.optimizer.param_groups
    assert group["weight_decay"] > 0
    assert {id(p) for p in group["params"]} == {id(p) for p in trained.model.parameters()}


def test_most_of_the_running_mean_is_still_its_initial_zero(trained):
    entered = []
    model = copy.deepcopy(trained.model)
    model.hidden.norm1.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0].detach()))
    with torch.no_grad():
        for contexts, _ in trained.batches:
            model(contexts)
    actual, stored = torch.cat(entered).double().mean(0), trained.model.hidden.norm1.running_mean.double()
    share = float((stored @ actual) / (actual @ actual))  # least squares of stored = share · actual
    # 1 - 0.999^300 = 0.26 of an input that stood still; this one moved towards where it ended.
    assert 0.05 < share < 0.30


def test_what_comes_with_the_model_fits_it(trained):
    assert not trained.model.training
    assert not any(module.training for module in trained.model.modules())
    assert len(trained.batches) == 50
    for contexts, following in (*trained.batches, trained.held_out):
        assert contexts.dtype == following.dtype == torch.int64
        assert contexts.shape == (len(following), 3)
    assert all(len(following) == 128 for _, following in trained.batches)
    assert len(trained.held_out[1]) == len(example.Split.of(example.load_names()).test[1])
    assert trained.uniform == pytest.approx(log(27), rel=1e-15)


def test_the_kept_batches_are_windows_of_training_names_only(trained):
    train = example.Split.of(example.load_names()).train
    known = {(*c, f) for c, f in zip(train[0].tolist(), train[1].tolist(), strict=True)}
    drawn = {(*c, f) for xs, ys in trained.batches for c, f in zip(xs.tolist(), ys.tolist(), strict=True)}
    assert len(drawn) > 1000
    assert drawn <= known


def test_names_are_lower_case_sorted_and_distinct():
    names = example.load_names()
    assert len(names) == 5163
    assert list(names) == sorted(set(names))
    assert all(name.isascii() and name.isalpha() and name.islower() for name in names)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_the_split_is_by_name_disjoint_and_complete(seed):
    names = example.load_names()
    parts = example.split_names(names, seed)
    assert [len(part) for part in parts] == [4130, 516, 517]
    assert sorted(name for part in parts for name in part) == list(names)
    assert parts[0] != list(names[:4130])


def test_the_split_follows_from_the_seed():
    names = example.load_names()
    assert example.split_names(names, 3) == example.split_names(names, 3)
    assert example.split_names(names, 3) != example.split_names(names, 4)


def test_split_holds_the_windows_of_the_split_names():
    names = example.load_names()
    split = example.Split.of(names, 5)
    for held, part in zip(
        (split.train, split.validation, split.test), example.split_names(names, 5), strict=True
    ):
        contexts, following = example.windows(part)
        assert torch.equal(held[0], contexts)
        assert torch.equal(held[1], following)


def test_windows_of_ann_by_hand():
    contexts, following = example.windows(["ann"])
    spelled = ["".join(example.ALPHABET[i] for i in row) for row in contexts.tolist()]
    assert spelled == ["...", "..a", ".an", "ann"]
    assert "".join(example.ALPHABET[i] for i in following.tolist()) == "ann."
    assert contexts.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 14], [1, 14, 14]]


def test_windows_of_one_name_do_not_see_the_name_before_it():
    contexts, following = example.windows(["zoe", "al"])
    assert contexts.tolist()[4:] == [[0, 0, 0], [0, 0, 1], [0, 1, 12]]
    assert following.tolist()[4:] == [1, 12, 0]


def test_no_names_give_no_windows():
    contexts, following = example.windows([])
    assert contexts.shape == (0, 3)
    assert following.shape == (0,)
    assert contexts.dtype == following.dtype == torch.int64


def test_bigram_by_hand():
    # Trained on "ab" and "aa": .→a twice; a→b, a→a, a→. once each; b→. once. Held out "ab" takes
    # .→a (2+1)/(2+27), a→b (1+1)/(3+27), b→. (1+1)/(1+27); "ba" takes .→b 1/29, b→a 1/28, a→. 2/30.
    train = example.windows(["ab", "aa"])
    one = -(log(3 / 29) + log(2 / 30) + log(2 / 28)) / 3
    other = -(log(1 / 29) + log(1 / 28) + log(2 / 30)) / 3
    assert example.bigram_loss(train, example.windows(["ab"])) == pytest.approx(one, rel=1e-14)
    assert example.bigram_loss(train, example.windows(["ab", "ba"])) == pytest.approx(
        (one + other) / 2, rel=1e-14
    )


def test_bigram_smoothing_adds_the_same_count_to_every_pair():
    train, held_out = example.windows(["ab", "aa"]), example.windows(["b"])
    expected = -(log(0.5 / (2 + 13.5)) + log(1.5 / (1 + 13.5))) / 2
    assert example.bigram_loss(train, held_out, smoothing=0.5) == pytest.approx(expected, rel=1e-14)


def test_loss_is_cross_entropy_in_nats_per_character():
    contexts, following = example.windows(["ann", "bob"])
    logits = 3 + 2 * torch.randn(8, 27, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    each = [float(row.exp().sum().log() - row[i]) for row, i in zip(logits, following.tolist(), strict=True)]
    assert float(example.loss(logits, (contexts, following))) == pytest.approx(sum(each) / 8, rel=1e-12)


def test_evaluation_loss_uses_stored_statistics_and_puts_modes_back():
    torch.manual_seed(7)
    model = example.CharacterMLP(embedding=4, hidden=(8, 6, 5)).train()
    model.hidden.norm2.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    batch = example.windows(["carol", "dave"])
    value = example.evaluation_loss(model, batch)
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert value == float(example.loss(copy.deepcopy(model).eval()(batch[0]).detach(), batch))
    with pytest.raises(IndexError):
        example.evaluation_loss(model, (batch[0] + 100, batch[1]))
    assert modes == {name: module.training for name, module in model.named_modules()}


def test_the_network_normalizes_before_tanh_and_ends_in_logits():
    model = example.CharacterMLP(embedding=4, hidden=(8, 6, 5))
    assert [type(layer).__name__ for layer in model.hidden] == ["Linear", "BatchNorm1d", "Tanh"] * 3
    assert model(torch.tensor([[0, 0, 1], [26, 1, 14]])).shape == (2, 27)


@pytest.mark.parametrize("name", ["Ann", "o'neil", "", "zoë", "a.b"])
def test_a_name_outside_the_alphabet_is_refused_by_name(name):
    with pytest.raises(DataError, match="letters a to z only") as caught:
        example.windows(["ann", name])
    assert repr(name) in str(caught.value)


def test_too_few_names_to_hold_one_out_are_refused():
    with pytest.raises(DataError, match="9 names were given"):
        example.split_names(["ann"] * 9)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_no_generator_takes_is_refused(seed):
    with pytest.raises(ArgumentError, match=f"seed={seed}"):
        example.train(seed)


@pytest.mark.parametrize("smoothing", [0.0, -1.0, float("nan"), float("inf")])
def test_smoothing_must_be_positive_and_finite(smoothing):
    names = example.windows(["ann"])
    with pytest.raises(ArgumentError, match="a positive finite number"):
        example.bigram_loss(names, names, smoothing)
