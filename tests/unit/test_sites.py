"""Sites: what normalizes where, from one recorded pass; a bias is called dead only where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from torch.nn.utils import parametrizations

from normalcy import nn as ours
from normalcy import sites
from normalcy.flow import record
from normalcy.sites import DeadBias, Sites, find


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 1.7 + 2.5


def look(model: nn.Module, x: Tensor) -> Sites:
    return find(model, record(model, lambda: model(x)))


class Wired(nn.Module):
    """A convolution, a norm, and a forward between them given as a function of the module and the input."""

    def __init__(self, forward, layer: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Conv2d(3, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)
        self.other = nn.BatchNorm2d(4)
        self.wired = forward

    def forward(self, x: Tensor) -> object:
        return self.wired(self, x)


def verdict(
    forward, layer: nn.Module | None = None, norm: nn.Module | None = None, x: Tensor | None = None
) -> DeadBias:
    found = look(Wired(forward, layer, norm), data(4, 3, 6, 6) if x is None else x)
    (bias,) = [b for b in found.biases if b.where == "layer"]
    return bias


def test_a_site_tells_what_it_is() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6)
    )
    model.append(nn.Flatten()).append(nn.LayerNorm(6 * 16)).append(nn.RMSNorm(96))
    told = [
        (s.where, s.kind, s.cls, s.channels, s.values, s.tracks, s.calls)
        for s in look(model, data(2, 3, 6, 6))
    ]
    assert told == [
        ("1", "batch", "BatchNorm2d", 6, (32,), True, 1),
        ("3", "group", "GroupNorm", 6, (48,), False, 1),
        ("4", "instance", "InstanceNorm2d", 6, (16,), False, 1),
        ("6", "layer", "LayerNorm", 96, (96,), False, 1),
        ("7", "rms", "RMSNorm", 96, (96,), False, 1),
    ]


def test_the_layers_of_this_library_and_plain_subclasses_are_known() -> None:
    class Plain(nn.BatchNorm2d):
        pass

    model = nn.Sequential(
        ours.BatchNorm2d(3), Plain(3), ours.LayerNorm2d(3), ours.GroupNorm(1, 3), ours.InstanceNorm2d(3)
    )
    found = look(model, data(2, 3, 5, 5))
    assert [s.kind for s in found] == ["batch", "batch", "layer", "group", "instance"]
    assert [s.values for s in found] == [(50,), (50,), (3,), (75,), (25,)]
    assert not found.unrecognized
    assert sites.kind_of(nn.SyncBatchNorm(3)) == "batch"


def test_the_producer_is_named_or_said_to_be_unknown() -> None:
    found = look(
        nn.Sequential(
            nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)
        ).eval(),
        data(8, 3),
    )
    first, second, third = found
    assert (first.producer.path, first.producer.why) == (None, "it is the model's input")
    assert (second.producer.path, second.producer.op, type(second.producer.module)) == (
        "1",
        "linear",
        nn.Linear,
    )
    assert (third.producer.path, third.producer.op, third.producer.module) == ("3", "relu", None)
    assert not first.fold.ok
    assert "model's input" in first.fold.why


def test_a_norm_called_twice_and_registered_twice_is_one_site() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.append(model[1])
    found = look(model, data(8, 3))
    assert [(s.where, s.calls, s.values) for s in found] == [("1", 2, (8, 8))]
    assert not found["1"].fold.ok


def test_functional_norms_are_sites_of_their_own() -> None:
    def forward(m: Wired, x: Tensor) -> Tensor:
        y = F.batch_norm(m.layer(x), None, None, training=True)
        y = F.batch_norm(y, m.norm.running_mean, m.norm.running_var, training=m.training)
        return F.group_norm(F.layer_norm(y, (6, 6)), 2)

    found = look(Wired(forward), data(4, 3, 6, 6))
    assert [(s.where, s.kind, s.values, s.tracks) for s in found] == [
        ("batch_norm", "batch", (144,), False),
        ("batch_norm (call 2)", "batch", (144,), True),
        ("layer_norm", "layer", (36,), False),
        ("group_norm", "group", (72,), False),
    ]
    assert found["batch_norm"].dead_bias.ok
    assert {item.where for item in found.not_seen} == {"norm", "other"}


def test_what_only_looks_like_a_norm_is_listed_never_skipped() -> None:
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.running_mean[:, None, None]

    class LlamaRMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.pow(2).mean(-1, keepdim=True).rsqrt()

    class Scaled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model = nn.Sequential(FrozenBatchNorm2d(), LlamaRMSNorm(), Scaled(3), PreNorm(), nn.LocalResponseNorm(2))
    model.append(parametrizations.weight_norm(nn.Conv2d(3, 4, 1)))
    found = look(model, data(2, 3, 5, 5))
    assert [item.where for item in found.unrecognized] == ["0", "1", "2", "4"]
    assert "running statistics" in found.unrecognized[0].why
    assert "forward of its own" in found.unrecognized[2].why
    assert [s.where for s in found] == ["3.norm"]


def test_a_functional_normalizer_that_is_not_known_is_listed() -> None:
    found = look(Wired(lambda m, x: F.local_response_norm(m.layer(x), 2)), data(2, 3, 5, 5))
    assert [item.where for item in found.unrecognized] == ["local_response_norm"]


def test_a_model_without_norms_has_no_sites() -> None:
    found = look(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), data(4, 3))
    assert len(found) == 0
    assert (found.biases, found.unrecognized, found.not_seen) == ((), (), ())


def of(wired):
    """A forward that is given the layer's output in place of the model's input."""
    return lambda m, x: wired(m, m.layer(x))


DEAD = {
    "directly": lambda m, x: m.norm(m.layer(x)),
    "max pooling": lambda m, x: m.norm(F.max_pool2d(m.layer(x), 3, 2, 1)),
    "average pooling": lambda m, x: m.norm(F.avg_pool2d(m.layer(x), 2)),
    "average pooling, padding left out": lambda m, x: m.norm(
        F.avg_pool2d(m.layer(x), 3, 1, 1, count_include_pad=False)
    ),
    "adaptive pooling": lambda m, x: m.norm(F.adaptive_avg_pool2d(m.layer(x), 2)),
    "residual": lambda m, x: F.relu(m.norm(m.layer(x) + x.mean(1, keepdim=True))),
    "residual in place": lambda m, x: m.norm(m.layer(x).add_(x.mean(1, keepdim=True))),
    "onto a residual in place": lambda m, x: m.norm(torch.zeros(4, 4, 6, 6).add_(m.layer(x))),
    "twice itself": of(lambda m, y: m.norm(y + y)),
    "two norms": of(lambda m, y: m.norm(y) + m.other(y)),
    "both halves": of(lambda m, y: m.norm(torch.cat([*y.chunk(2, 1)][::-1], 1))),
    "reflected padding": lambda m, x: m.norm(F.pad(m.layer(x), (1, 1, 1, 1), mode="reflect")),
    "nearest upsampling": lambda m, x: m.norm(F.interpolate(m.layer(x), scale_factor=2)),
    "view and permute": lambda m, x: m.norm(
        m.layer(x).permute(0, 2, 3, 1).reshape(4, 36, 1, 4).permute(0, 3, 1, 2)
    ),
    "slice": lambda m, x: m.norm(m.layer(x)[:, :, 1:-1]),
    "same dtype": lambda m, x: m.norm(m.layer(x).to(torch.float32).contiguous()),
    "mean over space": lambda m, x: m.norm(m.layer(x).mean((2, 3), keepdim=True)),
    "doubled": of(lambda m, y: m.norm(2 * y)),
    "halved in place": of(lambda m, y: m.norm(y.div_(2))),
    "negated": of(lambda m, y: m.norm(-y)),
    "subtracted from a number": of(lambda m, y: m.norm(3 - y)),
    "subtracted from the input": lambda m, x: m.norm(x.mean(1, keepdim=True) - 0.5 * m.layer(x)),
    "added with a factor": lambda m, x: m.norm(torch.add(x.mean(1, keepdim=True), m.layer(x), alpha=-3)),
    "sum over space": lambda m, x: m.norm(m.layer(x).sum((2, 3), keepdim=True)),
    "sum pooling": lambda m, x: m.norm(F.avg_pool2d(m.layer(x), 2) * 4),
    "shape only": of(lambda m, y: m.norm(y) + torch.zeros_like(y)),
}


def edited(m: Wired, x: Tensor) -> Tensor:
    y = m.layer(x)
    y.view(-1)[:7].mul_(2)
    return m.norm(y) + m.norm(m.layer(x))


def edited_under(m: Wired, x: Tensor) -> Tensor:
    y = m.layer(x)
    view = y.flatten(1)
    return m.norm(y.add_(1.0)) * view.tanh().mean() + m.norm(m.layer(x))


ALIVE = {
    "relu": (lambda m, x: m.norm(F.relu(m.layer(x))) + m.norm(m.layer(x)), "relu"),
    "relu in place": (lambda m, x: m.norm(F.relu_(m.layer(x))) + m.norm(m.layer(x)), "relu"),
    "dropout": (lambda m, x: m.norm(F.dropout(m.layer(x))) + m.norm(m.layer(x)), "dropout"),
    "dropout in evaluation": (
        lambda m, x: m.norm(F.dropout(m.layer(x), training=False)) + m.norm(m.layer(x)),
        "dropout",
    ),
    "second consumer": (of(lambda m, y: m.norm(y) * y.sigmoid()), "sigmoid"),
    "residual's second consumer": (of(lambda m, y: m.norm(y + 1) * (y + 1).tanh()), "tanh"),
    "model's output": (of(lambda m, y: (m.norm(y), y)), "output"),
    "view is an output": (of(lambda m, y: {"a": m.norm(y), "b": y.flatten(1)}), "output"),
    "average over padding": (
        of(lambda m, y: m.norm(y) + m.norm(F.avg_pool2d(y, 3, 1, 1))),
        "avg_pool2d",
    ),
    "zero padding": (of(lambda m, y: m.norm(F.pad(y, (1, 1))).mean() + m.norm(y)), "pad"),
    "bias used elsewhere": (lambda m, x: m.norm(m.layer(x)) + m.layer.bias.sum(), "also used"),
    "item": (of(lambda m, y: m.norm(y) * y.mean().item()), ""),
    "numpy": (of(lambda m, y: m.norm(y) + float(y.numpy().mean())), "numpy"),
    "edit through a view": (edited, ""),
    "edit under a view": (edited_under, "share memory"),
    "weight alike": (
        lambda m, x: m.norm(m.layer(x)) + m.norm(x.mean(1, True).expand(-1, 4, -1, -1)),
        "alike",
    ),
    "permuted by an index": (
        of(lambda m, y: m.norm(y[:, torch.tensor([1, 0, 3, 2])]) + m.norm(y)),
        "other values",
    ),
    "scaled": (
        of(lambda m, y: m.norm(torch.add(torch.ones(6), y, alpha=2)) + m.norm(y)),
        "not receive it alike",
    ),
    "scaled by a tensor": (
        of(lambda m, y: m.norm(y * torch.tensor([1.0, 2, 3, 4])[:, None, None]) + m.norm(y)),
        "does not pass a shift on",
    ),
    "divided by": (of(lambda m, y: m.norm(1 / y) + m.norm(y)), "rdiv"),
    "squared": (of(lambda m, y: m.norm(y * y) + m.norm(y)), "unchanged"),
    "rounded down": (
        of(lambda m, y: m.norm(torch.div(y, 2, rounding_mode="floor")) + m.norm(y)),
        "more than",
    ),
    "summed over channels too": (of(lambda m, y: m.norm(y + y.sum((1, 2, 3), True)) + m.norm(y)), "mixes"),
    "transposed axes": (
        of(lambda m, y: m.norm(y[:, :, :4, :4].transpose(1, 2)).mean() + m.norm(y)),
        "axis",
    ),
}


@pytest.mark.parametrize("name", DEAD)
def test_a_bias_that_every_path_subtracts_is_dead(name: str) -> None:
    with torch.no_grad():
        found = verdict(DEAD[name])
    assert found.ok, found.why
    assert "norm" in [r.where for r in found.removals]


@pytest.mark.parametrize("name", DEAD)
def test_what_is_called_dead_has_no_gradient(name: str) -> None:
    """The definition of dead, executed: 1e-4 of the weight's gradient covers float32's cancellation."""
    model = Wired(DEAD[name])
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([1.0, 2.0, -1.5, 0.7]))
    out = model(data(4, 3, 6, 6))
    (out * torch.linspace(0, 1, out.numel()).reshape(out.shape).sin()).sum().backward()
    assert model.layer.bias.grad.abs().max() <= 1e-4 * model.layer.weight.grad.abs().max()


@pytest.mark.parametrize("name", ALIVE)
def test_a_bias_that_some_path_keeps_is_not_dead(name: str) -> None:
    forward, said = ALIVE[name]
    with torch.no_grad():
        found = verdict(forward)
    assert not found.ok
    assert said in found.why
    assert not found.removals


@pytest.mark.parametrize(
    ("norm", "dead"),
    [
        (nn.BatchNorm2d(4), True),
        (nn.BatchNorm2d(4, track_running_stats=False), True),
        (nn.BatchNorm2d(4).eval(), False),
        (nn.SyncBatchNorm(4), None),
        (nn.InstanceNorm2d(4), True),
        (nn.InstanceNorm2d(4, track_running_stats=True), True),
        (nn.InstanceNorm2d(4, track_running_stats=True).eval(), False),
        (nn.GroupNorm(4, 4), True),
        (nn.GroupNorm(2, 4), False),
        (nn.LayerNorm([4, 6, 6]), False),
        (ours.LayerNorm2d(4), False),
        (ours.BatchNorm2d(4), True),
        (ours.BatchNorm2d(4).eval(), False),
    ],
    ids=str,
)
def test_only_a_norm_with_a_mean_of_its_own_for_each_channel_erases_a_bias(
    norm: nn.Module, dead: bool | None
) -> None:
    if dead is None:  # runs on a GPU only; what kind it is needs no pass
        assert sites.kind_of(norm) == "batch"
        return
    assert verdict(lambda m, x: m.norm(m.layer(x)), norm=norm).ok is dead


def test_in_evaluation_mode_a_tracking_batch_norm_counts_as_one_that_will_train() -> None:
    model = Wired(lambda m, x: m.norm(m.layer(x)))
    assert look(model.eval(), data(4, 3, 6, 6))["norm"].dead_bias.ok
    tracked = Wired(lambda m, x: m.norm(m.layer(x)), norm=nn.InstanceNorm2d(4, track_running_stats=True))
    assert not look(tracked.eval(), data(4, 3, 6, 6))["norm"].dead_bias.ok


def test_a_linear_layers_bias_lies_on_the_last_axis() -> None:
    layer = nn.Linear(5, 4)
    good = verdict(lambda m, x: m.norm(m.layer(x).transpose(1, 2)), layer, nn.BatchNorm1d(4), data(6, 4, 5))
    bad = verdict(lambda m, x: m.norm(m.layer(x)), layer, nn.BatchNorm1d(4), data(6, 4, 5))
    assert good.ok
    assert not bad.ok
    assert "axis" in bad.why


def test_a_flattened_bias_is_followed_into_every_place_it_takes() -> None:
    found = verdict(lambda m, x: m.norm(m.layer(x).flatten(1)), norm=nn.BatchNorm1d(144))
    (removal,) = found.removals
    assert removal.channels == tuple(range(144))
    assert removal.sources == tuple(i // 36 for i in range(144))


def test_concatenation_gives_the_offset_and_subtraction_the_sign() -> None:
    found = verdict(
        lambda m, x: m.norm(torch.cat([x, 1 - x[:, :1], x[:, :1] - m.layer(x)], 1)), norm=nn.BatchNorm2d(8)
    )
    (removal,) = found.removals
    assert removal.channels == (4, 5, 6, 7)
    assert removal.sources == (0, 1, 2, 3)
    assert removal.factors == (-1.0,) * 4


def test_a_tied_bias_is_dead_only_if_each_use_of_it_is() -> None:
    class Tied(nn.Module):
        def __init__(self, active: bool) -> None:
            super().__init__()
            self.a, self.b, self.n, self.m = (
                nn.Linear(4, 4),
                nn.Linear(4, 4),
                nn.BatchNorm1d(4),
                nn.BatchNorm1d(4),
            )
            self.b.bias = self.a.bias
            self.active = active

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(x)
            return self.n(self.a(x)) + (y.tanh() if self.active else self.m(y))

    assert look(Tied(False), data(8, 4))["n"].dead_bias.ok
    assert not look(Tied(True), data(8, 4))["n"].dead_bias.ok


def test_a_layer_called_twice_is_dead_only_if_all_its_norms_subtract_it() -> None:
    assert verdict(lambda m, x: m.norm(m.layer(x)) + m.other(m.layer(x + 1))).ok
    assert not verdict(lambda m, x: m.norm(m.layer(x)) + m.layer(x + 1)).ok


def test_wiring_verdicts_on_folding() -> None:
    model = Wired(lambda m, x: m.norm(m.layer(x)) + m.other(x[:, :1].expand(-1, 4, -1, -1))).eval()
    found = look(model, data(4, 3, 6, 6))
    assert (found["norm"].fold.ok, found["norm"].fold.producer) == (True, "layer")
    assert not found["other"].fold.ok
    with pytest.raises(KeyError):
        found["missing"]


def test_a_scaled_bias_is_taken_over_as_often_as_the_norm_receives_it() -> None:
    (removal,) = verdict(of(lambda m, y: m.norm(-2 * y.sum((2, 3), keepdim=True) / 8))).removals
    assert removal.factors == (-9.0,) * 4  # 36 places, times −2, over 8


def test_a_functional_norm_names_the_layer_that_lends_it_its_statistics() -> None:
    found = look(
        Wired(lambda m, x: m.other(F.batch_norm(m.layer(x), m.norm.running_mean, m.norm.running_var))),
        data(4, 3, 6, 6),
    )
    assert [(s.where, s.holder) for s in found] == [("batch_norm", "norm"), ("other", None)]
    assert found.idle == frozenset()


def test_a_norm_that_nothing_uses_is_idle() -> None:
    assert look(Wired(lambda m, x: m.norm(m.layer(x))), data(4, 3, 6, 6)).idle == {"other"}
    by_weight = look(Wired(lambda m, x: m.norm(m.layer(x)) * m.other.weight.sum()), data(4, 3, 6, 6))
    assert by_weight.idle == frozenset()


MASKED = {
    "mask by name": lambda m, x: m.norm(m.layer(x), mask=valid(x)),
    "mask by place": lambda m, x: m.norm(m.layer(x), valid(x)),
    "lengths": lambda m, x: m.norm(m.layer(x), lengths=torch.tensor([6, 1, 4, 5])),
    "lengths by place": lambda m, x: m.norm(m.layer(x), None, torch.tensor([6, 1, 4, 5])),
}


def valid(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]) < torch.tensor([6, 1, 4, 5])[:, None, None, None]


@pytest.mark.parametrize("norm", [ours.BatchNorm2d(4), ours.InstanceNorm2d(4), ours.GroupNorm(4, 4)], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_a_norm_with_a_mask_subtracts_the_bias_all_the_same(name: str, norm: nn.Module) -> None:
    found = verdict(MASKED[name], norm=norm)
    assert found.ok, found.why
    model = Wired(MASKED[name], norm=norm)
    out = model(data(4, 3, 6, 6))
    (out * torch.linspace(0, 1, out.numel()).reshape(out.shape).sin()).sum().backward()
    # float32: what is left of a cancelled sum
    assert model.layer.bias.grad.abs().max() <= 1e-4 * model.layer.weight.grad.abs().max()


def test_a_mask_that_is_made_of_what_the_bias_moves_keeps_it_alive() -> None:
    def masking(m: Wired, x: Tensor) -> Tensor:
        y = m.layer(x)
        return m.norm(y, mask=y > 0)

    found = verdict(masking, norm=ours.BatchNorm2d(4))
    assert not found.ok
    assert "gt" in found.why


@pytest.mark.parametrize("name", MASKED)
def test_a_norm_with_a_mask_does_not_fold_and_says_why(name: str) -> None:
    model = Wired(MASKED[name], norm=ours.BatchNorm2d(4)).eval()
    fold = look(model, data(4, 3, 6, 6))["norm"].fold
    assert not fold.ok
    assert "masked places give 0" in fold.why
    assert ("lengths" if "lengths" in name else "a mask") in fold.why


def test_a_mask_of_none_is_no_mask() -> None:
    model = Wired(lambda m, x: m.norm(m.layer(x), mask=None), norm=ours.BatchNorm2d(4)).eval()
    assert look(model, data(4, 3, 6, 6))["norm"].fold.ok
