"""`torch.func`: other parameters, batches of batches and ensembles: each is what it would be alone."""

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
    cotangent,
)
from firstday.facilities import facility
from firstday.subjects import ALL, Subject, norm_of
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@facility("`torch.func.functional_call`", ALL)
@MODES
def test_other_parameters_and_statistics_are_used_and_updated(subject: Subject, training: bool) -> None:
    layer, other = subject.layer(training=training), subject.layer(training=training)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        for name, buffer in other.named_buffers():
            buffer.add_(1 if "num" in name else 0.25)
    before, inputs = State.of(layer), subject.inputs()
    given = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    right = answer(subject, State.of(other), inputs, training=training)
    y = functional_call(layer, given, inputs)
    y.backward(cotangent(y))
    check_output(y, right)
    check_gradients(other, inputs, right)
    check_statistics(other, right.after)
    check_statistics(layer, before)
    assert all(parameter.grad is None for parameter in layer.parameters())


@facility("`torch.func.vmap`, evaluation", ALL)
def test_a_batch_of_batches_is_each_of_them(subject: Subject) -> None:
    layer = subject.layer(training=False)
    several = [subject.inputs(seed=seed) for seed in (1, 2, 3)]
    stacked = [torch.stack([inputs[i].detach() for inputs in several]) for i in range(len(several[0]))]
    y = vmap(layer)(*stacked)
    for made, inputs in zip(y, several, strict=True):
        check_output(made, answer(subject, State.of(layer), inputs, training=False))


@facility("`torch.func.vmap`, training without running statistics", [s for s in ALL if not s.fused])
def test_a_batch_of_batches_is_each_of_them_in_training(subject: Subject) -> None:
    layer = subject.layer()
    untracked = replace(subject, tracked=False)
    if subject.tracked:
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        layer.track_running_stats = False
    several = [subject.inputs(seed=seed) for seed in (1, 2, 3)]
    stacked = [torch.stack([inputs[i].detach() for inputs in several]) for i in range(len(several[0]))]
    y = vmap(layer)(*stacked)
    for made, inputs in zip(y, several, strict=True):
        check_output(made, answer(untracked, State.of(layer), inputs, training=True))


@facility("per-example gradients: `vmap` of `grad`, evaluation", ALL)
def test_per_example_gradients_are_each_examples_own(subject: Subject) -> None:
    layer = subject.layer(training=False)
    inputs = tuple(t.detach() for t in subject.inputs())
    parameters = dict(layer.named_parameters())
    dy = cotangent(inputs[0])

    def loss(x: Tensor, dy: Tensor, *rest: Tensor) -> Tensor:
        alone = [t.unsqueeze(0) for t in (x, *rest)]
        return (functional_call(layer, parameters, tuple(alone)) * dy.unsqueeze(0)).sum()

    found = vmap(grad(loss))(inputs[0], dy, *inputs[1:])
    for i in range(len(found)):
        one = tuple(t[i : i + 1] for t in inputs)
        right = answer(subject, State.of(layer), one, training=False, dy=dy[i : i + 1])
        leaf = one[0].clone()
        leaf.grad = found[i : i + 1]
        check_gradients(_no_parameters(layer), (leaf, *one[1:]), replace(right, dresidual=None))


def ensemble(subject: Subject, *, training: bool) -> list[Any]:
    """Three layers that differ in parameters and statistics."""
    layers = [subject.layer(training=training) for _ in range(3)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            for parameter in layer.parameters():
                parameter.mul_(1 + i / 4)
            for name, buffer in layer.named_buffers():
                buffer.add_(0 if "num" in name else i / 8)
    return layers


@facility("model ensembles (`stack_module_state`, `vmap`), evaluation", ALL)
def test_an_ensemble_evaluates_as_each_of_its_models(subject: Subject) -> None:
    layers, inputs = ensemble(subject, training=False), tuple(t.detach() for t in subject.inputs())
    parameters, buffers = stack_module_state(layers)
    base = layers[0]

    def one(parameters: Any, buffers: Any) -> Tensor:
        made: Tensor = functional_call(base, (parameters, buffers), inputs)
        return made

    # a layer without parameters and statistics has nothing to stack
    many = (
        vmap(one, randomness="error")(parameters, buffers) if parameters or buffers else base(*inputs)[None]
    )
    for y, layer in zip(many, layers, strict=False):
        check_output(y, answer(subject, State.of(layer), inputs, training=False))


@facility("model ensembles, training", ALL, note="each model's stacked statistics take its batch in")
def test_an_ensemble_trains_as_each_of_its_models(subject: Subject) -> None:
    layers = ensemble(subject, training=True)
    several = [tuple(t.detach() for t in subject.inputs(seed=seed)) for seed in (1, 2, 3)]
    stacked = [torch.stack(tensors) for tensors in zip(*several, strict=True)]
    states = [State.of(layer) for layer in layers]
    parameters, buffers = stack_module_state(layers)
    base = layers[0]

    def one(parameters: Any, buffers: Any, *inputs: Tensor) -> Tensor:
        made: Tensor = functional_call(base, (parameters, buffers), inputs)
        return made

    dims = (0 if parameters else None, 0 if buffers else None, *[0] * len(stacked))
    many = vmap(one, in_dims=dims)(parameters or {}, buffers or {}, *stacked)
    for i, state in enumerate(states):
        right = answer(subject, state, several[i], training=True)
        check_output(many[i], right)
        if subject.tracked:
            with torch.no_grad():
                for name, buffer in layers[i].named_buffers():
                    buffer.copy_(buffers[name][i])
            check_statistics(layers[i], right.after)


def _no_parameters(layer: nn.Module) -> Any:
    class Bare:
        weight = bias = None
        running_mean = getattr(norm_of(layer), "running_mean", None)

    return Bare()
