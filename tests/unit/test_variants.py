"""Variants of the embedded example: fair to each other, really trained, and claims that follow."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn

from normalcy import example, pages, variants
from normalcy.errors import ArgumentError
from normalcy.variants import Variant, compare, training, verdict

STEPS, RATES = 40, (3e-3, 1e-2)


@pytest.fixture(scope="module")
def parts() -> example.Split:
    return example.Split.of(example.load_names())


@pytest.fixture(scope="module")
def compared() -> variants.Comparison:
    return compare([Variant("batch"), Variant("layer", "after")], batch=8, steps=STEPS, rates=RATES)


@pytest.mark.parametrize("place", example.PLACES)
@pytest.mark.parametrize("norm", example.NORMS)
def test_every_variant_begins_with_the_same_weights(norm, place):
    plain, other = Variant().build(5), Variant(norm, place).build(5)
    for name in ("embedding.weight", "hidden.linear1.weight", "hidden.linear2.weight", "output.weight"):
        assert torch.equal(plain.get_parameter(name), other.get_parameter(name)), name
    assert not torch.equal(plain.output.weight, Variant().build(6).output.weight)


@pytest.mark.parametrize("place", example.PLACES)
@pytest.mark.parametrize(
    ("norm", "cls"),
    [("none", None), ("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm), ("group", nn.GroupNorm),
     ("rms", nn.RMSNorm)],
)  # fmt: skip
def test_the_norm_stands_where_it_is_said_to(norm, cls, place):
    kinds = [type(layer) for layer in Variant(norm, place).build(0).hidden]
    found = [i for i, kind in enumerate(kinds) if cls is not None and issubclass(kind, cls)]
    assert len(found) == (0 if cls is None else 2)
    for i in found:
        assert kinds[i - 1] is (nn.Linear if place == "before" else nn.Tanh)
    assert sum(kind is nn.Tanh for kind in kinds) == 2


def test_batch_norm_has_no_bias_before_it_and_the_momentum_of_pytorch():
    before, after = Variant("batch").build(0), Variant("batch", "after").build(0)
    assert before.hidden.linear1.bias is None
    assert after.hidden.linear1.bias is not None
    assert Variant("layer").build(0).hidden.linear1.bias is not None  # layer norm does not erase it
    assert before.hidden.norm1.momentum == nn.BatchNorm1d(3).momentum


def test_every_variant_is_given_the_same_batches(parts):
    batches = [list(training.drawn(parts.train, 8, 5, 3)) for _ in range(2)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(*batches, strict=True))
    other = next(training.drawn(parts.train, 8, 5, 4))
    assert not torch.equal(batches[0][0][0], other[0])


@pytest.mark.parametrize("norm", example.NORMS)
def test_every_variant_learns_and_leaves_the_random_state_alone(norm, parts):
    state = torch.get_rng_state()
    model = training.train(Variant(norm), parts.train, rate=1e-2, batch=64, steps=60, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert example.evaluation_loss(model, parts.test) < math.log(27) - 0.4


def test_the_same_seed_trains_the_same_bits(parts):
    made = [
        training.train(Variant("rms"), parts.train, rate=1e-2, batch=8, steps=5, seed=2) for _ in range(2)
    ]
    states = [model.state_dict() for model in made]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_weight_decay_reaches_matrices_only(parts, monkeypatch):
    monkeypatch.setattr(training, "WEIGHT_DECAY", 1.0)
    decayed = training.train(Variant("layer"), parts.train, rate=1e-2, batch=8, steps=1, seed=0)
    monkeypatch.setattr(training, "WEIGHT_DECAY", 0.0)
    plain = training.train(Variant("layer"), parts.train, rate=1e-2, batch=8, steps=1, seed=0)
    moved = {n for n, p in decayed.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
    assert moved == {n for n, p in plain.named_parameters() if p.dim() > 1}


def test_none_comes_first_and_each_once(compared):
    assert [result.variant.name for result in compared.results] == ["none", "batch before", "layer after"]
    again = compare([Variant("none", "after"), Variant("rms"), Variant("rms")], steps=1, rates=(1e-3,))
    assert [result.variant.name for result in again.results] == ["none", "rms before"]


def test_the_losses_are_those_of_models_trained_so(compared, parts):
    for result in compared.results:
        models = [
            training.train(result.variant, parts.train, rate=result.rate, batch=8, steps=STEPS, seed=seed)
            for seed in compared.seeds
        ]
        assert list(result.losses) == [example.evaluation_loss(model, parts.test) for model in models]
        chosen = fmean(example.evaluation_loss(model, parts.validation) for model in models)
        assert result.validation[result.rate] == chosen == min(result.validation.values())
        assert set(result.validation) == set(RATES)
        assert result.parameters == sum(p.numel() for p in models[0].parameters())


def test_the_held_out_names_choose_nothing(parts, monkeypatch):
    seen: list[int] = []
    real = example.evaluation_loss

    def spy(model: nn.Module, batch: example.Batch) -> float:
        seen.append(len(batch[1]))
        return real(model, batch)

    monkeypatch.setattr(example, "evaluation_loss", spy)
    compare([], steps=1, rates=(1e-3, 1e-2))
    assert seen == [len(parts.validation[1])] * 6 + [len(parts.test[1])] * 3


def test_what_is_claimed_follows_from_the_losses(compared):
    none = compared.results[0]
    assert none.against is None
    for result in compared.results[1:]:
        assert result.against == verdict(result.losses, none.losses)
        each = [a - b for a, b in zip(result.losses, none.losses, strict=True)]
        assert result.against.differences == pytest.approx(each)
        assert result.against.difference == pytest.approx(fmean(each))
        assert result.against.spread == max(result.spread, none.spread)


@pytest.mark.parametrize(
    ("losses", "none", "claim", "words"),
    [
        ([2.20, 2.21, 2.22], [2.30, 2.31, 2.33], "lower", "it helps here"),
        ([2.40, 2.41, 2.42], [2.30, 2.31, 2.33], "higher", "it hurts here"),
        ([2.20, 2.21, 2.29], [2.21, 2.22, 2.28], "within", "within the spread between seeds (0.0900)"),
        ([2.20, 2.21, 2.22], [2.21, 2.22, 2.24], "within", "on every seed, but within the spread between"),
        ([2.20, 2.21, 2.22], [2.20, 2.21, 2.22], "within", "no difference can be claimed"),
        ([math.nan, 2.0, 2.0], [2.0, 2.1, 2.2], "within", "diverged"),
    ],
)
def test_a_difference_is_claimed_only_beyond_the_spread(losses, none, claim, words):
    found = verdict(losses, none)
    assert found.claim == claim
    assert words in found.sentence("batch before")


def test_equal_variants_are_told_apart_by_chance_in_five_of_a_hundred():
    draws = np.random.default_rng(1).normal(2.2, 0.02, (4000, 6)).tolist()
    wrong = sum(verdict(row[:3], row[3:]).claim != "within" for row in draws) / len(draws)
    assert 0.035 < wrong < 0.06  # 0.0474 in 20,000; the standard error of 4000 is 0.0034


def test_batch_norm_alone_has_neighbours_and_two_sources(compared):
    none, batch, layer = compared.results
    assert none.on_batches is None
    assert layer.on_batches is None
    found = batch.on_batches
    assert found is not None
    assert found.stored == pytest.approx(batch.mean)
    assert found.batch != found.stored != found.pooled
    assert set(found.neighbours) == {"hidden.norm1", "hidden.norm2"}
    for one in found.neighbours.values():
        assert one.batch == 8
        assert one.at(2).total > one.here.total > one.at(32).total > one.at(128).total > 0
    assert found.noise == max(one.here.total for one in found.neighbours.values())


def test_batches_of_two_are_found_and_the_remedy_is_named():
    found = compare([Variant("batch"), Variant("layer")], batch=2, steps=5, rates=(3e-3,))
    (finding,) = found.findings
    assert (finding.code, finding.severity, finding.where) == ("too-few-values", "warning", "batch before")
    assert finding.evidence["values for each statistic"] == 2
    assert finding.evidence["noise of x̂ at batch 2"] > 5 * finding.evidence["noise of x̂ at batch 128"]
    assert "−1 or 1" in finding.cause
    assert "layer, group or RMS norm" in finding.remedy
    assert found.worst() == "warning"


def test_large_batches_are_no_finding():
    found = compare([Variant("batch")], batch=64, steps=2, rates=(3e-3,))
    assert found.findings == ()
    assert found.worst() is None


def test_windows_of_one_name_are_not_made_neighbours(parts):
    # in the list's order a batch would hold one name's windows: the batches' own statistics would differ
    model = training.train(Variant("batch"), parts.train, rate=3e-3, batch=8, steps=20, seed=0)
    shuffled = [training.loss_on_batches(model, parts.test, 8, seed) for seed in (0, 1, 2)]
    norms = training.norms_of(model)
    contexts, following = parts.test
    pieces = list(zip(contexts.split(8)[:-1], following.split(8)[:-1], strict=True))
    ordered = training.mean_loss(model, pieces, example.loss, norms=norms)
    assert abs(ordered - fmean(shuffled)) > 3 * (max(shuffled) - min(shuffled))


@pytest.mark.parametrize("batch", [0, -3, 4096])
def test_a_batch_that_cannot_be_filled_is_refused(batch):
    with pytest.raises(ArgumentError, match=r"1 to 2048 examples"):
        compare([Variant("layer")], batch=batch)


def test_batch_norm_in_batches_of_one_is_refused_before_anything_is_trained():
    with pytest.raises(ArgumentError, match="layer, group or rms norm"):
        compare([Variant("layer"), Variant("batch")], batch=1, progress=lambda *_: pytest.fail("trained"))
    assert compare([Variant("layer")], batch=1, steps=1, rates=(1e-3,)).batch == 1


@pytest.mark.parametrize(("norm", "place"), [("instance", "before"), ("batch", "between")])
def test_a_norm_or_place_that_there_is_not_is_refused(norm, place):
    with pytest.raises(ArgumentError, match="one of"):
        Variant(norm, place)
    with pytest.raises(ArgumentError, match="one of"):
        example.CharacterMLP(norm=norm, place=place)
    with pytest.raises(ArgumentError, match="a multiple of its 8 groups"):
        example.CharacterMLP(hidden=(12,), norm="group")


def test_progress_reaches_the_end_of_each_variant():
    calls: list[tuple[str, int, int | None]] = []
    compare([Variant("rms")], steps=2, rates=(1e-3,), progress=lambda *call: calls.append(call))
    assert calls == [(f"training {name}", k, 6) for name in ("none", "rms before") for k in range(1, 7)]


def test_the_page_shows_the_numbers_of_the_json(compared):
    from unit.test_pages import Reader, assert_numbers_are_the_checkups

    made = compared.as_dict()
    page = pages.render_variants(made)
    shown = assert_numbers_are_the_checkups(page, made)
    assert {"variants.1.losses.2", "variants.1.batch_norm.gap", "variants.2.against_none.difference"} <= shown
    assert {f"variants.0.validation.{i}.loss" for i in range(len(RATES))} <= shown
    assert "variants.1.batch_norm.neighbours" in " ".join(shown)
    words = Reader(page).words
    for variant in made["variants"][1:]:
        assert variant["against_none"]["sentence"] in words
    addresses = {given[name] for _, given in Reader(page).tags for name in ("src", "href") if given.get(name)}
    assert addresses == {"data:,"}  # nothing is fetched
