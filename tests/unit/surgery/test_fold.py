"""Folding: right to a derived bound, or refused with a sentence."""

from __future__ import annotations

import copy
import importlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from torch.nn.utils import parametrizations, parametrize, prune

from normalcy import nn as ours
from normalcy.errors import DataError
from normalcy.report import Report
from normalcy.surgery import fold
from normalcy.surgery.layer import Folded, folded, install, prove_layer

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "field.json").read_text())


def live(model: nn.Module, seed: int = 0) -> nn.Module:
    """Evaluation mode, with statistics and an affine far from their initial values, offsets included."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            with torch.no_grad():
                if module.running_mean is not None:
                    module.running_mean.copy_(3 * torch.randn(module.num_features, generator=generator))
                    module.running_var.copy_(0.05 + 4 * torch.rand(module.num_features, generator=generator))
                if module.weight is not None:
                    module.weight.copy_(1 + 0.5 * torch.randn(module.num_features, generator=generator))
                    module.bias.copy_(torch.randn(module.num_features, generator=generator))
    return model.eval()


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.7 + 2.5


def outputs_agree(report: Report, model: nn.Module, x: Tensor, relative: float = 1e-5) -> None:
    """float32 through a few layers: 1e-5 of the largest value is some 80 roundings, a wrong fold far more."""
    with torch.no_grad():
        before, after = model(x), report.model(x)
    assert torch.isfinite(before).all()
    worst = float((before.double() - after.double()).abs().max() / before.double().abs().max())
    if not worst <= relative:
        raise AssertionError(f"outputs differ by {worst:.3g} relative")


def why(report: Report, where: str) -> str:
    (item,) = [item for item in report.refused if item.where == where]
    assert where not in [done.where for done in report.done]
    return item.why


class Block(nn.Module):
    """A residual block with a downsampling branch."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return F.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def mobile() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
        nn.Conv2d(6, 6, 3, 1, 1, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
        nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 4, bias=False), nn.BatchNorm1d(4)
    )


def speech() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(5, 8, 5, padding=2, padding_mode="reflect"), nn.BatchNorm1d(8, affine=False), nn.GELU(),
        nn.Conv1d(8, 8, 3, dilation=2, groups=2, padding="same"), nn.BatchNorm1d(8, eps=1e-3),
    )  # fmt: skip


def volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm3d(4), nn.ReLU())


MODELS = {
    "resnet": (ResNet, (2, 3, 32, 32), 7),
    "mobile": (mobile, (2, 3, 8, 8), 3),
    "mlp": (mlp, (16, 10), 2),
    "speech": (speech, (2, 5, 30), 2),
    "volume": (volume, (2, 2, 4, 5, 6), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_what_evaluation_gives(name: str) -> None:
    build, shape, count = MODELS[name]
    torch.manual_seed(0)
    model, x = live(build()), data(*shape)
    report = fold(model, x)
    assert len(report.done) == count, report.refused
    assert not report.refused
    assert 0 < report.error <= report.bound
    assert report.model_error <= report.model_bound
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in report.model.modules())
    outputs_agree(report, model, data(*shape, seed=9))
    assert not report.notes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_stays_within_the_bound_of_its_own_roundoff(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())).to(dtype)
    report = fold(model, data(2, 3, 9, 9).to(dtype))
    assert [item.where for item in report.done] == ["1"]
    assert 0 < report.error <= report.bound
    assert report.model[0].weight.dtype == report.model[0].bias.dtype == dtype


def test_the_layers_of_this_library_fold_too() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Conv2d(3, 6, 3), ours.BatchNorm2d(6), nn.ReLU()))
    report = fold(model, data(2, 3, 9, 9))
    assert [item.where for item in report.done] == ["1"]
    outputs_agree(report, model, data(2, 3, 9, 9, seed=5))


