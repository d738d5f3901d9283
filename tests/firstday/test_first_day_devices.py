"""Devices that are not the CPU, without one: what is dispatched there are PyTorch's own operators."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from firstday.facilities import facility
from firstday.subjects import ALL, PLAIN, Subject
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import normalcy.nn as ours

OPERATOR = {
    "batch": (
        "aten.native_batch_norm",
        "aten._native_batch_norm_legit",
        "aten._batch_norm_with_update",
        "aten.cudnn_batch_norm",
        "aten.batch_norm",
    ),
    "layer": ("aten.native_layer_norm", "aten.layer_norm"),
    "group": ("aten.native_group_norm", "aten.group_norm"),
    "rms": ("aten._fused_rms_norm", "aten.rms_norm", "aten.rsqrt"),
}
BOOKKEEPING = {"aten.view.default", "aten.detach.default", "aten.add_.Tensor"}
"""Without computation: views, and the counter of batches, which PyTorch's instance norm does not keep."""
OPERATOR["instance"] = OPERATOR["batch"]  # PyTorch's instance norm is its batch norm of a reshaped input


class Dispatched(TorchDispatchMode):
    """Records the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def moved(subject: Subject, device: str, *, training: bool, module: Any = ours) -> tuple[Any, list[Tensor]]:
    """The layer and its inputs on a device that need not be there."""
    with torch.device(device):
        layer = subject.build(module).train(training)
    inputs = [torch.empty_like(t, device=device, requires_grad=t.requires_grad) for t in subject.inputs()]
    return layer, inputs


def check_dispatched(subject: Subject, names: list[str]) -> None:
    """One of PyTorch's operators for this norm, none of this library."""
    assert any(name.rpartition(".")[0] in OPERATOR[subject.norm] for name in names), names
    assert not any("normalcy" in name for name in names)


@facility("a fake CUDA device: PyTorch's operators", PLAIN)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_on_a_fake_cuda_device_torchs_operators_are_dispatched(subject: Subject, training: bool) -> None:
    names = on_fake_cuda(subject, ours, training=training)
    check_dispatched(subject, names)
    if subject.in_torch:
        assert set(names) - set(on_fake_cuda(subject, nn, training=training)) <= BOOKKEEPING


def on_fake_cuda(subject: Subject, module: Any, *, training: bool) -> list[str]:
    """What a forward pass dispatches; its output fits."""
    with FakeTensorMode(), torch.no_grad():  # without CUDA, autograd ends the process at a CUDA tensor
        layer, inputs = moved(subject, "cuda", training=training, module=module)
        # PyTorch's own layer comes no further without CUDA, in training with running statistics
        stops = pytest.raises(RuntimeError, match="not linked with support for cuda")
        with Dispatched() as forward, stops if training and subject.tracked else contextlib.nullcontext():
            y = layer(*inputs)
            assert (y.shape, y.dtype, y.device.type) == (inputs[0].shape, torch.float32, "cuda")
    return forward.names


@facility("the meta device: PyTorch's operators, forward and backward", PLAIN)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_on_the_meta_device_torchs_operators_are_dispatched(subject: Subject, training: bool) -> None:
    layer, inputs = moved(subject, "meta", training=training)
    with Dispatched() as forward:
        y = layer(*inputs)
    assert (y.shape, y.dtype, y.device.type) == (inputs[0].shape, torch.float32, "meta")
    check_dispatched(subject, forward.names)
    with Dispatched() as backward:
        y.sum().backward()
    assert not any("normalcy" in name for name in backward.names)
    if subject.norm != "rms":  # which PyTorch composes on this device
        assert any("norm" in name and "backward" in name for name in backward.names), backward.names


@facility("another device: shapes, dtypes and gradients", ALL)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_meta_device_runs_forward_and_backward(subject: Subject, training: bool) -> None:
    layer, inputs = moved(subject, "meta", training=training)
    y = layer(*inputs)
    assert (y.shape, y.dtype, y.is_meta) == (inputs[0].shape, torch.float32, True)
    y.sum().backward()
    leaves = [t for t in (*inputs, *layer.parameters()) if t.requires_grad]
    assert all(t.grad is not None and t.grad.shape == t.shape and t.grad.is_meta for t in leaves)


@facility("`FakeTensorMode` on the CPU", ALL)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_fake_tensors_run_forward_and_backward(subject: Subject, training: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        layer, inputs = moved(subject, "cpu", training=training)
        y = layer(*inputs)
        y.sum().backward()
    assert (y.shape, y.dtype) == (inputs[0].shape, torch.float32)
    assert y.fake_mode is fake
    assert all(t.grad is not None for t in (*inputs, *layer.parameters()) if t.requires_grad)
