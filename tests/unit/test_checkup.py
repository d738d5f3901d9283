"""The main job on the embedded example and on others: what is found is cured, and what is cured is silent."""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from unit.models import features, healthy, images, mlp, resnet

from normalcy import example
from normalcy.case import Case
from normalcy.checkup import STATISTICS, Checkup, embedded, run


@pytest.fixture(scope="session")
def trained() -> tuple[Case, dict[str, Any]]:
    return embedded()


def duplicate(trained: tuple[Case, dict[str, Any]], **changes: Any) -> Any:
    """The case with a copy of its model and an optimizer for that copy; `run` takes the rest by keyword."""
    case, rest = trained
    model, optimizer = copy.deepcopy((case.model, case.optimizer))
    given = {"model": model, "data": case.data, "loss": case.loss, "optimizer": optimizer} | changes
    return Case(**given), rest


def checked(
    trained: tuple[Case, dict[str, Any]], *, fix: bool, folding: bool = True, **changes: Any
) -> Checkup:
    case, rest = duplicate(trained, **changes)
    return run(case, **rest, fix=fix, folding=folding)


@pytest.fixture(scope="session")
def repaired(trained: tuple[Case, dict[str, Any]]) -> Checkup:
    return checked(trained, fix=True)


def test_the_example_is_worse_than_a_bigram_table_before_and_better_after(
    trained: tuple[Case, dict[str, Any]], repaired: Checkup
) -> None:
    bigram = repaired.baselines["bigram"]
    held_out = trained[1]["judge_on"]
    before = example.evaluation_loss(trained[0].model, held_out)
    after = example.evaluation_loss(repaired.case.model, held_out)
    assert before > bigram + 0.03
    assert after < bigram - 0.03
    assert math.isclose(repaired.before.loss.eval, before, rel_tol=1e-6)
    assert math.isclose(repaired.after.loss.eval, after, rel_tol=1e-6)
    assert repaired.baselines["uniform"] == math.log(27)


def test_the_findings_are_the_faults_that_are_there_and_the_cured_are_silent(repaired: Checkup) -> None:
    def told(found: Any) -> list[tuple[str, str]]:
        return [(f.code, f.where) for f in found.findings]

    decay = ("decayed-norm", "optimizer group 0")
    assert sorted(told(repaired.before)) == sorted([
        ("unwarmed-statistics", "hidden.norm1"), ("unwarmed-statistics", "hidden.norm2"),
        ("dead-bias", "hidden.linear1"), ("dead-bias", "hidden.linear2"), decay,
    ])  # fmt: skip
    assert told(repaired.after) == [decay]
    for finding in repaired.before.having("unwarmed-statistics"):
        assert finding.evidence["updates"] == 300
        assert math.isclose(finding.evidence["weight_left"], 0.999**300, rel_tol=1e-9)
    assert all(site.gap.rms < 1e-3 for site in repaired.after.sites)
    assert repaired.worst() == "warning"


def test_the_repair_is_recalibration_and_never_both(repaired: Checkup) -> None:
    done = [(what, item.where) for what, item in repaired.repair.done]
    assert done == [
        ("recalibrate", "hidden.norm1"), ("recalibrate", "hidden.norm2"),
        ("strip_dead_bias", "hidden.linear1"), ("strip_dead_bias", "hidden.linear2"),
    ]  # fmt: skip
    assert repaired.repair.refused == ()
    model, optimizer = repaired.case.model, repaired.case.optimizer
    assert model.hidden.linear1.bias is model.hidden.linear2.bias is None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} <= held


def test_training_goes_on_after_the_repair(trained: tuple[Case, dict[str, Any]]) -> None:
    case = checked(trained, fix=True, folding=False).case
    case.model.train()
    losses = []
    for batch in case.data[:20]:
        case.optimizer.zero_grad()
        loss = case.loss(case.model(batch[0]), batch)
        loss.backward()
        case.optimizer.step()
        losses.append(float(loss.detach()))
    assert math.isfinite(sum(losses))
    assert sum(losses[-5:]) < 5 * math.log(27)