def test_the_layers_own_bias_is_scaled_too() -> None:
    (case,) = [c for c in GOLDEN if c["id"] == "fold-scalar"]
    given, right = case["given"], case["right"]
    layer, norm = nn.Linear(1, 1).double(), nn.BatchNorm1d(1, eps=given["eps"]).double().eval()
    with torch.no_grad():
        layer.weight.fill_(given["weight"])
        layer.bias.fill_(given["bias"])
        norm.weight.fill_(given["gamma"])
        norm.bias.fill_(given["beta"])
        norm.running_mean.fill_(given["running_mean"])
        norm.running_var.fill_(given["running_var"])
    report = fold(nn.Sequential(layer, norm), data(4, 1).double())
    assert report.model[0].weight.item() == pytest.approx(right["weight"], rel=1e-14)
    assert report.model[0].bias.item() == pytest.approx(right["bias"], rel=1e-14)


def test_without_inplace_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = live(ResNet()), data(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002 - the state itself
    report = fold(model, x)
    assert report.model is not model
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *report.model.modules())
    )
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002 - the state itself


def test_inplace_keeps_the_parameters_identity() -> None:
    torch.manual_seed(0)
    model, x = live(mlp()), data(16, 10)
    weight, expected = model[0].weight, model(x).detach()
    report = fold(model, x, inplace=True)
    assert report.model is model
    assert model[0].weight is weight
    assert isinstance(model[1], nn.Identity)
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["bias not scaled", "γ off by 1e-5", "eps left out", "mean dropped"])
def test_a_wrong_fold_exceeds_the_bound(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("normalcy.surgery.fold")

    right = install

    def misfold(layer: nn.Module, new: Folded) -> None:
        a = (norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()).to(layer.weight.dtype)
        match wrong:
            case "bias not scaled":
                off = Folded(new.weight, new.bias + (1 - a) * layer.bias, new.magnitude)
            case "γ off by 1e-5":
                off = Folded(new.weight * (1 + 1e-5), new.bias, new.magnitude)
            case "eps left out":
                bare = (norm.weight.double() / norm.running_var.double().sqrt()).to(layer.weight.dtype)
                off = Folded(new.weight * (bare / a)[:, None, None, None], new.bias, new.magnitude)
            case _:
                off = Folded(new.weight, new.bias + a * norm.running_mean, new.magnitude)
        right(layer, off)

    torch.manual_seed(0)
    layer, norm = nn.Conv2d(8, 6, 3), live(nn.Sequential(nn.BatchNorm2d(6, eps=1e-4)))[0]
    model, x = nn.Sequential(layer, norm).eval(), data(2, 8, 9, 9)
    good, bad = copy.deepcopy(layer), copy.deepcopy(layer)
    right(good, folded(layer, norm))
    misfold(bad, folded(layer, norm))
    assert prove_layer(layer, norm, good, x).holds
    assert prove_layer(layer, norm, bad, x).ratio > 1
    monkeypatch.setattr(module, "install", misfold)
    report = fold(model, x)
    assert not report.done
    assert "could not be proved" in why(report, "1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_relative_error_of_the_weights_is_found_in_a_long_dot_product(dtype: torch.dtype) -> None:
    """k = 2048 makes 2(k + 3)·u useless in half precision; the float64 comparison stays sharp."""
    torch.manual_seed(0)
    layer, norm = nn.Linear(2048, 8).to(dtype), live(nn.Sequential(nn.BatchNorm1d(8)))[0].to(dtype)
    new = folded(layer, norm)
    good, bad = copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        for other, factor in ((good, 1.0), (bad, 1 + 64 * torch.finfo(dtype).eps)):
            other.weight.copy_(new.weight.double() * factor)
            other.bias.copy_(new.bias)
    x = data(64, 2048).to(dtype)
    assert prove_layer(layer, norm, good, x).holds
    assert prove_layer(layer, norm, bad, x).ratio > 1


# ---- refusals -------------------------------------------------------------------------------------------


class Two(nn.Module):
    """A layer, a norm, and something about them that each subclass makes unsafe."""

    def __init__(self, layer: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Conv2d(3, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> object:
        return self.norm(self.layer(x))


class SecondConsumer(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y) + y


class AlsoReturned(Two):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"logits": self.norm(y), "hidden": y}


class CalledTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.layer(x + 1)


class NormTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.norm(x[:, :1].expand(-1, 4, -1, -1))


class Between(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.max_pool2d(self.layer(x), 2))


class ReluBetween(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.layer(x), inplace=True))


class WeightUsed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.layer.weight.mean()


class NormWeightRead(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.norm.weight.abs().mean()


class Functional(Two):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        return F.batch_norm(self.layer(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)


class FunctionalConv(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.conv2d(x, self.layer.weight, self.layer.bias, padding=1))


class Tied(Two):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 3, padding=1))
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.norm(self.layer(x)) + self.other(x)


class Dense(Two):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([x, self.layer(x)], 1))


class MyConv(nn.Conv2d):
    pass


class Weighed(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 1.5


def parametrized() -> nn.Module:
    model = Two()
    parametrize.register_parametrization(model.layer, "weight", Weighed())
    return model


def weight_normed() -> nn.Module:
    return Two(parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)))


