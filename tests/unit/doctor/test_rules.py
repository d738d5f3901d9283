"""Each fault, put into several kinds of models, is found by its numbers; the healthy twin is silent."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from unit.models import (
    BATCH_NORMED,
    Transformer,
    data_for,
    features,
    grouped,
    healthy,
    images,
    inputs_of,
    mlp,
    norms_of,
    trained,
)

import normalcy.nn as ours
from normalcy.conventions import TORCH
from normalcy.doctor import RULES, Examination, Finding, examine

STATISTICS = (
    "initial-statistics",
    "unwarmed-statistics",
    "stale-statistics",
    "non-finite-statistics",
    "negative-variance",
)

once = cache(healthy)


def model_of(name: str) -> nn.Module:
    """A properly trained model of its own for each test, in evaluation mode."""
    return copy.deepcopy(once(name))


def batches_of(name: str, n: int = 600) -> list[Tensor]:
    return list(data_for(name, n)[0].split(64))


def look(model: nn.Module, name: str, **kwargs: Any) -> Examination:
    return examine(model, iter(batches_of(name)), **kwargs)


def only(found: Examination, code: str, where: str) -> Finding:
    """The one finding about statistics, which has to have this code and place."""
    assert [(f.code, f.where) for f in found.having(*STATISTICS)] == [(code, where)]
    return found.having(code)[0]


def distance(model: nn.Module, where: str, batches: list[Tensor]) -> np.ndarray:
    """Per channel, the root mean square of what either source makes of the same values; the long way."""
    norm = norms_of(model)[where]
    values = torch.cat(inputs_of(model, batches)[where]).numpy()
    mean, var = norm.running_mean.double().numpy(), norm.running_var.double().numpy()
    stored = (values - mean) / np.sqrt(var + norm.eps)
    own = (values - values.mean(0)) / np.sqrt(values.var(0) + norm.eps)
    return np.sqrt(((stored - own) ** 2).mean(0))


def assert_gap(finding: Finding, model: nn.Module, batches: list[Tensor]) -> None:
    right = distance(model, finding.where, batches)
    # both in float64 from the same float32 activations
    assert math.isclose(finding.evidence["gap_rms"], math.sqrt((right**2).mean()), rel_tol=1e-6)
    assert math.isclose(finding.evidence["gap_worst"], right.max(), rel_tol=1e-6)
    assert finding.evidence["channel"] == right.argmax()
    values = inputs_of(model, batches)[finding.where]
    assert finding.evidence["values_measured"] == sum(len(part) for part in values)


# healthy models


@pytest.mark.parametrize("name", BATCH_NORMED)
@pytest.mark.parametrize("batch", [600, 128, 64, 32])
def test_a_properly_trained_model_has_no_finding(name: str, batch: int) -> None:
    found = examine(model_of(name), data_for(name, 600)[0][:batch])
    assert found.findings == ()
    assert len(found.sites) == len(norms_of(model_of(name)))
    assert all(site.gap is not None and site.gap.rms < 0.5 for site in found.sites)


@pytest.mark.parametrize("size", [8, 16])
def test_few_images_raise_no_alarm_about_statistics(size: int) -> None:
    x, _ = images(600)
    for start in range(0, 200, size * 5):
        assert not examine(model_of("resnet"), x[start : start + size]).having(*STATISTICS)


def test_fresh_data_of_the_same_kind_raise_no_alarm() -> None:
    for name in BATCH_NORMED:
        assert not examine(model_of(name), data_for(name, 300, seed=9)[0]).having(*STATISTICS)


@pytest.mark.parametrize("momentum", [None, 1.0, 0.05])
def test_other_momenta_of_healthy_models_raise_no_alarm(momentum: float | None) -> None:
    x, y = features(600)
    torch.manual_seed(0)
    model = trained(mlp(momentum=momentum), x, y, steps=300, batch=64, lr=0.005)
    assert not examine(model, x).having(*STATISTICS[:2], *STATISTICS[3:])
    if momentum != 1.0:  # with 1 the last batch alone is stored
        assert not examine(model, x[:64]).having(*STATISTICS)
    assert not examine(model).having(*STATISTICS)


@pytest.mark.parametrize(
    "model", [Transformer(), Transformer(nn.RMSNorm), Transformer(ours.LayerNorm), Transformer(ours.RMSNorm)]
)
def test_norms_without_running_statistics_have_nothing_stale(model: nn.Module) -> None:
    for mode in (True, False):
        found = examine(model.train(mode), features(40)[0])
        assert found.findings == ()
        assert len(found.sites) == 5
        assert all(site.gap is None and site.updates is None for site in found.sites)


def test_group_and_instance_norm_are_listed_and_healthy() -> None:
    found = examine(grouped(), images(8)[0])
    assert [(s.kind, s.values) for s in found.sites] == [("group", 4 * 36), ("instance", 36)]
    assert found.findings == ()


# statistics


@pytest.mark.parametrize("name", BATCH_NORMED)
def test_initial_statistics_in_one_layer_are_found_there(name: str) -> None:
    model = model_of(name)
    where = list(norms_of(model))[-1]
    norms_of(model)[where].reset_running_stats()
    finding = only(look(model, name), "initial-statistics", where)
    assert finding.severity == "error"
    assert finding.evidence["updates"] == 0
    assert_gap(finding, model, batches_of(name))
    assert examine(model).having("initial-statistics")[0].where == where


def test_a_counter_that_ran_without_moving_anything_is_told_apart() -> None:
    model = model_of("mlp")
    model[1].running_mean.zero_()
    model[1].running_var.fill_(1)
    finding = only(look(model, "mlp"), "initial-statistics", "1")
    assert finding.evidence["updates"] == 200
    assert "200 updates" in finding.cause


def test_a_tracked_instance_norm_at_its_initial_values_is_not_sent_to_recalibration() -> None:
    norm = nn.InstanceNorm2d(3, track_running_stats=True)
    (finding,) = examine(norm.eval(), images(4)[0]).findings
    assert (finding.code, finding.severity) == ("initial-statistics", "error")
    assert "recalibrate" not in finding.remedy
    norm.train()(images(4)[0])  # PyTorch's does not count this
    assert norm.num_batches_tracked == 0
    assert examine(norm.eval(), images(4)[0]).findings == ()


def under_trained(momentum: float, updates: int) -> nn.Module:
    """The healthy network, its norms started anew and given a few batches with a small momentum."""
    model = model_of("mlp").train()
    for norm in norms_of(model).values():
        norm.reset_running_stats()
        norm.momentum = momentum
    for batch in (batches_of("mlp") * 40)[:updates]:
        model(batch)
    return model.eval()


@pytest.mark.parametrize(("momentum", "updates"), [(0.001, 300), (0.1, 10), (0.01, 50)])
def test_statistics_that_have_not_warmed_up_are_found(momentum: float, updates: int) -> None:
    model = under_trained(momentum, updates)
    found = look(model, "mlp")
    assert {f.code for f in found.having(*STATISTICS)} == {"unwarmed-statistics"}
    assert found.findings[0].where == "1"
    finding = found.findings[0]
    assert finding.severity == "error"
    assert finding.evidence["updates"] == updates
    assert finding.evidence["momentum"] == momentum
    left = math.prod([1 - momentum] * updates)
    assert math.isclose(finding.evidence["weight_left"], left, rel_tol=1e-9)
    needed = finding.evidence["updates_for_1_percent"]
    assert (1 - momentum) ** needed <= 0.01 < (1 - momentum) ** (needed - 1)
    assert_gap(finding, model, batches_of("mlp"))
    without = examine(model)
    assert {f.where for f in without.having("unwarmed-statistics")} == {"1", "5"}
    assert "gap_rms" not in without.findings[0].evidence


def test_a_warm_average_is_silent_with_and_without_data() -> None:
    model = under_trained(0.1, 100)
    assert not look(model, "mlp").having(*STATISTICS)
    assert not examine(model).having(*STATISTICS)


def test_unwarmed_without_a_gap_is_no_fault() -> None:
    """Whitened data: the initial state happens to be right."""
    x = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d(5, momentum=0.001)
    for batch in x.split(400):
        norm(batch)
    assert norm.num_batches_tracked == 10
    assert not examine(norm.eval(), x).having(*STATISTICS)


def test_debiased_statistics_are_warm_from_the_first_update() -> None:
    x, _ = features(64)
    norm = ours.BatchNorm1d(10, momentum=0.001, convention=replace(TORCH, debias=True))
    norm(x)
    assert not examine(norm, x).having(*STATISTICS)
    assert not examine(norm).having(*STATISTICS)


@pytest.mark.parametrize("momentum", [0.1, 0.0])
def test_a_counter_that_contradicts_the_statistics_is_not_believed(momentum: float) -> None:
    """A checkpoint converted without its counter, or a layer frozen by momentum 0 after loading."""
    model = model_of("mlp")
    for norm in norms_of(model).values():
        norm.num_batches_tracked.fill_(0 if momentum else 1000)
        norm.momentum = momentum
    assert examine(model).findings == ()
    assert look(model, "mlp").findings == ()
    model[1].running_mean.add_(30)
    assert only(look(model, "mlp"), "stale-statistics", "1").severity == "error"


def test_a_variance_below_the_initial_share_shows_that_the_counter_is_wrong() -> None:
    model = model_of("mlp")
    model[5].num_batches_tracked.fill_(5)  # as after fine-tuning a checkpoint that came without its counter
    assert (model[5].running_var < 0.9**5).any()
    assert examine(model).findings == ()


@pytest.mark.parametrize("name", BATCH_NORMED)
@pytest.mark.parametrize("fault", ["mean", "variance"])
def test_stale_statistics_are_found_with_the_gap(name: str, fault: str) -> None:
    model = model_of(name)
    where = list(norms_of(model))[1]
    norm = norms_of(model)[where]
    if fault == "mean":
        norm.running_mean += 2 * norm.running_var.sqrt()
    else:
        norm.running_var *= 16
    found = look(model, name)
    finding = only(found, "stale-statistics", where)
    assert finding.severity == "error"
    assert_gap(finding, model, batches_of(name))
    if fault == "mean":
        # healthy statistics, moved by two stored standard deviations, the data's up to a tenth
        assert 1.5 < finding.evidence["mean_shift"] < 2.6
    else:
        assert 10 < finding.evidence["var_ratio"] < 25


def test_the_loss_stands_beside_a_stale_layer() -> None:
    model = model_of("mlp")
    model[1].running_var *= 100
    x, y = features(600)
    found = examine(model, (x, y), loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    finding = only(found, "stale-statistics", "1")
    with torch.no_grad():
        right = float(F.cross_entropy(model(x), y))
        twin = copy.deepcopy(model)
        twin[1].train(), twin[5].train()
        own = float(F.cross_entropy(twin(x), y))
    assert math.isclose(finding.evidence["loss_eval"], right, rel_tol=1e-6)
    assert math.isclose(finding.evidence["loss_batch"], own, rel_tol=1e-6)
    assert right > own


@pytest.mark.parametrize("name", BATCH_NORMED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_values_that_are_not_finite_are_counted(name: str, value: float, buffer: str) -> None:
    model = model_of(name)
    where = next(iter(norms_of(model)))
    stored = getattr(norms_of(model)[where], buffer)
    stored[2:5] = value
    for found in (look(model, name), examine(model)):
        finding = found.having("non-finite-statistics")[0]
        assert {f.code for f in found.having(*STATISTICS)} <= {"non-finite-statistics", "negative-variance"}
        assert (finding.where, finding.evidence) == (
            where,
            {"channels": 3, "of": len(stored), "first_channel": 2},
        )


def test_negative_variances_are_told_with_what_they_do() -> None:
    model = model_of("resnet")
    norm = model[4].bn1
    norm.running_var[:3] = torch.tensor([-9.9e-6, -0.5, -2e-5])
    finding = only(look(model, "resnet"), "negative-variance", "4.bn1")
    assert finding.evidence["channels"] == 3
    assert finding.evidence["lowest"] == -0.5
    assert finding.evidence["nan_channels"] == int((norm.running_var.double() + 1e-5 <= 0).sum())
    with torch.no_grad():
        output = norm(images(8)[0][:1].mean(1, keepdim=True).expand(-1, 8, -1, -1))
    assert finding.evidence["nan_channels"] == int((~output.isfinite()).any(-1).any(-1).sum())


# wiring and use


@pytest.mark.parametrize("name", BATCH_NORMED)
def test_a_bias_before_a_norm_is_found_and_one_that_counts_is_not(name: str) -> None:
    model = model_of(name)
    first = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    where = next(p for p, m in model.named_modules() if m is first)
    bias = torch.linspace(-0.5, 0.7, first.weight.shape[0])
    first.bias = nn.Parameter(bias)
    norms_of(model)[next(iter(norms_of(model)))].running_mean += bias
    found = look(model, name)
    assert [(f.code, f.where) for f in found.findings] == [("dead-bias", where)]
    evidence = found.findings[0].evidence
    assert evidence["parameters"] == len(bias)
    assert math.isclose(evidence["largest"], 0.7, rel_tol=1e-6)
    assert evidence["erased_by"] == next(iter(norms_of(model)))


@pytest.mark.parametrize(("n", "severity"), [(1, "error"), (2, "warning"), (15, "warning"), (16, None)])
def test_few_values_per_channel_are_counted_not_examples(n: int, severity: str | None) -> None:
    model = model_of("mlp")
    found = examine(model, features(n)[0]).having("too-few-values")
    assert [f.severity for f in found] == ([severity] * 2 if severity else [])
    for finding in found:
        assert finding.evidence["values"] == n
        assert math.isclose(finding.evidence["standard_error"], n**-0.5)
        assert f"normalcy.nn.LayerNorm({24})" in finding.remedy
    one_image = examine(model_of("mobilenet"), images(1)[0]).having("too-few-values")
    assert one_image == ()  # 36 values and more


def test_the_replacement_that_is_named_can_be_built_and_fits() -> None:
    x = images(1)[0][..., :6, :6]
    found = examine(model_of("resnet"), x).having("too-few-values")
    assert found
    for finding in found:
        (call,) = re.findall(r"normalcy\.nn\.(\w+\([\d, ]+\))", finding.remedy)
        name, numbers = call.rstrip(")").split("(")
        layer = getattr(ours, name)(*map(int, numbers.split(",")))
        channels = norms_of(model_of("resnet"))[finding.where].num_features
        assert layer(torch.randn(2, channels, 3, 3)).shape == (2, channels, 3, 3)


def test_a_frozen_norm_needs_no_batch() -> None:
    model = model_of("mlp").train()
    model[1].eval()
    found = examine(model, features(4)[0])
    assert [f.where for f in found.having("too-few-values")] == ["5"]


def test_a_standardized_weight_is_no_small_batch() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.weight.reshape(1, self.out_channels, -1)
            weight = F.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
            return F.conv2d(x, weight, self.bias)

    assert not examine(nn.Sequential(Standardized(3, 4, 1), nn.GroupNorm(2, 4)), images(4)[0]).findings


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(3, 3), nn.LayerNorm(1), nn.RMSNorm(1), nn.InstanceNorm1d(3, 1e-5, 0.1, True, True)]
)
def test_one_value_alone_is_an_error_for_every_norm(norm: nn.Module) -> None:
    x = torch.randn(20, 3, 1, generator=torch.Generator().manual_seed(0)) + 5
    found = examine(norm.eval(), x).having("too-few-values")
    assert [(f.severity, f.evidence["values"]) for f in found] == [("error", 1)]


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_weight_decay_on_norms_is_found_by_group(decay: float) -> None:
    model = model_of("resnet")
    norms = [p for n in norms_of(model).values() for p in n.parameters()]
    held = {id(p) for p in norms}
    rest = [p for p in model.parameters() if id(p) not in held]
    optimizer = torch.optim.AdamW([
        {"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": decay},
    ])  # fmt: skip
    found = examine(model, optimizer=optimizer).findings
    if not decay:
        assert found == ()
        return
    (finding,) = found
    assert (finding.code, finding.where, finding.severity) == ("decayed-norm", "optimizer group 1", "warning")
    assert finding.evidence["weight_decay"] == 0.01
    assert finding.evidence["tensors"] == len(norms) == 14
    assert finding.evidence["parameters"] == sum(p.numel() for p in norms)
    assert finding.evidence["norms"].endswith("and 1 more")
    assert "AdamW(" in finding.remedy


@pytest.mark.parametrize("name", BATCH_NORMED)
def test_a_norm_left_in_training_is_an_error_in_a_model_that_evaluates(name: str) -> None:
    model = model_of(name)
    where = next(iter(norms_of(model)))
    norms_of(model)[where].train()
    (finding,) = look(model, name).findings
    assert (finding.code, finding.where, finding.severity) == ("wrong-mode", where, "error")
    assert finding.evidence == {"model": "eval", "norm": "train"}


@pytest.mark.parametrize(("trainable", "severity"), [(True, "warning"), (False, "note")])
def test_a_norm_that_evaluates_in_a_training_model_is_told(trainable: bool, severity: str) -> None:
    model = model_of("resnet").train()
    norm = model[4].bn2.eval()
    for parameter in norm.parameters():
        parameter.requires_grad_(trainable)
    (finding,) = look(model, "resnet").findings
    assert (finding.code, finding.where, finding.severity) == ("wrong-mode", "4.bn2", severity)
    assert finding.evidence["trainable"] == (16 if trainable else 0)


def test_modes_do_not_matter_for_norms_without_running_statistics() -> None:
    model = Transformer().train()
    model.norm.eval()
    plain = nn.Sequential(nn.BatchNorm1d(10, track_running_stats=False)).train()
    plain[0].eval()
    assert examine(model, features(20)[0]).findings == examine(plain, features(20)[0]).findings == ()


# what is not known


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


@pytest.mark.parametrize("data", [None, features(8)[0]], ids=["without data", "with data"])
def test_a_normalizer_that_is_not_recognized_is_listed_also_alone(
    data: Tensor | None,
) -> None:
    found = examine(nn.Sequential(nn.Linear(10, 6), LlamaRMSNorm(6)), data)
    assert [item.where for item in found.unrecognized] == ["1"]
    assert [(f.code, f.severity) for f in found.findings] == [
        ("unrecognized-norm", "note"),
        ("no-norm", "note"),
    ]
    assert "not recognized" in found.findings[1].remedy


def test_a_model_without_norms_has_nothing_to_examine() -> None:
    for data in (None, features(8)[0]):
        (finding,) = examine(nn.Sequential(nn.Linear(10, 2)), data).findings
        assert (finding.code, finding.title) == ("no-norm", "There is nothing to examine")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_of_a_scripted_model_it_is_said_that_nothing_was_looked_into() -> None:
    found = examine(torch.jit.script(mlp()), features(8)[0])
    assert found.not_seen or found.unrecognized
    assert "no-norm" in [f.code for f in found.findings]


# the words


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.never = nn.BatchNorm1d(10), nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Lending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var)


def with_nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[4].weight[3, 5] = math.nan
    return model


def spoilt(where: int, **buffers: float) -> nn.Module:
    model = model_of("mlp")
    for name, value in buffers.items():
        getattr(model[where], name).fill_(value)
    return model


FAULTS: dict[str, Callable[[], Examination]] = {
    "initial-statistics": lambda: look(mlp(), "mlp"),
    "unwarmed-statistics": lambda: look(under_trained(0.001, 30), "mlp"),
    "stale-statistics": lambda: look(spoilt(1, running_mean=500.0), "mlp"),
    "non-finite-statistics": lambda: look(spoilt(1, running_var=math.nan), "mlp"),
    "negative-variance": lambda: look(spoilt(5, running_var=-1.0), "mlp"),
    "wrong-mode": lambda: examine(
        nn.Sequential(spoilt(5).train()).eval().requires_grad_(False).append(mlp().train())
    ),
    "too-few-values": lambda: examine(model_of("mlp"), features(5)[0]),
    "dead-bias": lambda: examine(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), features(30)[0]),
    "decayed-norm": lambda: examine(m := mlp(), optimizer=torch.optim.AdamW(m.parameters())),
    "unrecognized-norm": lambda: examine(LlamaRMSNorm(3)),
    "non-finite-parameters": lambda: examine(with_nan(healthy("mlp"))),
    "non-finite-activations": lambda: examine(nn.Sequential(Log(), nn.BatchNorm1d(10)), features(30)[0]),
    "non-finite-loss": lambda: examine(
        healthy("mlp"), features(30)[0], loss=lambda *_: torch.tensor(math.nan)
    ),
    "never-called": lambda: examine(Unused(), features(30)[0]),
    "unmeasured-statistics": lambda: examine(Lending(), features(30)[0]),
    "no-norm": lambda: examine(nn.ReLU()),
}


def test_the_table_of_faults_has_every_rule() -> None:
    assert set(FAULTS) == {rule.code for rule in RULES}


@pytest.mark.parametrize("code", FAULTS)
def test_every_rule_speaks_in_sentences(code: str) -> None:
    found = FAULTS[code]().having(code)
    assert found, "the rule did not fire"
    for finding in found:
        assert finding.title[:1].isupper()
        assert not finding.title.endswith(".")
        assert finding.where
        for text in (finding.cause, finding.remedy):
            assert text.endswith(".")
            assert text[:1].isupper() or text.startswith("normalcy.")
            assert not re.search(r"\{[a-z_.]*\}|None|nan|<|  ", text), text
        for name, value in finding.evidence.items():
            assert re.fullmatch(r"[a-z_0-9]+", name)
            assert isinstance(value, float | int | str)


def test_one_channel_that_is_off_does_not_hide_among_many() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(1024, momentum=None)
    batches = [torch.randn(64, 1024) * 2 + 5 for _ in range(40)]
    for x in batches:
        norm(x)
    model = nn.Sequential(norm).eval()
    assert not examine(model, iter(batches)).findings
    norm.running_mean[17] += 3 * norm.running_var[17].sqrt()
    (finding,) = examine(model, iter(batches)).findings
    assert (finding.code, finding.severity, finding.evidence["channel"]) == (
        "stale-statistics",
        "warning",
        17,
    )
    assert finding.evidence["gap_rms"] < 0.1
    assert finding.evidence["gap_worst"] == pytest.approx(3, rel=0.02)
