"""Examining leaves a model as it was, refuses what it cannot use, and knows what it did not see."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from unit.models import features, images, mlp, norms_of, resnet

import normalcy.nn as ours
from normalcy.doctor import examine
from normalcy.errors import ArgumentError, DataError


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def mixed() -> nn.Module:
    """A training network with a frozen norm and a frozen weight."""
    model = resnet().train()
    model[4].bn1.eval()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("with_data", [True, False])
def test_the_model_and_the_random_states_are_left_as_they_were(with_data: bool) -> None:
    model = mixed()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    needs = [p.requires_grad for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(*images(20))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002 - kept
    examine(model, loader if with_data else None, loss=loss, optimizer=optimizer)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # noqa: NPY002 - the same
    assert modes == [m.training for m in model.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert needs == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_an_examination_is_the_same_twice() -> None:
    torch.manual_seed(0)
    model, data = mlp(), features(100)
    one, two = (examine(model, data, loss=loss) for _ in range(2))
    assert one.findings == two.findings
    assert one.loss == two.loss
    assert one.sites == two.sites


def test_data_in_every_form_give_the_same_findings() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), features(96)
    dataset = torch.utils.data.TensorDataset(x, y)
    pairs = list(zip(x.split(32), y.split(32), strict=True))
    forms: list[Any] = [
        pairs,
        iter(pairs),
        (pair for pair in pairs),
        torch.utils.data.DataLoader(dataset, batch_size=32),
        lambda: iter(pairs),
    ]
    found = [examine(model, form, loss=loss) for form in forms]
    assert all(each.findings == found[0].findings and each.loss == found[0].loss for each in found)
    assert len(found[0].having("initial-statistics")) == 2


def test_held_out_data_may_come_as_a_generator() -> None:
    torch.manual_seed(0)
    model, held_out = mlp(), features(40, seed=5)

    def once() -> Iterator[Any]:
        yield held_out

    got = examine(model, features(64), loss=loss, judge_on=once()).loss
    assert got == examine(model, features(64), loss=loss, judge_on=held_out).loss
    assert got is not None
    with torch.no_grad():
        right = float(F.cross_entropy(model.eval()(held_out[0]), held_out[1]))
    assert abs(got.eval - right) < 1e-6 * abs(right)


def gone() -> Iterator[Tensor]:
    yield from ()


X, Y = features(20)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "have no batch"),
        (gone(), "have no batch"),
        ([X, X], "probably one batch"),
        (X * torch.nan, "not finite"),
        ((X.clone().index_fill_(0, torch.tensor([3]), torch.inf), Y), "10 of 200 values not finite"),
        (X[:, :4], "raised RuntimeError"),
        (X[:0], "is empty"),
        (X.numpy(), "torch.from_numpy"),
        ("names.txt", "the data are a str"),
        (7, "the data are an int"),
        ({"a": X}, "raised TypeError"),
    ],
    ids=range(11),
)
def test_data_that_cannot_be_used_are_refused_with_a_sentence(data: Any, said: str) -> None:
    model = mlp()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError, match=said) as caught:
        examine(model, data)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": 3}, "of type int"),
        ({"model": nn.Linear}, "the class Linear"),
        ({"model": nn.LazyLinear(2)}, "no shape yet"),
        ({"model": nn.BatchNorm1d(10, device="meta")}, "no values"),
        ({"loss": 3}, "loss is of type int"),
        ({"call": "forward"}, "call is of type str"),
        ({"optimizer": [1]}, "the optimizer is of type list"),
    ],
    ids=range(7),
)
def test_arguments_of_a_wrong_kind_are_refused_with_a_sentence(arguments: dict[str, Any], said: str) -> None:
    given = {"model": mlp(), "data": X} | arguments
    with pytest.raises(ArgumentError, match=said):
        examine(**given)
    without = {name: value for name, value in given.items() if name != "data"}
    with pytest.raises(ArgumentError, match=said):
        examine(**without)


def test_a_loss_that_does_not_fit_is_refused_with_a_sentence() -> None:
    with pytest.raises(DataError, match=r"loss\(output, batch\) raised"):
        examine(mlp(), (X, Y[:3]), loss=loss)


def test_one_value_per_channel_is_a_finding_and_no_crash() -> None:
    for training in (True, False):
        found = examine(mlp().train(training), features(1), loss=loss)
        assert {f.severity for f in found.having("too-few-values")} == {"error"}
        (note,) = found.notes
        assert note.startswith("No statistics were measured: 1 (BatchNorm1d) gets one value per channel")
        assert found.loss is not None
        assert all(site.gap is None for site in found.sites)


@pytest.mark.parametrize("last", [1, 2])
def test_a_last_batch_of_one_is_left_out_and_told(last: int) -> None:
    rows, x = 54 + last, features(60)[0]
    model = nn.Sequential(nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8)).train()
    for _ in range(90):
        model(x[:54])
    found = examine(model.eval(), iter(x[:rows].split(18)), loss=lambda y, _: y.square().mean())
    assert found["1"].gap is not None
    if last == 2:
        assert found.findings == ()
        return
    (finding,) = found.findings
    assert (finding.code, finding.where, finding.severity) == ("too-few-values", "batch 4", "warning")
    assert (finding.evidence["batches_left_out"], finding.evidence["of"]) == (1, 4)
    assert finding.evidence["first"].startswith("1 (BatchNorm1d) gets one value per channel")
    assert "drop_last=True" in finding.remedy
    same = examine(model, iter(x[:54].split(18)), loss=lambda y, _: y.square().mean())
    assert (same["1"].gap, same.loss) == (found["1"].gap, found.loss)


def test_held_out_data_of_single_examples_leave_the_loss_with_one_source() -> None:
    found = examine(mlp().eval(), X, loss=lambda y, _: y.square().mean(), judge_on=iter(X[:5].split(1)))
    assert found.loss.eval == found.loss.batch
    assert any("loss with each batch's own statistics was not measured" in note for note in found.notes)


class MaskedNet(nn.Module):
    """A norm over time whose mask is part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ours.BatchNorm1d(3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.norm(batch["x"], mask=batch["mask"])


def test_a_mask_that_leaves_one_value_everywhere_is_a_finding() -> None:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)) * 2 + 7
    mask = torch.zeros(4, 1, 6, dtype=torch.bool)
    mask[1, 0, 2] = True
    (finding,) = examine(MaskedNet().eval(), {"x": x, "mask": mask}).having("too-few-values")
    assert (finding.where, finding.severity) == ("every batch", "error")
    assert "norm (BatchNorm1d) gets one value per channel" in finding.cause