def pruned() -> nn.Module:
    model = Two()
    prune.l1_unstructured(model.layer, "weight", 0.3)
    return model


def old_weight_norm() -> nn.Module:
    model = Two()
    with pytest.warns(FutureWarning, match="deprecated"):
        nn.utils.weight_norm(model.layer)
    return model


def hooked() -> nn.Module:
    model = Two()
    model.layer.register_forward_hook(lambda *_: None)
    return model


def norm_hooked() -> nn.Module:
    model = Two()
    model.norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    return model


REFUSED = {
    "second consumer": (SecondConsumer, "second consumer"),
    "model output": (AlsoReturned, "also an output of the model"),
    "layer called twice": (CalledTwice, "called 2 times"),
    "norm called twice": (NormTwice, "called 2 times"),
    "pooling between": (Between, "max_pool2d"),
    "activation between": (ReluBetween, "relu"),
    "weight used elsewhere": (WeightUsed, "also used elsewhere"),
    "norm's weight read": (NormWeightRead, "reads the norm's weight"),
    "functional conv": (FunctionalConv, "functional call"),
    "tied": (Tied, "tied (layer.weight, other.weight)"),
    "dense": (Dense, "cat"),
    "subclass": (lambda: Two(MyConv(3, 4, 3)), "MyConv"),
    "parametrized": (parametrized, "parametrized"),
    "weight norm": (weight_normed, "parametrized"),
    "pruned": (pruned, "hooks"),
    "old weight norm": (old_weight_norm, "hooks"),
    "hooks": (hooked, "hooks"),
    "norm's hooks": (norm_hooked, "hooks"),
    "transposed": (lambda: Two(nn.ConvTranspose2d(3, 4, 3)), "not folded yet"),
    "no statistics": (
        lambda: Two(norm=nn.BatchNorm2d(4, track_running_stats=False)),
        "no running statistics",
    ),
    "instance norm": (lambda: Two(norm=nn.InstanceNorm2d(4)), "instance norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_unsafe_is_refused_with_its_reason(name: str) -> None:
    build, said = REFUSED[name]
    torch.manual_seed(0)
    model = live(build())
    x = data(2, 3, 6, 6)
    report = fold(model, x)
    assert said in why(report, "norm")
    assert not report.done
    assert report.error is None
    with torch.no_grad():
        before, after = model(x), report.model(x)
    pairs = (
        zip(before.values(), after.values(), strict=True) if isinstance(before, dict) else [(before, after)]
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_functional_norm_is_refused_by_its_place() -> None:
    torch.manual_seed(0)
    report = fold(live(Functional()), data(2, 3, 6, 6))
    assert "functional" in why(report, "batch_norm")


def test_a_norm_over_another_axis_is_refused_even_where_the_sizes_agree() -> None:
    """(2, 5, 3) → Linear(3, 5) → norm over axis 1: 5 places and 5 channels, but not the linear layer's."""
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    report = fold(model, data(2, 5, 3))
    assert "axis" in why(report, "1")
    report = fold(model, data(2, 3))
    assert report.done


def test_a_norm_in_training_mode_is_refused_and_says_what_to_do() -> None:
    report = fold(mlp().train(), data(16, 10))
    assert "call model.eval() first" in why(report, "1")


def test_an_unbatched_convolution_is_refused() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(9)))
    assert "axis" in why(fold(model, data(3, 9)), "1")


def test_mixed_dtypes_are_refused() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Conv2d(3, 4, 3).bfloat16(), nn.BatchNorm2d(4)))
    assert "dtypes are mixed" in why(fold(model, data(2, 3, 6, 6).bfloat16()), "1")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda n: n.running_var.fill_(-0.5), "not positive"),
        (lambda n: n.running_var[1].fill_(float("nan")), "running variance is not finite in 1"),
        (lambda n: n.running_mean[0].fill_(float("inf")), "running mean is not finite"),
        (lambda n: n.weight.data[2].fill_(float("nan")), "γ is not finite"),
    ],
)
def test_numbers_that_cannot_be_folded_are_refused(spoil: object, said: str) -> None:
    torch.manual_seed(0)
    model = live(Two())
    spoil(model.norm)
    assert said in why(fold(model, data(2, 3, 6, 6)), "norm")