def test_the_folded_model_is_proved_equal(repaired: Checkup) -> None:
    report = repaired.folded
    assert [item.where for item in report.done] == ["hidden.norm1", "hidden.norm2"]
    assert 0 < report.error <= report.bound
    assert report.model_error <= report.model_bound
    assert repaired.proved is True
    model, folded = repaired.case.model.double(), copy.deepcopy(report.model).double()
    contexts = torch.randint(27, (200, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (model(contexts) - folded(contexts)).abs().max() / model(contexts).abs().max()
    model.float()
    # W′ and b′ were rounded to float32 once: 2⁻²⁴ each, through three layers of 30 to 200 terms
    assert float(difference) < 200 * 2.0**-24


def test_without_fix_nothing_changes(trained: tuple[Case, dict[str, Any]]) -> None:
    state = copy.deepcopy(trained[0].model.state_dict())
    result = checked(trained, fix=False)
    assert result.repair is result.after is None
    assert result.worst() == "error"
    assert result.proved is True
    assert all(torch.equal(v, state[name]) for name, v in result.case.model.state_dict().items())
    assert not any(m.training for m in result.case.model.modules())


def test_without_data_statistics_are_debiased_instead(trained: tuple[Case, dict[str, Any]]) -> None:
    case, rest = duplicate(trained, data=None)
    result = run(case, target=rest["target"], fix=True)
    assert [(what, item.where) for what, item in result.repair.done] == [
        ("debias", "hidden.norm1"), ("debias", "hidden.norm2"),
    ]  # fmt: skip
    assert not result.after.having(*STATISTICS)
    assert result.folded is None
    assert result.proved is None
    assert "no data were given" in result.notes[0]
    after = example.evaluation_loss(case.model, rest["judge_on"])
    assert after < example.evaluation_loss(trained[0].model, rest["judge_on"]) - 0.03


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list | tuple):
        return [n for item in value for n in numbers(item)]
    return [value]


def test_everything_can_be_written_as_json(repaired: Checkup) -> None:
    written = json.loads(json.dumps(repaired.as_dict(), allow_nan=False))
    assert written["model"]["class"] == "CharacterMLP"
    assert written["model"]["norms"] == 2
    assert written["fold"]["proved"] is True
    assert written["fold"]["ratio"] == written["fold"]["error"] / written["fold"]["bound"]
    assert written["before"]["loss"]["eval"] == repaired.before.loss.eval
    site = written["before"]["sites"][0]
    assert site["gap"]["rms"] == repaired.before.sites[0].gap.rms
    assert (
        len(site["sample"]["before"]) == len(site["sample"]["stored"]) == len(site["sample"]["batch"]) <= 2000
    )
    curve = site["warmup"]
    assert curve[0] == {"updates": 0, "weight_left": 1.0}
    assert curve[-1]["weight_left"] < 0.01
    assert all(math.isclose(p["weight_left"], 0.999 ** p["updates"], rel_tol=1e-9) for p in curve)
    assert {type(n) for n in numbers(written)} <= {int, float, str, bool, type(None)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_become_words(value: float) -> None:
    model = mlp().eval()
    model[1].running_var.fill_(value)
    result = run(Case(model, features(30)[0]), target="spoilt")
    gap = json.loads(json.dumps(result.as_dict(), allow_nan=False))["before"]["sites"][0]["gap"]
    assert isinstance(gap["rms"], str) == math.isinf(result.before["1"].gap.rms)
    assert math.isinf(result.before["1"].gap.rms) == math.isnan(value)  # a variance of ∞ makes all outputs β


def test_spoilt_statistics_are_cured() -> None:
    model = healthy("resnet")
    model[1].running_mean[0] = math.nan
    model[4].bn1.running_var[2] = -1.0
    model[4].bn2.reset_running_stats()
    result = run(Case(model, iter(images(200)[0].split(50))), target="spoilt", fix=True)
    assert {f.code for f in result.before.findings} >= {
        "non-finite-statistics", "negative-variance", "initial-statistics",
    }  # fmt: skip
    assert result.after.findings == ()
    assert result.proved is True


def test_what_fails_in_the_repair_is_refused_and_the_job_goes_on() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)).train()
    result = run(Case(model, features(1)[0]), target="one example", fix=True)
    assert result.repair.done == ()
    assert [what for what, _ in result.repair.refused] == ["recalibrate", "strip_dead_bias"]
    assert all(item.why.endswith(".") for _, item in result.repair.refused)
    assert result.after.having("initial-statistics", "too-few-values")
    assert model.training


def test_a_generator_as_loader_serves_every_pass() -> None:
    def stream() -> Any:
        yield from images(60)[0].split(20)

    result = run(Case(resnet().train(), loader=stream()), target="a stream", fix=True)
    assert not result.after.having(*STATISTICS)
    assert result.proved is True
    assert all(m.training for m in result.case.model.modules())


