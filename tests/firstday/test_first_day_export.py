"""`torch.export`, TorchScript, `torch.fx`: what is saved needs PyTorch's own operators and nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx
from firstday.answers import State, answer, check_gradients, check_output, check_statistics, cotangent
from firstday.facilities import facility
from firstday.subjects import ALL, EACH_TWICE, MASKED, PLAIN, Inputs, Subject
from torch import Tensor, nn

import normalcy.nn as ours
from normalcy.conventions import TORCH
from normalcy.errors import NormalcyError

pytestmark = [  # all raised inside PyTorch's own exporters
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

NEEDS = "with running statistics the program has one operator of this library, which updates them"
WITHOUT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])

class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "normalcy":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch

found = {}
for name, inputs in torch.load(f"{sys.argv[1]}/inputs.pt").items():
    program = torch.export.load(f"{sys.argv[1]}/{name}.pt2")
    found[name] = program.module()(*inputs).detach()
assert not [name for name in sys.modules if name.split(".")[0] == "normalcy"]
torch.save(found, f"{sys.argv[1]}/outputs.pt")
"""


def plain(inputs: Inputs) -> Inputs:
    return tuple(t.detach() for t in inputs)


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def dynamic_batch(inputs: Inputs) -> tuple[dict[int, Any], ...]:
    batch = torch.export.Dim("batch", min=2)
    return tuple({0: batch} for _ in inputs)


