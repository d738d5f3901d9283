"""The layers as drop-ins: state, types, tools, and the change of a model's layers to and fro."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from laws.tables import NORMS, Row
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normalcy
from normalcy import nn as ours
from normalcy.conventions import FLAX, KERAS, TORCH, replace
from normalcy.errors import ArgumentError, ShapeError, TypeMismatchError

TORCHS = [row for row in NORMS if row.name != "layer-channels"]


def torchs(row: Row, layer: nn.Module) -> nn.Module:
    """PyTorch's layer of the same class, with the same state."""
    other = copy.deepcopy(layer)
    ours.release(other)
    assert type(other).__module__.startswith("torch.nn")
    return other


@pytest.mark.parametrize("row", TORCHS, ids=str)
def test_a_layer_is_an_instance_of_pytorchs_and_exchanges_state_with_it(row: Row) -> None:
    layer = row.layer()
    other = torchs(row, row.layer(seed=7))
    assert isinstance(layer, type(other))
    assert list(layer.state_dict()) == list(other.state_dict())
    other.load_state_dict(layer.state_dict())
    back = row.layer(seed=9)
    back.load_state_dict(other.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(layer.state_dict().values(), back.state_dict().values(), strict=True)
    )
    assert repr(layer) == repr(other)


@pytest.mark.parametrize("row", TORCHS, ids=str)
def test_the_constructor_has_pytorchs_arguments_in_order(row: Row) -> None:
    mine, theirs = (
        list(inspect.signature(type(x)).parameters) for x in (row.layer(), torchs(row, row.layer()))
    )
    shared = [name for name in theirs if name != "bias"]
    assert [name for name in mine if name != "bias"][: len(shared)] == shared
    assert mine[-1] == "convention"


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_a_layer_survives_copying_pickling_and_saving(row: Row) -> None:
    layer, x = row.layer(), row.input()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    right = row.layer()(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):  # noqa: S301 - its own bytes
        assert torch.equal(other(x), right)


@pytest.mark.parametrize("row", NORMS, ids=str)
def test_moving_to_another_dtype_moves_parameters_and_statistics(row: Row) -> None:
    layer = row.layer().bfloat16()
    assert {t.dtype for t in layer.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    assert layer(row.input(torch.bfloat16)).dtype == torch.bfloat16


def test_adopt_and_release_are_inverse_and_keep_every_object() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Sequential(nn.LayerNorm(5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    modules, parameters = list(model.modules()), list(model.parameters())
    x = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0)) + 5
    before = copy.deepcopy(model)(x)
    report = ours.adopt(model)
    assert report.model is model
    assert [item.where for item in report.done] == ["1", "2", "3.0"]
    assert [type(m) for m in (model[1], model[2], model[3][0])] == [
        ours.BatchNorm2d,
        ours.GroupNorm,
        ours.LayerNorm,
    ]
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)  # two float32 norms one after another
    assert calls == ["hook", "hook"]
    assert model[1].num_batches_tracked == 1
    assert not ours.adopt(model).done
    assert [item.where for item in ours.release(model).done] == ["1", "2", "3.0"]
    assert [type(m) for m in (model[1], model[2], model[3][0])] == [
        nn.BatchNorm2d,
        nn.GroupNorm,
        nn.LayerNorm,
    ]


def test_an_adopted_batch_norm_continues_its_statistics() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 4, generator=generator) + 3 for _ in range(4)]
    mixed, alone = nn.BatchNorm1d(4, momentum=None), ours.BatchNorm1d(4, momentum=None)
    for k, x in enumerate(batches):
        if k == 2:
            ours.adopt(mixed)
        mixed(x)
        alone(x)
    assert mixed.num_batches_tracked == alone.num_batches_tracked == 4
    torch.testing.assert_close(mixed.running_mean, alone.running_mean)
    torch.testing.assert_close(mixed.running_var, alone.running_var)


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnOfOurs(ours.BatchNorm1d):
    pass


