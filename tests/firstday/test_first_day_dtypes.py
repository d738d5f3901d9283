"""Autocast and half precision: the dtypes are PyTorch's, and results are right to a rounding of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from firstday.answers import State, check_statistics, check_step
from firstday.facilities import facility
from firstday.subjects import ALL, Subject
from torch import nn

# half precision has three or four digits: values lie where their spread is still seen
NEAR = tuple(replace(s, offset=20.0) for s in ALL)


@facility("autocast on the CPU (bfloat16)", NEAR)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of PyTorch's RMS norm, alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtypes_of_torchs_layer(subject: Subject, dtype: torch.dtype) -> None:
    layer, inputs = subject.layer(), subject.inputs(dtype=dtype)

    def call(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = layer(*given)
        return y

    if subject.in_torch:
        with torch.autocast("cpu", torch.bfloat16):
            expected = subject.layer(nn)(inputs[0]).dtype
        assert expected == dtype
    y = check_step(subject, layer, call=call, inputs=inputs)
    assert y.dtype == dtype
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())
    assert inputs[0].grad is not None
    assert inputs[0].grad.dtype == dtype


@facility("autocast: a convolution, then the layer", [s for s in NEAR if len(s.shape) == 4])
def test_autocast_carries_half_precision_through(subject: Subject) -> None:
    channels = subject.shape[1]
    convolution, layer = nn.Conv2d(channels, channels, 1), subject.layer()
    x, *rest = subject.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        made = convolution(x)
        assert made.dtype == torch.bfloat16
        rest = [t.to(made.dtype).detach().requires_grad_() if t.is_floating_point() else t for t in rest]
        leaf = made.detach().requires_grad_()
        check_step(subject, layer, inputs=(leaf, *rest))


def check_cast(subject: Subject, cast: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """The layer's parameters and statistics follow, and it trains and evaluates in that dtype."""
    layer = cast(subject.layer())
    assert all(t.dtype == dtype for t in layer.state_dict().values() if t.is_floating_point())
    state = State.of(layer)
    assert check_step(subject, layer, inputs=subject.inputs(dtype=dtype)).dtype == dtype
    assert not subject.tracked or State.of(layer).batches == state.batches + 1
    layer.eval().zero_grad()
    after = State.of(layer)
    inputs = subject.inputs(dtype=dtype, seed=4)
    assert check_step(subject, layer, inputs=inputs, training=False).dtype == dtype
    check_statistics(layer, after)


@facility("`.half()`", NEAR)
def test_half_precision_is_right_to_a_rounding(subject: Subject) -> None:
    check_cast(subject, lambda layer: layer.half(), torch.float16)


@facility("`.bfloat16()`", NEAR)
def test_bfloat16_is_right_to_a_rounding(subject: Subject) -> None:
    check_cast(subject, lambda layer: layer.bfloat16(), torch.bfloat16)


@facility("`.double()`", ALL)
def test_double_precision_is_right(subject: Subject) -> None:
    check_cast(subject, lambda layer: layer.double(), torch.float64)


@facility("half input, float32 parameters and statistics", NEAR)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_input_with_float32_parameters(subject: Subject, dtype: torch.dtype) -> None:
    layer = subject.layer()
    assert check_step(subject, layer, inputs=subject.inputs(dtype=dtype)).dtype == dtype


@facility("`torch.no_grad` and `torch.inference_mode`", ALL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_without_gradients_the_output_is_the_same(subject: Subject, mode: Any, training: bool) -> None:
    layer, other = subject.layer(training=training), subject.layer(training=training)
    inputs = subject.inputs()
    with mode():
        y = layer(*inputs)
    assert not y.requires_grad
    assert torch.equal(y, check_step(subject, other, inputs=inputs, training=training))
    check_statistics(layer, State.of(other))
