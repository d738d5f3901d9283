"""What the data do not reach, reach by another way, or reach as NaN is told by name, and by nothing else."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from torch.nn.utils import parametrizations
from unit.models import features, healthy, mlp

from normalcy.doctor import Examination, examine

STATISTICS = (
    "initial-statistics",
    "unwarmed-statistics",
    "stale-statistics",
    "non-finite-statistics",
    "negative-variance",
)


def told(found: Examination) -> list[tuple[str, str, str]]:
    return [(f.code, f.where, f.severity) for f in found.findings]


class Wired(nn.Module):
    """A healthy network, further layers, and a forward given as a function of the module and the input."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(NET)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.wired = forward

    def forward(self, x: Tensor) -> object:
        return self.wired(self, x)


NET = healthy("mlp")
X = features(300)[0]


def spoilt(kind: str) -> nn.Module:
    """A norm of 3 channels with statistics that are no good in one way, or sound."""
    norm = nn.BatchNorm1d(3, momentum=0.001 if kind == "unwarmed" else 0.1)
    if kind in ("unwarmed", "sound"):
        for batch in torch.randn(60, 40, 3, generator=torch.Generator().manual_seed(0)) * 3 + 20:
            norm(batch)
    if kind == "not finite":
        norm.running_mean[1] = math.nan
    if kind == "negative":
        norm.running_var[2] = -0.5
    return norm.eval()


# never called


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("initial", "initial values"),
        ("unwarmed", "not warmed up"),
        ("not finite", "not finite"),
        ("negative", "negative variance"),
    ],
)
def test_spoilt_statistics_of_a_norm_that_is_never_called_are_a_note(kind: str, words: str) -> None:
    model = Wired(lambda m, x: m.net(x), never=spoilt(kind)).eval()
    found = examine(model, X)
    assert told(found) == [("never-called", "never", "note")]
    assert words in found.findings[0].cause
    assert "Remove it, or call it" in found.findings[0].remedy
    assert {f.severity for f in examine(model).having(*STATISTICS)} == {"error"}  # without data nobody knows


def test_sound_statistics_of_a_norm_that_is_never_called_are_no_matter() -> None:
    assert examine(Wired(lambda m, x: m.net(x), never=spoilt("sound")).eval(), X).findings == ()


def test_a_norm_that_is_called_where_nobody_looks_is_not_said_to_be_never_called() -> None:
    """Initial statistics of a norm that ran inside something recorded as a whole stay an error."""

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: Tensor, norm: nn.Module) -> Tensor:
            return norm(x)

    model = Wired(lambda m, x: Whole.apply(m.net(x), m.norm), norm=nn.BatchNorm1d(3)).eval()
    found = examine(model, X)
    assert not found.having("never-called")
    assert [f.where for f in found.having("initial-statistics")] == ["norm"]


# functional calls


def lending(m: Wired, x: Tensor) -> Tensor:
    norm = m.norm
    y = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, m.training)
    return m.net(y)


def test_a_function_that_is_given_the_statistics_of_a_layer_is_told_under_that_layer() -> None:
    model = Wired(lending, norm=nn.BatchNorm1d(10)).eval()
    found = examine(model, X)
    assert ("unmeasured-statistics", "norm", "note") in told(found)
    assert ("initial-statistics", "norm", "error") in told(found)  # they are used, so this counts
    assert "Call the layer itself" in found.having("initial-statistics")[0].remedy
    assert not found.having("never-called")
    assert [s.where for s in found.sites] == ["norm", "net.1", "net.5"]
    assert found["norm"].calls == 1
    assert found["norm"].gap is None
    assert "never called" not in str(found.notes)


def test_sound_statistics_that_a_function_uses_leave_only_the_note() -> None:
    norm = nn.BatchNorm1d(10)
    for batch in X.repeat(20, 1).split(100):
        norm(batch)
    with torch.no_grad():
        norm.weight.copy_(X.std(0))
        norm.bias.copy_(X.mean(0))
    found = examine(Wired(lending, norm=norm).eval(), X)
    assert told(found) == [("unmeasured-statistics", "norm", "note")]
    assert found.findings[0].evidence == {"function": "batch_norm in the model itself"}


