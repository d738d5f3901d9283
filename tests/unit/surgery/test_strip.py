"""Dead biases go, and nothing else changes: evaluation, training, the optimizer, random states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it

from normalcy import nn as ours
from normalcy.errors import ArgumentError, DataError, ProofError, TypeMismatchError
from normalcy.report import Report
from normalcy.surgery.strip import strip_dead_bias


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.7 + 2.5


def live(model: nn.Module) -> nn.Module:
    """Biases and statistics far from zero, so that a bias that is lost shows."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        with torch.no_grad():
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                bias.copy_(4 * torch.randn(bias.shape, generator=generator))
            if isinstance(mean := getattr(module, "running_mean", None), Tensor):
                mean.copy_(3 * torch.randn(mean.shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(mean.shape, generator=generator))
    return model


def same(a: Tensor, b: Tensor) -> None:
    """float32, shifts of size 10 on values of size 1, a few layers: 1e-4 is far below any lost bias."""
    worst = float((a.double() - b.double()).abs().max() / b.double().abs().max())
    if not worst <= 1e-4:
        raise AssertionError(f"differ by {worst:.3g} relative")


def unchanged(report: Report, model: nn.Module, x: Tensor) -> None:
    before, after = copy.deepcopy(model), copy.deepcopy(report.model)
    with torch.no_grad():
        same(after.eval()(x), before.eval()(x))
        same(after.train()(x), before.train()(x))
        same(after.eval()(x), before.eval()(x))


def conv_net(norm: type = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.MaxPool2d(2), norm(4))


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4 * 16), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x).flatten(1))))