def test_what_is_not_exactly_pytorchs_is_left_and_reported() -> None:
    constrained = parametrizations.weight_norm(nn.LayerNorm(4), dim=None)
    model = nn.Sequential(Own(4), nn.SyncBatchNorm(4), constrained, OwnOfOurs(4))
    kinds = [type(m) for m in model]
    report = ours.adopt(model)
    assert not report.done
    assert {item.where: item.why.split()[0] for item in report.refused} == {
        "0": "Own",
        "1": "SyncBatchNorm",
        "2": "its",
        "3": "OwnOfOurs",
    }
    assert [type(m) for m in model] == kinds
    assert [item.where for item in ours.release(model).refused] == ["3"]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (ours.LayerNorm2d(4), "no layer norm over the channels"),
        (ours.BatchNorm1d(4, convention=KERAS), "stores the biased variance"),
        (ours.BatchNorm1d(4, convention=replace(TORCH, debias=True)), "debiased"),
        (ours.BatchNorm1d(4, momentum=None, convention=replace(TORCH, cumulative="values")), "pools values"),
        (ours.InstanceNorm1d(4, momentum=None, track_running_stats=True), "never updates"),
    ],
)
def test_what_pytorch_cannot_express_is_not_released(layer: nn.Module, why: str) -> None:
    model, kind = nn.Sequential(layer), type(layer)
    report = ours.release(model)
    assert not report.done
    assert why in report.refused[0].why
    assert type(model[0]) is kind


def test_a_convention_that_differs_in_defaults_only_is_released() -> None:
    model = nn.Sequential(ours.LayerNorm(4, convention=FLAX))
    assert ours.release(model).done
    assert model[0].eps == 1e-6
    assert "convention" not in vars(model[0])


