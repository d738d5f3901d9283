"""Hooks, parametrizations and activation checkpointing: the layer is a module like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
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
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint


@facility("forward hooks and forward pre-hooks", ALL)
def test_forward_hooks_see_and_replace(subject: Subject) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    seen: list[Any] = []

    def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(args)
        return (args[0] + 1, *args[1:]), kwargs

    def after(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        seen.append((args, y))
        return y * 2

    handles = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after),
    ]
    state = State.of(layer)
    y = layer(*inputs)
    moved = (inputs[0].detach() + 1, *inputs[1:])
    right = answer(subject, state, moved, training=True)
    check_output(y / 2, right)
    assert len(seen) == 2
    assert seen[0][0] is inputs[0]
    assert torch.equal(seen[1][0][0], moved[0])
    check_statistics(layer, right.after)  # once
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    check_step(subject, layer)


@facility("full backward hooks and backward pre-hooks", ALL)
def test_backward_hooks_see_and_replace(subject: Subject) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    seen: list[Any] = []

    def before(_: nn.Module, dy: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(dy[0])
        return (dy[0] * 2,)

    def after(_: nn.Module, dx: tuple[Tensor | None, ...], dy: tuple[Tensor, ...]) -> Any:
        seen.append((dx, dy))
        assert dx[0] is not None
        return (dx[0] / 2, *dx[1:])

    layer.register_full_backward_pre_hook(before)
    layer.register_full_backward_hook(after)
    state = State.of(layer)
    y = layer(*inputs)
    dy = cotangent(y)
    right = answer(subject, state, inputs, training=True, dy=dy * 2)
    y.backward(dy)
    assert len(seen) == 2
    assert torch.equal(seen[0], dy)
    assert inputs[0].grad is not None
    inputs[0].grad.mul_(2)
    check_gradients(layer, inputs, right)
    check_statistics(layer, right.after)


@facility("hooks on the child of a `Fused`", [s for s in ALL if s.fused])
def test_a_hook_on_the_child_sees_its_output(subject: Subject) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    seen: list[Tensor] = []
    handle = layer.norm.register_forward_hook(lambda *seen_by: seen.append(seen_by[2].detach()))
    y = check_step(subject, layer, inputs=inputs)
    (normalized,) = seen
    residual = inputs[1].detach()
    valid = inputs[2].expand_as(y) if subject.mask else torch.ones_like(y, dtype=torch.bool)
    assert torch.allclose(torch.where(valid, (normalized + residual).relu(), 0.0), y, rtol=1e-6, atol=1e-6)
    handle.remove()
    layer.zero_grad()
    check_step(subject, layer)


class Softplus(nn.Module):
    """log(1 + exp(raw)): a weight that stays positive."""

    def forward(self, raw: Tensor) -> Tensor:
        return nn.functional.softplus(raw)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.expm1().log()


@facility("`torch.nn.utils.parametrize`", [s for s in ALL if s.has_parameters()])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_parametrized_weight_is_used_and_trained(subject: Subject, training: bool) -> None:
    layer, inputs = subject.layer(training=training), subject.inputs()
    norm = norm_of(layer)
    with torch.no_grad():
        norm.weight.abs_().add_(0.1)
    parametrize.register_parametrization(norm, "weight", Softplus())
    raw = norm.parametrizations.weight.original
    state = State.of(layer)
    right = answer(subject, state, inputs, training=training)
    y = layer(*inputs)
    check_output(y, right)
    y.backward(cotangent(y))
    expected = right.dweight.reshape(raw.shape) * raw.detach().double().sigmoid()
    scale = right.size["dweight"].reshape(raw.shape)
    assert raw.grad is not None
    # a few roundings of the sums, as for any weight, and one of the logistic function
    assert ((raw.grad - expected).abs() <= 16 * torch.finfo(raw.dtype).eps * scale).all()
    check_statistics(layer, right.after)
    parametrize.remove_parametrizations(norm, "weight")
    layer.zero_grad()
    check_step(subject, layer, training=training)


def check_checkpointed(subject: Subject, *, reentrant: bool) -> None:
    """The right gradients from a forward pass that ran twice, and statistics that took one batch in."""
    layer = subject.layer()
    before = State.of(layer)
    y = check_step(subject, layer, call=lambda *inputs: checkpoint(layer, *inputs, use_reentrant=reentrant))
    assert not subject.tracked or State.of(layer).batches == before.batches + 1
    assert torch.equal(y, subject.layer()(*subject.inputs()).detach())


@facility("activation checkpointing, `use_reentrant=False`", ALL, note="statistics take the batch in once")
def test_checkpointed_without_reentry_a_batch_counts_once(subject: Subject) -> None:
    check_checkpointed(subject, reentrant=False)


@facility("activation checkpointing, `use_reentrant=True`", ALL, note="statistics take the batch in once")
def test_checkpointed_with_reentry_a_batch_counts_once(subject: Subject) -> None:
    check_checkpointed(subject, reentrant=True)


@facility("saved tensors kept elsewhere (`torch.autograd.graph.save_on_cpu`)", ALL)
def test_saved_tensors_may_be_packed(subject: Subject) -> None:
    layer = subject.layer()

    def call(*inputs: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y: Tensor = layer(*inputs)
        return y

    check_step(subject, layer, call=call)


@facility("frozen parameters (`requires_grad_(False)`)", [s for s in PLAIN if s.has_parameters()])
def test_only_what_needs_a_gradient_gets_one(subject: Subject) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    norm_of(layer).weight.requires_grad_(False)
    right = answer(subject, State.of(layer), inputs, training=True)
    y = layer(*inputs)
    y.backward(cotangent(y))
    check_output(y, right)
    assert norm_of(layer).weight.grad is None
    frozen = replace(right, dweight=torch.zeros_like(right.dweight))
    norm_of(layer).weight.grad = torch.zeros_like(norm_of(layer).weight)
    check_gradients(layer, inputs, frozen)