def test_padding_is_no_part_of_the_statistics_that_are_judged() -> None:
    x = torch.randn(40, 3, 6, generator=torch.Generator().manual_seed(0)) * 2 + 7
    mask = (torch.arange(6) < torch.arange(1, 41)[:, None] % 5 + 1)[:, None]
    valid = x.movedim(1, -1)[mask.squeeze(1)]
    model = MaskedNet().eval()
    model.norm.running_mean.copy_(valid.mean(0))
    model.norm.running_var.copy_(valid.var(0))
    model.norm.num_batches_tracked.fill_(1000)
    assert examine(model, {"x": torch.where(mask, x, 1e3), "mask": mask}).findings == ()


def test_a_channel_that_is_masked_throughout_has_no_gap_and_raises_no_alarm() -> None:
    x = torch.randn(40, 3, 6, generator=torch.Generator().manual_seed(0)) * 2 + 7
    mask = torch.tensor([True, False, True])[:, None].expand(40, 3, 6)
    model = MaskedNet().eval()
    model.norm.running_mean.fill_(7)
    model.norm.running_var.fill_(4)
    model.norm.num_batches_tracked.fill_(1000)
    found = examine(model, {"x": x, "mask": mask})
    assert found.findings == ()
    assert found["norm"].gap is None
    assert "1 channels of norm have no valid value" in found.notes[0]


class Everything(nn.Module):
    """Norms: shared, never reached, keeping nothing, synchronized, functional, and without a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.BatchNorm1d(10), nn.BatchNorm1d(3)
        self.alias = self.twice
        self.plain = nn.BatchNorm1d(10, track_running_stats=False)
        self.sync, self.uncounted = nn.SyncBatchNorm(10), nn.BatchNorm1d(10)
        self.uncounted.num_batches_tracked = None
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("var", torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.uncounted(self.sync(self.plain(self.alias(self.twice(x))))) + 3
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def test_every_kind_of_batch_norm_is_listed_and_what_was_not_looked_at_is_said() -> None:
    found = examine(Everything().eval(), X)
    by = {site.where: site for site in found.sites}
    assert list(by) == ["twice", "plain", "sync", "uncounted", "batch_norm", "never"]
    assert {where: site.calls for where, site in by.items()} == {
        "twice": 2, "plain": 1, "sync": 1, "uncounted": 1, "batch_norm": 1, "never": None,
    }  # fmt: skip
    assert [where for where, site in by.items() if site.gap] == ["twice", "sync", "uncounted"]
    assert [item.where for item in found.not_seen] == ["never"]
    (note,) = found.having("unmeasured-statistics")
    assert (note.where, note.severity, note.evidence["function"]) == (
        "batch_norm", "note", "batch_norm in the model itself",
    )  # fmt: skip
    (note,) = found.having("never-called")
    assert note.where == "never"
    assert {f.where for f in found.having("initial-statistics")} == {"twice", "sync", "uncounted"}
    assert by["uncounted"].updates is None
    assert by["uncounted"].weight_left is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_every_dtype_are_measured(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp().to(dtype)
    found = examine(model, X.to(dtype))
    assert [f.code for f in found.findings] == ["initial-statistics"] * 2
    x = model[0](X.to(dtype)).detach().double()
    own = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    right = (own - x / (1 + 1e-5) ** 0.5).square().mean().sqrt()
    assert abs(found["1"].gap.rms / float(right) - 1) < 1e-6


def test_a_norm_that_is_the_whole_model_is_examined() -> None:
    found = examine(ours.BatchNorm1d(10), X)
    assert [(f.code, f.where) for f in found.findings] == [("initial-statistics", "")]


def test_the_channel_to_show_can_be_chosen() -> None:
    model = mlp()
    norms = norms_of(model)
    found = examine(model, X, channels={"1": 4})
    assert found["1"].sample.channel == 4
    assert found["5"].sample.channel == found["5"].gap.channel
    assert set(norms) == {"1", "5"}


def test_progress_is_told() -> None:
    told = []
    examine(mlp(), iter(X.split(10)), progress=lambda *args: told.append(args[:2]))
    assert told == [("measuring statistics", 1), ("measuring statistics", 2)]


def test_an_examination_is_asked_by_place_code_and_severity() -> None:
    found = examine(mlp(), X)
    assert found.worst() == "error"
    assert found["5"].channels == 24
    assert [f.where for f in found.having("initial-statistics", "dead-bias")] == ["1", "5"]
    assert examine(nn.LayerNorm(10), X).worst() is None
    with pytest.raises(KeyError):
        found["nowhere"]
