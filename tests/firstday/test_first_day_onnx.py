"""ONNX: evaluation gives the standard's operators, and ONNX Runtime the right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from firstday.answers import State, answer, check_output
from firstday.facilities import facility
from firstday.subjects import EACH, EACH_TWICE, Inputs, Subject
from torch import Tensor, nn

import normalcy.nn as ours

pytestmark = [  # all raised inside PyTorch's own exporter
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
LARGEST = {"layer": "LayerNormalization", "rms": "RMSNormalization"}


def to_onnx(subject: Subject, module: Any, path: Path) -> Any:
    """The exported evaluation layer, checked against the standard."""
    # RMS norm is an operator of the standard from version 23 on
    version = {"opset_version": 23} if subject.norm == "rms" else {}
    torch.onnx.export(
        subject.layer(module, training=False), plain(subject), path, dynamo=True, verbose=False, **version
    )
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def plain(subject: Subject) -> Inputs:
    return tuple(t.detach() for t in subject.inputs())


def operators(model: Any) -> list[str]:
    """The operators of a model, those inside its functions too; all of the standard's own domain."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    assert {node.domain for node in nodes} <= {""}, sorted({node.domain for node in nodes})
    return [node.op_type for node in nodes]


def in_onnx_runtime(path: Path, inputs: Inputs) -> Tensor:
    """What ONNX Runtime computes."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    (y,) = session.run(None, {name: t.numpy() for name, t in zip(names, inputs, strict=True)})
    return torch.from_numpy(y)


@facility(
    "ONNX (`torch.onnx.export`), evaluation, in ONNX Runtime",
    EACH_TWICE,
    note="the operators that PyTorch's own layer gives; with a mask elementary ones",
)
def test_onnx_evaluation_has_standard_operators_and_is_right(subject: Subject, tmp_path: Path) -> None:
    found = operators(to_onnx(subject, ours, tmp_path / "ours.onnx"))
    right = answer(subject, State.of(subject.layer()), subject.inputs(), training=False)
    check_output(in_onnx_runtime(tmp_path / "ours.onnx", plain(subject)), right, standard=True)
    if subject.mask is not None:
        return  # no operator of the standard knows masks: elementary ones, all of its own domain
    if subject.fused:
        assert found == ["BatchNormalization", "Add", "Relu"]
    elif subject.tracked:  # evaluating a tracked instance norm is evaluating a batch norm
        assert found == ["BatchNormalization"]
    elif subject.norm in LARGEST:
        assert [name for name in found if name != "Transpose"] == [LARGEST[subject.norm]]
    else:
        assert found == operators(to_onnx(subject, nn, tmp_path / "theirs.onnx"))


def test_every_kind_is_exported() -> None:
    assert {subject.norm for subject in EACH} == {"batch", "instance", "layer", "group", "rms"}