def test_a_folded_weight_beyond_the_range_of_float16_is_refused() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).half()
    model[1].running_var.fill_(1e-5)
    model[1].weight.data.fill_(6e4)
    report = fold(model, (data(8, 4) * 1e-4).half())
    assert "range of float16" in why(report, "1")


def test_an_edit_through_data_is_never_folded_over() -> None:
    class Edited(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.data.mul_(2)
            return self.norm(y)

    class Numpy(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.detach().numpy()[:] *= 2
            return self.norm(y)

    for build in (Edited, Numpy):
        torch.manual_seed(0)
        model, x = live(build()), data(2, 3, 6, 6)
        report = fold(model, x)
        assert why(report, "norm")
        assert torch.equal(model(x), report.model(x))


def test_a_norm_reached_behind_the_modules_back_fails_the_whole_models_proof() -> None:
    class Listed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.order = [self.layer, self.norm]

        def forward(self, x: Tensor) -> Tensor:
            for module in self.order:
                x = module(x)
            return x

    torch.manual_seed(0)
    model, x = live(Listed()), data(2, 3, 6, 6)
    report = fold(model, x)
    assert "output changes" in why(report, "norm")
    assert torch.equal(model(x), report.model(x))


def test_one_bad_edge_does_not_take_the_good_ones_with_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
            self.bad = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
            self.kept = [self.bad[1]]

        def forward(self, x: Tensor) -> Tensor:
            return self.kept[0](self.bad[0](self.good(x)))

    torch.manual_seed(0)
    report = fold(live(Mixed()), data(2, 3, 6, 6))
    assert [item.where for item in report.done] == ["good.1"]
    assert why(report, "bad.1")


def test_a_model_that_casts_inside_rests_on_the_bound_at_each_layer_and_says_so() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).float().to(x.dtype)

    torch.manual_seed(0)
    report = fold(live(Casts()), data(9, 6))
    assert report.done
    assert any("casts" in note for note in report.notes)
    assert report.error <= report.bound


def test_a_dictionary_output_and_a_call_of_ones_own() -> None:
    @dataclass
    class Out:
        logits: Tensor

    class Dicts(Two):
        def forward(self, x: Tensor, *, scale: float) -> dict[str, object]:
            return {"a": Out(super().forward(x) * scale), "n": 3}

    torch.manual_seed(0)
    report = fold(
        live(Dicts()), {"x": data(2, 3, 6, 6)}, call=lambda model, batch: model(batch["x"], scale=2.0)
    )
    assert [item.where for item in report.done] == ["norm"]


def test_a_tuple_batch_gives_its_first_element() -> None:
    torch.manual_seed(0)
    report = fold(live(mlp()), (data(16, 10), torch.zeros(16)))
    assert len(report.done) == 2


def test_a_model_that_fails_on_the_example_says_so_in_one_sentence() -> None:
    with pytest.raises(DataError, match="11"):
        fold(live(mlp()), data(16, 11))


def test_layer_norm_is_left_alone() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.BatchNorm1d(5)))
    report = fold(model, data(8, 6))
    assert [item.where for item in report.done] == ["3"]
    assert not report.refused


