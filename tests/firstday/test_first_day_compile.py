"""`torch.compile(fullgraph=True)`: the whole layer is one graph, and what it computes is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from firstday.subjects import ALL, EACH, EACH_TWICE, Subject
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

# raised inside PyTorch's own code generator
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

INDUCTED = tuple(  # many seconds each
    s for s in EACH_TWICE if s.name in {"Fused masked"} or (not s.mask and s.family not in {"LayerNorm2d"})
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that runs what was captured, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        compiled: Callable[..., Any] = aot_eager(graph, inputs)
        return compiled


def captured(layer: Any, **settings: Any) -> tuple[Callable[..., Tensor], Counting]:
    """The compiled layer and the backend that it uses."""
    backend = Counting()
    return torch.compile(layer, fullgraph=True, backend=backend, **settings), backend


def targets(backend: Counting) -> set[str]:
    """The operators and functions of the captured graphs."""
    return {str(node.target) for graph in backend.graphs for node in graph.graph.nodes if node.op != "output"}


@facility("`torch.compile(fullgraph=True)`, training", ALL)
def test_compiled_training_is_one_graph_and_right(subject: Subject) -> None:
    layer = subject.layer()
    call, backend = captured(layer, dynamic=False)
    check_step(subject, layer, call=call, standard=True)
    layer.zero_grad()
    check_step(subject, layer, call=call, inputs=subject.inputs(seed=5), standard=True)
    assert len(backend.graphs) == 1


@facility("`torch.compile(fullgraph=True)`, evaluation", ALL)
def test_compiled_evaluation_is_one_graph_of_standard_operators(subject: Subject) -> None:
    layer = subject.layer(training=False)
    call, backend = captured(layer, dynamic=False)
    check_step(subject, layer, call=call, training=False, standard=True)
    assert len(backend.graphs) == 1
    assert not {name for name in targets(backend) if "normalcy" in name}


def check_batch_sizes(subject: Subject, *, training: bool, marked: bool, dynamic: bool | None = None) -> None:
    """Three batch sizes, right each; and once the batch is known to vary, nothing is compiled anew."""
    layer = subject.layer(training=training)
    call, backend = captured(layer, dynamic=dynamic)
    graphs = []
    for batch in (11, 13, 17):
        inputs = subject.inputs(batch=batch, seed=batch)
        for tensor in inputs if marked else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        layer.zero_grad()
        check_step(subject, layer, call=call, inputs=inputs, training=training, standard=True)
        graphs.append(len(backend.graphs))
    first, second, third = graphs
    assert first >= 1
    assert second == third
    if marked or dynamic:
        assert first == second


@facility("`torch.compile(fullgraph=True)`, training, dynamic batch", EACH_TWICE)
def test_compiled_training_serves_every_batch_size(subject: Subject) -> None:
    check_batch_sizes(subject, training=True, marked=True)


@facility("`torch.compile(fullgraph=True)`, evaluation, dynamic batch", EACH_TWICE)
def test_compiled_evaluation_serves_every_batch_size(subject: Subject) -> None:
    check_batch_sizes(subject, training=False, marked=True)


@facility("`torch.compile(dynamic=None)` and `dynamic=True`, batches of varying size", EACH)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_new_batch_size_is_compiled_once_at_most(subject: Subject, dynamic: bool | None) -> None:
    check_batch_sizes(subject, training=True, marked=False, dynamic=dynamic)


@facility("`torch.compile`, default backend (inductor)", INDUCTED)
def test_inductor_trains_and_evaluates(subject: Subject) -> None:
    layer = subject.layer()
    call = torch.compile(layer, fullgraph=True, dynamic=False)
    check_step(subject, layer, call=call, standard=True)
    layer.zero_grad()
    check_step(subject, layer.eval(), call=call, training=False, standard=True)


@facility(
    "`lengths=` under `torch.compile(fullgraph=True)` and `torch.export`",
    [s for s in EACH if s.name in {"BatchNorm2d", "InstanceNorm1d tracked", "GroupNorm", "LayerNorm2d"}],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_lengths_are_the_mask_that_they_stand_for(subject: Subject, training: bool) -> None:
    layer = subject.layer(training=training)
    x, last = subject.inputs()[0], subject.shape[-1]
    lengths = torch.arange(len(x)) % (last - 1) + 2
    mask = (torch.arange(last) < lengths[:, None]).reshape(len(x), *[1] * (x.dim() - 2), last)
    program = torch.export.export(layer, (x.detach(),), {"lengths": lengths})
    right = answer(replace(subject, mask=subject.shape), State.of(layer), (x, mask), training=training)
    check_output(program.module()(x.detach(), lengths=lengths), right, standard=True)
    layer.load_state_dict(subject.layer().state_dict())  # the program shares its buffers with the layer
    call, _ = captured(layer, dynamic=False)
    y = call(x, lengths=lengths)
    check_output(y, right, standard=True)
    y.backward(cotangent(y))
    check_gradients(layer, (x,), right, standard=True)
    check_statistics(layer, right.after)


@facility("a compiled layer that changes modes, momentum or eps", [s for s in EACH if s.tracked])
def test_compiled_code_follows_the_attributes_of_the_layer(subject: Subject) -> None:
    layer = subject.layer()
    norm = getattr(layer, "norm", layer)
    call, backend = captured(layer, dynamic=False)
    for momentum, eps, training in (
        (0.1, 1e-5, True),
        (0.4, 1e-5, True),
        (0.4, 0.5, True),
        (0.4, 0.5, False),
    ):
        norm.momentum, norm.eps = momentum, eps
        layer.train(training).zero_grad()
        check_step(subject, layer, call=call, training=training, standard=True)
    layer.train().zero_grad()
    norm.momentum = None
    check_step(subject, layer, call=call, standard=True)
    layer.zero_grad()
    check_step(subject, layer, call=call, inputs=subject.inputs(seed=7), standard=True)
    assert backend.graphs