@pytest.mark.parametrize("first", ["function", "layer"])
def test_a_layer_that_is_called_and_lends_its_statistics_too_is_listed_once(first: str) -> None:
    def both(m: Wired, x: Tensor) -> Tensor:
        y = m.norm(x) if first == "layer" else None
        z = F.batch_norm(x, m.norm.running_mean, m.norm.running_var)
        return m.net(z + (m.norm(x) if y is None else y))

    found = examine(Wired(both, norm=nn.BatchNorm1d(10)).eval(), X)
    places = [s.where for s in found.sites]
    assert sorted(places) == ["batch_norm", "net.1", "net.5", "norm"]
    assert [f.where for f in found.having("initial-statistics")] == ["norm"]
    (finding,) = found.having("unmeasured-statistics")
    assert finding.where == "batch_norm"
    assert "calls norm and also gives" in finding.cause


def test_statistics_that_belong_to_no_known_layer_are_told_under_the_function() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", X.mean(0))
            self.register_buffer("running_var", X.var(0))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var)

    (finding,) = examine(nn.Sequential(Own()).eval(), X).having("unmeasured-statistics")
    assert finding.where == "0: batch_norm"
    assert finding.evidence == {"function": "batch_norm in 0", "held_by": "0"}


# dead biases in both modes


class Auxiliary(nn.Module):
    """A head that only training has, which takes the layer's output before the norm."""

    def __init__(self, behind_norm: bool) -> None:
        super().__init__()
        self.lin, self.norm, self.head = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.aux_norm = nn.BatchNorm1d(8) if behind_norm else nn.Identity()
        self.aux = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> object:
        y = self.lin(x)
        out = self.head(self.norm(y).relu())
        if not self.training:
            return out
        return out, self.aux(self.aux_norm(y))


def settled(model: nn.Module) -> nn.Module:
    model.train()
    for _ in range(100):
        model(X)
    return model.eval()


def test_a_bias_that_a_head_of_training_uses_is_not_called_dead() -> None:
    assert examine(settled(Auxiliary(behind_norm=False)), X).findings == ()


def test_a_bias_that_both_heads_subtract_is_dead_and_its_remedy_does_not_promise_what_is_refused() -> None:
    (finding,) = examine(settled(Auxiliary(behind_norm=True)), X).findings
    assert (finding.code, finding.where) == ("dead-bias", "lin")
    assert "bias=False" in finding.remedy
    assert "strip" not in finding.remedy
    assert "training mode" in finding.remedy


def test_a_norm_that_the_model_freezes_itself_in_training_keeps_the_bias_alive() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> nn.Sequential:
            super().train(mode)
            self[1].eval()
            return self

    model = Frozen(nn.Linear(10, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        model[1].running_mean.copy_(model[0](X).mean(0))
        model[1].running_var.copy_(model[0](X).var(0))
    assert examine(model.eval(), X).findings == ()


class Sub(nn.Linear):
    pass


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(10, 10), nn.BatchNorm1d(10, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(self.norm(self.lin(x))))


@pytest.mark.parametrize(
    ("build", "because"),
    [
        (Twice, "shared"),
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 4)), nn.BatchNorm1d(4)),
            "parametrized",
        ),
        (lambda: nn.Sequential(Sub(10, 4), nn.BatchNorm1d(4)), "subclass"),
    ],
    ids=["shared", "parametrized", "subclass"],
)
def test_where_a_bias_cannot_be_taken_out_the_remedy_says_why(build, because: str) -> None:
    (finding,) = examine(build(), X).having("dead-bias")
    assert because in finding.remedy
    assert "strip" not in finding.remedy