def test_a_model_that_cannot_be_folded_says_why() -> None:
    class Unlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(x))

    result = run(Case(Unlike(), features(40)[0]), target="no layer before", fix=True)
    assert result.folded.done == []
    assert len(result.folded.refused) == 1
    assert result.proved is None
    assert result.as_dict()["fold"]["proved"] is None


def test_progress_names_what_is_done() -> None:
    told: list[str] = []
    run(
        Case(mlp(), iter(features(40)[0].split(20))),
        target="x",
        fix=True,
        progress=lambda what, *_: told.append(what),
    )
    assert set(told) == {"measuring statistics"}
    assert len(told) == 6  # before, the repair, after


CALLS = itertools.count()


class Drifting(nn.Module):
    """Answers differently each time: nothing can be proved about it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y + next(CALLS)


class Probing(nn.Module):
    """Looks whether its norm is still there, which no recording sees: folding changes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y if isinstance(self.net[1], nn.BatchNorm1d) else y + 1


@pytest.mark.parametrize("build", [Drifting, Probing])
def test_a_failed_proof_is_told_and_changes_nothing(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    model.train()
    model(torch.randn(64, 8) * 2 + 3)
    result = run(Case(model.eval(), torch.randn(16, 8) + 3), target="x")
    made = result.as_dict()
    assert result.proved is False
    if build is Drifting:
        assert "Nothing was folded" in made["notes"][0]
    else:
        assert made["fold"]["proved"] is False
        assert made["fold"]["done"] == []
        assert [item["where"] for item in made["fold"]["refused"]] == ["net.1"]


def test_the_number_of_parameters_is_that_of_the_model_examined(repaired: Checkup) -> None:
    stripped = sum(p.numel() for p in repaired.case.model.parameters())
    assert repaired.as_dict()["model"]["parameters"] == stripped + 400


def test_a_norm_left_in_training_is_set_to_evaluation_and_the_finding_is_gone() -> None:
    model = healthy("resnet")
    model[4].bn1.train()
    result = run(Case(model, images(200)[0]), target="one norm trains", fix=True)
    assert [f.code for f in result.before.findings] == ["wrong-mode"]
    assert result.after.findings == ()
    assert [(what, item.where) for what, item in result.repair.done] == [("set_mode", "4.bn1")]
    assert not any(module.training for module in model.modules())


def test_a_norm_that_may_be_frozen_on_purpose_is_refused_with_the_reason() -> None:
    model = healthy("resnet").train()
    model[4].bn1.eval()
    result = run(Case(model, images(200)[0]), target="one norm is frozen", fix=True)
    assert result.repair.done == ()
    ((what, item),) = result.repair.refused
    assert (what, item.where) == ("set_mode", "4.bn1")
    assert "frozen on purpose" in item.why
    assert not model[4].bn1.training
    assert model.training


def test_weights_that_are_not_finite_are_not_recalibrated_over() -> None:
    model = healthy("mlp")
    with torch.no_grad():
        model[0].weight[0] = math.nan
    held = copy.deepcopy(model.state_dict())
    result = run(Case(model, features(60)[0]), target="NaN", fix=True)
    assert [f.code for f in result.after.findings] == ["non-finite-parameters"]
    assert result.repair.done == ()
    assert all(value.equal(held[name]) for name, value in model.state_dict().items() if name != "0.weight")


def test_spoilt_statistics_of_a_norm_that_is_never_called_start_no_repair() -> None:
    model = healthy("mlp")
    model.never = nn.BatchNorm1d(3).eval()
    model.forward = lambda x: nn.Sequential.forward(nn.Sequential(*list(model)[:-1]), x)
    result = run(Case(model, features(60)[0]), target="never called", fix=True)
    assert [(f.code, f.severity) for f in result.after.findings] == [("never-called", "note")]
    assert (result.repair.done, result.repair.refused) == ((), ())


def test_a_batch_that_was_left_out_is_told_before_and_after_the_repair() -> None:
    result = run(Case(mlp().eval(), iter(features(49)[0].split(24))), target="25th", fix=True)
    for found in (result.before, result.after):
        (finding,) = found.having("too-few-values")
        assert (finding.where, finding.evidence["of"]) == ("batch 3", 3)
    assert not result.after.having(*STATISTICS)
    assert any(note.startswith("recalibrate: left out of 3 batches: number 3") for note in result.notes)