class Joined(nn.Module):
    """Two biases added, one concatenated behind them, and one norm over all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(11)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([x, self.a(x) - self.b(x), self.c(x)], 1))


def permuted() -> nn.Module:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.lin(x).transpose(1, 2)))

    return Permuted()


CASES = {
    "conv": (conv_net, (4, 3, 12, 12), ["0", "3"]),
    "ours": (lambda: conv_net(ours.BatchNorm2d), (4, 3, 12, 12), ["0", "3"]),
    "flattened": (Flattened, (4, 3, 6, 6), ["conv"]),
    "joined": (Joined, (4, 3, 6, 6), ["a", "b", "c"]),
    "permuted": (permuted, (4, 7, 5), ["lin"]),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)),
        (2, 3, 5, 5),
        ["0"],
    ),
    "own statistics": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)), (2, 3, 6, 6), ["0"]),
    "one channel a group": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)),
        (2, 3, 6, 6),
        ["0"],
    ),
}


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_a_dead_bias_goes_and_nothing_else_changes(name: str, mode: bool) -> None:
    build, shape, places = CASES[name]
    torch.manual_seed(0)
    model, x = live(build()).train(mode), data(*shape)
    report = strip_dead_bias(model, x)
    assert [item.where for item in report.done] == places
    assert not report.refused
    assert report.error <= report.bound
    assert all(report.model.get_submodule(path).bias is None for path in places)
    assert not any(name.removesuffix(".bias") in places for name in report.model.state_dict())
    unchanged(report, model, data(*shape, seed=7))


def test_the_running_mean_takes_the_bias_over_rounded_once() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    report = strip_dead_bias(model, data(8, 5))
    exact = model[1].running_mean.double() - model[0].bias.detach().double()
    assert torch.equal(report.model[1].running_mean, exact.float())


def test_modes_buffers_hooks_and_random_state_of_the_model_stay() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.3)))
    model[1].eval()
    model[1].train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calls: list[int] = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    hooks = [len(m._forward_hooks) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    report = strip_dead_bias(model, data(4, 3, 8, 8))
    assert [item.where for item in report.done] == ["0"]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()] == [m.training for m in report.model.modules()]
    assert hooks == [len(m._forward_hooks) for m in report.model.modules()]


def test_the_optimizer_forgets_the_bias_and_training_goes_on_alike() -> None:
    torch.manual_seed(0)
    model, x = live(conv_net()), data(4, 3, 12, 12)
    optimizer = torch.optim.SGD(
        model.parameters(), 1e-3, momentum=0.9
    )  # Adam would turn the bias's rounding into steps
    other = copy.deepcopy(model)
    reference = torch.optim.SGD(other.parameters(), 1e-3, momentum=0.9)

    def step(net: nn.Module, chosen: torch.optim.Optimizer) -> None:
        chosen.zero_grad()
        (net.train()(x) ** 3).mean().backward()
        chosen.step()

    step(model, optimizer)
    step(other, reference)
    bias = model[0].bias
    report = strip_dead_bias(model, x, optimizer=optimizer, inplace=True)
    assert report.model is model
    assert len(report.done) == 2
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert not any(p is bias for p in held)
    assert bias not in optimizer.state
    assert len(held) == len(list(model.parameters())) == len(optimizer.state)
    step(model, optimizer)
    step(other, reference)
    with torch.no_grad():
        same(model.eval()(x), other.eval()(x))


def test_an_optimizer_needs_inplace() -> None:
    model = live(conv_net())
    with pytest.raises(ArgumentError, match="inplace=True"):
        strip_dead_bias(model, data(4, 3, 12, 12), optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_an_optimizer_with_one_state_for_all_is_refused() -> None:
    model = live(conv_net())
    with pytest.raises(TypeMismatchError, match="LBFGS"):
        strip_dead_bias(
            model, data(4, 3, 12, 12), optimizer=torch.optim.LBFGS(model.parameters()), inplace=True
        )


def test_a_frozen_norm_keeps_the_bias() -> None:
    model = live(conv_net()).train()
    model[1].eval()
    report = strip_dead_bias(model, data(4, 3, 12, 12))
    assert [item.where for item in report.done] == ["3"]
    unchanged(report, copy.deepcopy(model), data(4, 3, 12, 12, seed=5))


def test_what_only_training_does_keeps_the_bias() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            if self.training:
                y = y * (torch.rand(len(y), 1) > 0.4)
            return self.norm(y)

    for mode in (True, False):
        report = strip_dead_bias(live(Drops()).train(mode), data(16, 5))
        assert not report.done
        if not mode:
            assert "training mode" in report.refused[0].why


def test_shared_layers_and_subclasses_are_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.n1, self.n2 = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.n1(self.lin(x)) + self.n2(self.lin(x + 1))

    class Mine(nn.Linear):
        pass

    report = strip_dead_bias(live(Shared()), data(16, 5))
    assert "called 2 times" in report.refused[0].why
    report = strip_dead_bias(live(nn.Sequential(Mine(5, 4), nn.BatchNorm1d(4))), data(16, 5))
    assert "Mine" in report.refused[0].why
    assert not report.done


def test_a_model_that_looks_at_its_bias_fails_the_proof_and_keeps_it() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
            self.good = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.good(torch.relu(self.norm(self.lin(x))))
            return y * 2 if self.lin.bias is None else y

    torch.manual_seed(0)
    model = live(Looks())
    report = strip_dead_bias(model, data(16, 5), inplace=True)
    assert [item.where for item in report.done] == ["good.0"]
    assert "output changes" in report.refused[0].why
    assert model.lin.bias is not None


def test_a_batch_of_one_is_refused_with_a_sentence() -> None:
    with pytest.raises(DataError, match="training mode"):
        strip_dead_bias(live(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))).eval(), data(1, 5))


def test_an_alive_bias_is_no_matter_for_the_report() -> None:
    model = live(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4))
    )
    report = strip_dead_bias(model, data(16, 5))
    assert not report.done
    assert not report.refused
    assert report.error is None


def test_half_precision_is_proved_on_its_float64_copy() -> None:
    torch.manual_seed(0)
    model = live(conv_net()).bfloat16()
    report = strip_dead_bias(model, data(4, 3, 12, 12).bfloat16())
    assert len(report.done) == 2
    assert report.error <= report.bound


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_of_named_parameters_forgets_the_names_too(build, named: bool) -> None:
    torch.manual_seed(0)
    model = live(conv_net())
    given = model.named_parameters() if named else model.parameters()
    optimizer = build(given, lr=0.01)
    model(data(4, 3, 12, 12)).square().mean().backward()
    optimizer.step()
    strip_dead_bias(model, data(4, 3, 12, 12), optimizer=optimizer, inplace=True)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    if named:
        assert group["param_names"] == [name for name, _ in model.named_parameters()]
    again = build(model.named_parameters() if named else model.parameters(), lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    optimizer.step()


def test_a_scaled_and_summed_bias_goes_and_its_norm_takes_over_what_it_received() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(-0.25 * self.conv(x).sum((2, 3)))

    torch.manual_seed(0)
    model, x = live(Summed()), data(6, 3, 5, 5)
    report = strip_dead_bias(model, x)
    assert [item.where for item in report.done] == ["conv"]
    unchanged(report, model, x)


def test_that_the_model_may_decide_by_its_data_is_said_where_a_bias_went() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.lin(x)) * (1 if float(x.max()) > -1e9 else 2)

    report = strip_dead_bias(live(Gated()), data(16, 5))
    assert [item.where for item in report.done] == ["lin"]
    assert [note for note in report.notes if "decide by its data (float)" in note]


@pytest.mark.parametrize("how", ["mask", "lengths"])
def test_a_bias_before_a_masked_norm_goes_and_masked_places_stay_zero(how: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), ours.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([9, 2, 5, 7])
            if how == "lengths":
                return self.norm(self.conv(x), lengths=lengths)
            return self.norm(self.conv(x), mask=torch.arange(9) < lengths[:, None, None])

    torch.manual_seed(0)
    model, x = live(Masked()), data(4, 3, 9)
    report = strip_dead_bias(model, x)
    assert [item.where for item in report.done] == ["conv"]
    unchanged(report, model, x)
    assert (report.model(x)[1, :, 2:] == 0).all()


def test_an_output_that_is_not_finite_is_not_put_down_to_chance() -> None:
    model = live(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    with torch.no_grad():
        model[0].weight[1, 2] = float("nan")
    with pytest.raises(ProofError, match="not finite"):
        strip_dead_bias(model, data(16, 5))