def test_a_bias_that_can_be_taken_out_is_sent_to_the_operation_that_does_it() -> None:
    (finding,) = examine(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), X).having("dead-bias")
    assert "strip_dead_bias" in finding.remedy


def test_where_no_pass_in_training_runs_a_dead_bias_is_told_with_that_reserve() -> None:
    class Picky(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("targets are needed in training")
            return super().forward(x)

    (finding,) = examine(Picky(nn.Linear(10, 4), nn.BatchNorm1d(4)).eval(), X).having("dead-bias")
    assert "if training has the same wiring" in finding.remedy
    assert "targets are needed" in finding.remedy


def test_the_second_pass_leaves_no_trace_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert examine(model, X).having("dead-bias")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(module.training for module in model.modules())


# not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fresh", [True, False])
def test_parameters_that_are_not_finite_are_named_and_what_follows_is_not(value: float, fresh: bool) -> None:
    model = mlp().eval() if fresh else copy.deepcopy(NET)
    with torch.no_grad():
        model[0].weight[3, 2:4] = value
    found = examine(model, X)
    assert told(found)[0] == ("non-finite-parameters", "0.weight", "error")
    assert found.findings[0].evidence == {"values": 2, "tensors": 1, "of": 8}
    assert not [f for f in found.having(*STATISTICS) if f.where == "1"]
    (alone,) = examine(copy.deepcopy(model)).having("non-finite-parameters")
    assert alone.where == "0.weight"


def test_statistics_before_the_parameter_that_is_not_finite_are_still_judged() -> None:
    model = copy.deepcopy(NET)
    with torch.no_grad():
        model[4].weight[0, 0] = math.nan
    model[1].running_mean += 30
    assert {(f.code, f.where) for f in examine(model, X).findings} == {
        ("non-finite-parameters", "4.weight"),
        ("stale-statistics", "1"),
    }


def test_statistics_that_became_nan_in_training_with_nan_weights_are_put_down_to_the_weights() -> None:
    model = copy.deepcopy(NET).train()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
        model(X)
    assert model[5].running_mean.isnan().all()
    assert [f.code for f in examine(model.eval(), X).findings] == ["non-finite-parameters"]


def test_activations_that_are_not_finite_are_told_at_the_first_norm_they_reach() -> None:
    model = Wired(
        lambda m, x: m.b((m.a(m.net(x).tanh() - 1e4) - 1e5).sqrt()), a=spoilt("sound"), b=nn.BatchNorm1d(3)
    ).eval()
    found = examine(model, X)
    assert [(f.code, f.where) for f in found.findings] == [
        ("non-finite-activations", "b"),
        ("stale-statistics", "a"),
    ]
    evidence = found.having("non-finite-activations")[0].evidence
    assert evidence == {"channels": 3, "of": 3, "norms": 1}


def test_an_additive_mask_held_as_a_parameter_is_no_damage() -> None:
    model = copy.deepcopy(NET)
    model.mask = nn.Parameter(torch.full((4, 4), -math.inf).triu(1), requires_grad=False)
    assert examine(model, X).findings == ()
    model.mask.requires_grad_()
    assert [f.code for f in examine(model, X).findings] == ["non-finite-parameters"]


@pytest.mark.parametrize("spoil", ["both", "stored"])
def test_a_loss_that_is_not_finite_is_told_and_with_which_statistics(spoil: str) -> None:
    model = copy.deepcopy(NET)
    if spoil == "stored":
        model[5].running_var[0] = -1.0

    def loss(output: Tensor, batch: object) -> Tensor:
        return output.square().mean() * (math.nan if spoil == "both" else 1)

    (finding,) = examine(model, X, loss=loss).having("non-finite-loss")
    assert finding.severity == "note"
    assert math.isnan(finding.evidence["loss_eval"])
    assert math.isnan(finding.evidence["loss_batch"]) == (spoil == "both")
    assert ("either source" in finding.cause) == (spoil == "both")
    assert ("finite with each batch's own" in finding.cause) == (spoil == "stored")
