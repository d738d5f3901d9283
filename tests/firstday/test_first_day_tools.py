"""Training tools: SyncBatchNorm, distributed training on one process, averaged models, their statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from firstday.answers import (
    State,
    answer,
    check_gradients,
    check_output,
    check_statistics,
    check_step,
    cotangent,
)
from firstday.facilities import facility
from firstday.subjects import ALL, PLAIN, Subject, norm_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

from normalcy.errors import NormalcyError


class Model(nn.Module):
    """The layer inside a model, called as the subject is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.layer(*inputs)
        return y


@facility(
    "`SyncBatchNorm.convert_sync_batchnorm`", PLAIN, note="only batch norm changes, as with PyTorch's layers"
)
def test_batch_norm_becomes_sync_batch_norm_and_nothing_else_does(subject: Subject) -> None:
    layer = subject.layer()
    norm = norm_of(layer)
    state = dict(layer.state_dict(keep_vars=True))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Model(layer))
    found = norm_of(model.layer)
    if subject.norm != "batch":
        assert model.layer is layer
        return
    assert type(found) is nn.SyncBatchNorm
    assert (found.eps, found.momentum) == (norm.eps, norm.momentum)
    assert all(model.layer.state_dict(keep_vars=True)[name] is tensor for name, tensor in state.items())
    check_step(subject, model.layer, call=model, standard=True)
    if subject.fused:
        assert model.layer is layer
        inputs = subject.inputs()
        with pytest.raises(NormalcyError, match="SyncBatchNorm"):
            model(*inputs, torch.rand(inputs[0].shape) > 0.3)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@facility("`DistributedDataParallel`, one process", [s for s in ALL if s.has_parameters()])
def test_distributed_training_on_one_process_is_training(subject: Subject, one_process: None) -> None:
    layer = subject.layer()
    model = DistributedDataParallel(Model(layer))
    check_step(subject, layer, call=model)
    layer.zero_grad()
    check_step(subject, layer, call=model, inputs=subject.inputs(seed=8))
    assert all(name.startswith("module.layer.") for name in model.state_dict())


@facility("`torch.optim`: one step of SGD and of AdamW", [s for s in ALL if s.has_parameters()])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_moves_the_parameters_against_the_gradient(subject: Subject, kind: Any) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    optimizer = kind(layer.parameters(), lr=1e-2)
    before = State.of(layer)
    right = answer(subject, before, inputs, training=True)
    y = layer(*inputs)
    y.backward(cotangent(y))
    check_gradients(layer, inputs, right)
    optimizer.step()
    after = State.of(layer)
    assert before.weight is not None
    assert after.weight is not None
    moved, against = after.weight - before.weight, right.dweight.reshape(before.weight.shape)
    clear = against.abs() > 0.1 * against.abs().mean()
    assert clear.any()
    if kind is torch.optim.SGD:  # one rounding of the weight, one of the step
        assert torch.allclose(moved, -1e-2 * against, rtol=1e-3, atol=1e-6)
    assert ((moved * against)[clear] < 0).all() or kind is torch.optim.AdamW
    check_output(layer(*inputs).detach(), answer(subject, after, inputs, training=True))


@facility(
    "`torch.optim.swa_utils.update_bn`", PLAIN, note="only batch norm changes, as with PyTorch's layers"
)
def test_update_bn_averages_the_batches(subject: Subject) -> None:
    layer = subject.layer()
    norm = norm_of(layer)
    momentum, before = getattr(norm, "momentum", None), State.of(layer)
    batches = [tuple(t.detach() for t in subject.inputs(seed=seed)) for seed in (1, 2, 3, 4)]

    class Unpack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, batch: list[Tensor]) -> Tensor:
            y: Tensor = self.layer(*batch)
            return y

    update_bn([[batch] for batch in batches], Unpack().eval())
    assert not layer.training
    assert getattr(norm, "momentum", None) == momentum
    if subject.norm != "batch":
        check_statistics(layer, before)
        return
    zero = torch.zeros_like(before.mean)  # type: ignore[arg-type]
    state = State(before.weight, before.bias, zero, torch.ones_like(zero), 0, before.eps, None)
    for batch in batches:
        state = answer(subject, state, batch, training=True).after
    check_statistics(layer, state)


@facility("`torch.optim.swa_utils.AveragedModel`", [s for s in ALL if s.has_parameters()])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_averages_the_parameters(subject: Subject, use_buffers: bool) -> None:
    model = Model(subject.layer())
    averaged = AveragedModel(model, use_buffers=use_buffers)
    snapshots = []
    for factor in (1.0, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        model(*subject.inputs(seed=int(factor)))
        averaged.update_parameters(model)
        snapshots.append(copy.deepcopy(model))
    for name, parameter in averaged.module.named_parameters():
        both = [dict(s.named_parameters())[name].detach().double() for s in snapshots]
        assert torch.allclose(parameter.double(), (both[0] + both[1]) / 2, rtol=1e-6)
    inputs = subject.inputs()
    averaged.eval()
    right = answer(subject, State.of(averaged.module.layer), inputs, training=False)
    check_output(averaged(*inputs), right)
    if subject.tracked:
        kept = State.of(averaged.module.layer)
        states = [State.of(s.layer) for s in snapshots]
        assert kept.mean is not None
        expected = (states[0].mean + states[1].mean) / 2 if use_buffers else states[1].mean  # type: ignore[operator]
        assert torch.allclose(kept.mean, expected, rtol=1e-6)