def test_a_norm_that_never_ran_is_refused() -> None:
    torch.manual_seed(0)
    model = live(Two())
    model.unused = nn.BatchNorm2d(4).eval()
    report = fold(model, data(2, 3, 6, 6))
    assert "never called" in why(report, "unused")
    assert [item.where for item in report.done] == ["norm"]


@pytest.mark.parametrize("side", [1, -1])
def test_a_branch_that_only_other_data_take_is_found_by_fresh_inputs(side: int) -> None:
    class Branches(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            z = self.norm(y)
            far = x.mean() > example.mean() + 1 if side > 0 else x.mean() < example.mean() - 1
            return z + y if far else z

    torch.manual_seed(0)
    example = data(2, 3, 6, 6)
    report = fold(live(Branches()), example)
    assert "output changes" in why(report, "norm")
    assert [item.where for item in report.failed] == ["norm"]


@pytest.mark.parametrize("read", [bool, lambda x: x.item(), float], ids=["bool", "item", "float"])
@pytest.mark.parametrize("factor", [0.3, 3.0, 30.0])
def test_a_branch_on_the_size_of_the_data_is_found_by_fresh_inputs(factor: float, read) -> None:
    class Branches(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            z = self.norm(y)
            far = x.abs().max() > limit if factor > 1 else x.abs().max() < limit
            return z + y if read(far) else z

    torch.manual_seed(0)
    example = data(2, 3, 6, 6)
    limit = factor * example.abs().max()
    report = fold(live(Branches()), example)
    assert "output changes" in why(report, "norm")
    assert [item.where for item in report.failed] == ["norm"]


@pytest.mark.parametrize("decides", [True, False])
def test_that_the_model_may_decide_by_its_data_is_said_where_something_was_folded(decides: bool) -> None:
    class Gated(Two):
        def forward(self, x: Tensor) -> Tensor:
            z = self.norm(self.layer(x))
            return z if decides and x.mean() > -1e9 else z * 1

    report = fold(live(Gated()), data(2, 3, 6, 6))
    assert [item.where for item in report.done] == ["norm"]
    assert [note for note in report.notes if "decide by its data (bool)" in note] == report.notes
    assert len(report.notes) == decides


def test_a_decision_by_what_folding_changes_is_refused() -> None:
    class Gated(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.norm(y) if y.mean() > -1e9 else y

    assert "second consumer" in why(fold(live(Gated()), data(2, 3, 6, 6)), "norm")


def test_fresh_inputs_that_do_not_suit_the_model_are_counted() -> None:
    class Narrow(Two):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max() > limit:
                raise ValueError
            return self.norm(self.layer(x))

    example = data(2, 3, 6, 6)
    limit = 5 * example.abs().max()
    report = fold(live(Narrow()), example)
    assert [item.where for item in report.done] == ["norm"]
    assert "2 of 6 fresh inputs do not suit the model" in report.notes


def test_tokens_are_examples_too() -> None:
    torch.manual_seed(0)
    model = live(
        nn.Sequential(nn.Embedding(27, 6), nn.Flatten(), nn.Linear(18, 9), nn.BatchNorm1d(9), nn.Tanh())
    )
    report = fold(model, torch.randint(0, 27, (16, 3)))
    assert [item.where for item in report.done] == ["3"]


def test_an_example_without_values_proves_nothing() -> None:
    report = fold(live(Two()), torch.zeros(0, 3, 6, 6))
    assert "no value" in why(report, "norm")


def test_data_that_are_not_finite_prove_nothing() -> None:
    x = data(2, 3, 6, 6)
    x[0, 0, 0, 0] = float("nan")
    assert "could not be proved" in why(fold(live(Two()), x), "norm")


def test_a_norm_frozen_in_a_model_that_trains_folds_beside_dropout() -> None:
    torch.manual_seed(0)
    model = live(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    )
    model.train()
    model[1].eval()
    report = fold(model, data(8, 4))
    assert [item.where for item in report.done] == ["1"]
    assert "model.eval()" in why(report, "4")
    assert int(model[4].num_batches_tracked) == int(report.model[4].num_batches_tracked) == 0


def test_what_looks_like_a_batch_norm_and_is_none_that_is_known_is_refused() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.tensor([1.0, -2.0, 0.5, 3.0])[:, None, None])
            self.register_buffer("running_var", torch.tensor([2.0, 1.0, 0.5, 3.0])[:, None, None])

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.running_mean) / self.running_var.sqrt()

    report = fold(Two(norm=Frozen()).eval(), data(2, 3, 6, 6))
    assert "no class that is known" in why(report, "norm")


def test_a_constant_input_and_a_feature_of_no_variance_fold() -> None:
    torch.manual_seed(0)
    model = live(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))
    model[1].running_var[2] = 0.0
    report = fold(model, torch.full((8, 6), 3.25))
    assert [item.where for item in report.done] == ["1"]