@facility("`torch.export`, training", ALL, note=NEEDS)
def test_an_exported_training_step_is_right(subject: Subject) -> None:
    layer, inputs = subject.layer(), subject.inputs()
    before = State.of(layer)
    program = torch.export.export(layer, plain(inputs))
    check_statistics(layer, before)  # exporting is no training
    own = {name for name in targets(program.graph) if "normalcy" in name}
    assert own == ({"normalcy.update_running.default"} if subject.tracked else set())
    module: Any = program.module()
    right = answer(subject, before, inputs, training=True)
    y = module(*inputs)
    check_output(y, right, standard=True)
    y.backward(cotangent(y))
    state = {
        name.removeprefix("norm."): t for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    exported = SimpleNamespace(**{"weight": None, "bias": None, "running_mean": None} | state)
    check_gradients(exported, inputs, right, standard=True)
    check_statistics(exported, right.after)


@facility("`torch.export`, evaluation, dynamic batch", EACH_TWICE)
def test_exported_evaluation_serves_every_batch_size(subject: Subject) -> None:
    layer, inputs = subject.layer(training=False), subject.inputs()
    program = torch.export.export(layer, plain(inputs), dynamic_shapes=dynamic_batch(inputs))
    assert not [name for name in targets(program.graph) if "normalcy" in name]
    for batch in (2, 5, 8):
        at = subject.inputs(batch=batch, seed=batch)
        right = answer(subject, State.of(layer), at, training=False)
        check_output(program.module()(*plain(at)), right, standard=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor | Exception]:
    """What the saved evaluation programs give in a process where this library cannot be imported."""
    import json

    folder: Path = tmp_path_factory.mktemp("programs")
    found: dict[str, Tensor | Exception] = {}
    given = {}
    for subject in ALL:
        inputs = plain(subject.inputs())
        try:
            program = torch.export.export(subject.layer(training=False), inputs)
            torch.export.save(program, folder / f"{subject}.pt2")
        except Exception as error:  # noqa: BLE001 - raised again by the subject's own test
            found[str(subject)] = error
        else:
            given[str(subject)] = inputs
    torch.save(given, folder / "inputs.pt")
    subprocess.run([sys.executable, "-c", WITHOUT, str(folder), json.dumps(sys.path)], check=True)
    return found | torch.load(folder / "outputs.pt")


@facility("`torch.export`, evaluation, saved and run where this library is not installed", ALL)
def test_a_saved_program_does_not_need_this_library(
    subject: Subject, served: dict[str, Tensor | Exception]
) -> None:
    y = served[str(subject)]
    if isinstance(y, Exception):
        raise y
    right = answer(subject, State.of(subject.layer()), subject.inputs(), training=False)
    check_output(y, right, standard=True)


@facility("`torch.export`, evaluation: the operator of PyTorch's own layer", [s for s in PLAIN if s.in_torch])
def test_exported_evaluation_has_the_operators_of_torchs_layer(subject: Subject) -> None:
    inputs = plain(subject.inputs())
    graphs = [
        targets(torch.export.export(subject.layer(module, training=False), inputs).graph)
        for module in (ours, nn)
    ]
    assert graphs[0]
    if subject.norm == "instance" and subject.tracked:
        # with stored statistics every instance has the same map, which is batch norm's
        assert graphs == [["aten.batch_norm.default"], ["aten.instance_norm.default"]]
    else:
        assert graphs[0] == graphs[1]


@facility("`torch.jit.trace`, evaluation, any batch", ALL)
def test_traced_evaluation_has_standard_operators(subject: Subject) -> None:
    layer, inputs = subject.layer(training=False), subject.inputs()
    traced = torch.jit.trace(layer, plain(inputs), check_trace=False)
    assert "normalcy::" not in str(traced.inlined_graph)
    for batch in (None, 6):
        at = subject.inputs(batch=batch, seed=3)
        right = answer(subject, State.of(layer), at, training=False)
        check_output(traced(*plain(at)), right, standard=True)
    assert "aten::" in str(traced.inlined_graph)


@facility(
    "`torch.jit.script`",
    ALL,
    refuses=lambda s: s.fused or s.mask is not None,
    note="a scripted layer is PyTorch's operator: it takes no mask; use `torch.export`",
)
def test_a_scripted_layer_is_torchs_operator(subject: Subject) -> None:
    layer, inputs = subject.layer(), plain(subject.inputs())
    if subject.fused:
        with pytest.raises(NormalcyError, match=r"Fused is being scripted.*torch\.export"):
            torch.jit.script(layer)
        return
    scripted = torch.jit.script(layer)
    if subject.mask is not None:
        with pytest.raises(torch.jit.Error, match="takes no mask"):
            scripted(*inputs)
        return
    right = answer(subject, State.of(layer), inputs, training=True)
    check_output(scripted(*inputs), right, standard=True)
    kept = dict(scripted.named_buffers())
    if right.after.mean is not None:  # PyTorch's operators take the batch in, with its roundings
        assert torch.allclose(kept["running_mean"].double(), right.after.mean, rtol=1e-6)
        assert torch.allclose(kept["running_var"].double(), right.after.var, rtol=1e-4)
    scripted.eval()
    right = answer(subject, State.of(layer), inputs, training=False)
    check_output(scripted(*inputs), right, standard=True)


def test_what_torchs_layer_cannot_express_is_not_scripted() -> None:
    """Its statistics would silently follow another rule."""
    with pytest.raises(NormalcyError, match="debias"):
        torch.jit.script(ours.BatchNorm1d(3, convention=replace(TORCH, debias=True)))


@facility(
    "`torch.fx.symbolic_trace`",
    [s for s in ALL if not s.mask],
    refuses=lambda _: True,
    note="call `normalcy.nn.release(model)` first",
)
def test_symbolic_tracing_is_refused(subject: Subject) -> None:
    with pytest.raises(NormalcyError, match=r"release\(model\)"):
        torch.fx.symbolic_trace(nn.Sequential(subject.layer()) if not subject.fused else subject.layer())


@facility("`torch.fx.symbolic_trace` after `release`", [s for s in PLAIN if s.in_torch])
def test_a_released_layer_is_traced_whole(subject: Subject) -> None:
    model = nn.Sequential(subject.layer())
    ours.release(model)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    x = subject.inputs()
    right = answer(subject, State.of(model[0]), x, training=True)
    check_output(traced(*x), right, standard=True)


def test_masked_subjects_are_the_plain_ones_once_more() -> None:
    """Nothing is tested without a mask only because its mask was forgotten."""
    assert [s.name.removesuffix(" masked") for s in MASKED] == [s.name for s in PLAIN]