@pytest.mark.parametrize("what", [None, "model", {}])
def test_adopting_what_is_no_module_is_refused(what: object) -> None:
    with pytest.raises(ArgumentError, match=r"needed: a torch\.nn\.Module"):
        ours.adopt(what)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (ours.BatchNorm1d(3), (3,), r"BatchNorm1d\(3\) got a 1-D input of shape \(3,\); needed: 2-D or 3-D"),
        (ours.BatchNorm2d(3), (2, 3, 4), r"BatchNorm2d\(3\) got a 3-D input .* needed: 4-D"),
        (
            ours.BatchNorm2d(3),
            (2, 5, 4, 3),
            r"got 5 channels.*needed: 3 channels on axis 1\. Is the input channels-last",
        ),
        (ours.InstanceNorm1d(3, affine=True), (4, 5), r"got 4 channels.*needed: 3 channels on axis 0"),
        (
            ours.LayerNorm((3, 4)),
            (2, 3, 5),
            r"LayerNorm got an input of shape \(2, 3, 5\); needed: \(\.\.\., 3, 4\)",
        ),
        (ours.RMSNorm(4), (2, 3), r"RMSNorm got an input of shape \(2, 3\); needed: \(\.\.\., 4\)"),
        (ours.LayerNorm2d(3), (2, 4, 5), r"LayerNorm2d\(3\) got .* needed: \(examples, 3, \*space\)"),
        (ours.GroupNorm(2, 4), (2, 6, 5), r"GroupNorm\(2, 4\) got weight of shape \(4,\).*\(2, 6, 5\)"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_the_layers_name(
    layer: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        layer(torch.randn(shape))


def test_a_convention_sets_defaults_and_what_is_stored() -> None:
    layer = ours.BatchNorm1d(1, momentum=0.9, convention=KERAS)
    assert (layer.eps, layer.momentum) == (1e-3, 0.1)
    layer(torch.tensor([[1e3 + 2.0], [1e3 + 4.0]]))
    assert layer.running_var.item() == pytest.approx(0.9 + 0.1 * 1.0, rel=1e-6)
    assert "convention=Keras 3" in repr(layer)
    assert "convention" not in repr(ours.BatchNorm1d(1))


def test_momentum_is_read_at_call_time() -> None:
    layer = ours.BatchNorm1d(1)
    layer.momentum = 1.0
    layer(torch.tensor([[1e3 + 2.0], [1e3 + 4.0]]))
    assert layer.running_mean.item() == 1003


@pytest.mark.parametrize("momentum", [2, -1.0, float("nan"), "0.1"])
def test_a_momentum_set_to_nonsense_is_refused_when_it_is_used(momentum: object) -> None:
    layer = ours.BatchNorm1d(2)
    layer.momentum = momentum
    with pytest.raises(ArgumentError, match=r"BatchNorm1d\(2\).momentum=.*; needed: a number from 0 to 1"):
        layer(torch.tensor([[2.0, 1e3], [4.0, -1e3]]))
    assert layer.running_mean.tolist() == [0, 0]
    assert layer.eval()(torch.tensor([[2.0, 1e3]])).isfinite().all()


@pytest.mark.parametrize("strict", [True, False])
def test_pooled_statistics_are_not_loaded_without_their_count(strict: bool) -> None:
    x = torch.tensor([[2.0, 1e3], [4.0, -1e3]])
    trained = nn.BatchNorm1d(2)
    trained(x)
    layer = ours.BatchNorm1d(2, momentum=None, convention=replace(TORCH, cumulative="values"))
    with pytest.raises(RuntimeError, match="num_values_tracked is not in the state"):
        layer.load_state_dict(trained.state_dict(), strict=strict)
    fresh = nn.BatchNorm1d(2)
    layer.load_state_dict(fresh.state_dict(), strict=False)
    layer(x)
    assert layer.running_mean.tolist() == [3, 0]


def test_resetting_forgets_everything_counted() -> None:
    layer = ours.BatchNorm1d(2, momentum=None, convention=replace(TORCH, cumulative="values"))
    layer(torch.tensor([[2.0, 1e3], [4.0, -1e3]]))
    assert layer.num_values_tracked == 2
    layer.reset_running_stats()
    assert (int(layer.num_values_tracked), int(layer.num_batches_tracked)) == (0, 0)
    assert layer.running_var.tolist() == [1, 1]


def test_layer_norm_over_channels_is_layer_norm_of_the_channels_moved_last() -> None:
    x = torch.randn(2, 6, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 50
    layer = ours.LayerNorm2d(6, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    last = nn.functional.layer_norm(x.movedim(1, -1), (6,), layer.weight, layer.bias).movedim(-1, 1)
    torch.testing.assert_close(layer(x), last, rtol=1e-10, atol=1e-10)
    assert layer(x).std() > 0.1
    assert ours.LayerNorm2d(6, elementwise_affine=False).weight is None
    assert ours.LayerNorm2d(6, bias=False).bias is None


def test_convert_sync_batchnorm_takes_the_layers_as_pytorchs_own() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(ours.BatchNorm2d(4)))
    assert type(model[0]) is nn.SyncBatchNorm


def test_layers_call_the_same_routine_as_the_functions() -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    layer = ours.BatchNorm1d(3)
    assert torch.equal(layer(x), normalcy.batch_norm(x, None, None, layer.weight, layer.bias, training=True))


def test_a_lazy_layer_is_reported_and_adopted_once_it_has_a_class() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    (item,) = ours.adopt(model).refused
    assert "lazy" in item.why
    model(torch.randn(8, 3))
    assert [item.where for item in ours.adopt(model).done] == ["0"]
    assert type(model[0]) is ours.BatchNorm1d


def test_layers_run_on_the_meta_device_and_give_shapes() -> None:
    for layer, shape in (
        (ours.BatchNorm1d, (4, 3)),
        (ours.BatchNorm2d, (4, 3, 2, 5)),
        (ours.LayerNorm, (4, 3)),
    ):
        y = layer(3, device="meta")(torch.empty(shape, device="meta"))
        assert y.is_meta
        assert y.shape == shape


def test_a_sparse_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeMismatchError, match=r"sparse_coo; needed: a dense tensor\. Use x\.to_dense"):
        ours.LayerNorm(3)(torch.eye(3).to_sparse())