class FusedBlock(nn.Module):
    """A residual block whose norms take the residual and the activation along."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.Conv2d(6, 3, 3, 1, 1)
        self.inner = ours.Fused(ours.BatchNorm2d(6), activation)
        self.outer = ours.Fused(ours.BatchNorm2d(3), activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.conv2(self.inner(self.conv1(x))), x)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "silu"])
def test_a_norm_in_fused_folds_and_residual_and_activation_stay(activation: str) -> None:
    torch.manual_seed(0)
    model, x = live(FusedBlock(activation)), data(2, 3, 6, 6)
    report = fold(model, x)
    assert [item.where for item in report.done] == ["inner.norm", "outer.norm"]
    assert type(report.model.outer.norm) is nn.Identity
    outputs_agree(report, model, x)
    assert report.error <= report.bound
    assert report.model_error <= report.model_bound


def test_a_masked_norm_in_fused_is_refused() -> None:
    class Masked(FusedBlock):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv2(self.inner(self.conv1(x)))
            return self.outer(y, x, torch.arange(6) < torch.tensor([2, 6])[:, None, None, None])

    torch.manual_seed(0)
    model, x = live(Masked("relu")), data(2, 3, 6, 6)
    report = fold(model, x)
    assert [item.where for item in report.done] == ["inner.norm"]
    assert "a mask" in why(report, "outer.norm")
    outputs_agree(report, model, x)


@pytest.mark.parametrize("how", ["mask", "lengths"])
def test_a_masked_norm_is_refused_by_name(how: str) -> None:
    class Masked(Two):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([2, 6])
            given = {"lengths": lengths}
            if how == "mask":
                given = {"mask": torch.arange(6) < lengths[:, None, None, None]}
            return self.norm(self.layer(x), **given)

    report = fold(live(Masked(norm=ours.BatchNorm2d(4))), data(2, 3, 6, 6))
    assert f"called with {'a mask' if how == 'mask' else 'lengths'}" in why(report, "norm")
