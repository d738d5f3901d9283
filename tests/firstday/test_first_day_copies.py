"""Copies and files: a layer that was copied, pickled, saved or loaded goes on as the one it came from."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from firstday.answers import State, check_statistics, check_step
from firstday.facilities import facility, only
from firstday.subjects import ALL, PLAIN, Subject
from torch import nn

import normalcy.nn as ours


def check_independent(subject: Subject, layer: Any, other: Any) -> None:
    """`other` trains as `layer` would, and `layer` notices nothing; then the other way round."""
    assert type(other) is type(layer)
    assert repr(other) == repr(layer)
    before = State.of(layer)
    parameters = [p.detach().clone() for p in layer.parameters()]
    y = check_step(subject, other)
    check_statistics(layer, before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), parameters, strict=True))
    assert torch.equal(check_step(subject, layer), y)


@facility("`copy.deepcopy`", ALL)
def test_a_deep_copy_goes_on_by_itself(subject: Subject) -> None:
    layer = subject.layer()
    layer(*subject.inputs(seed=3))  # a used layer, not a fresh one
    check_independent(subject, layer, copy.deepcopy(layer))


@facility("`pickle`", ALL)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_layer_goes_on_by_itself(subject: Subject, protocol: int) -> None:
    layer = subject.layer()
    layer(*subject.inputs(seed=3))
    check_independent(subject, layer, pickle.loads(pickle.dumps(layer, protocol)))  # noqa: S301 - its own


@facility("`torch.save` and `torch.load` of the layer", ALL)
def test_a_saved_layer_goes_on_by_itself(subject: Subject, tmp_path: Path) -> None:
    layer = subject.layer()
    torch.save(layer, tmp_path / "layer.pt")
    check_independent(subject, layer, torch.load(tmp_path / "layer.pt", weights_only=False))


@facility("`torch.save` and `torch.load(weights_only=True)` of the `state_dict`", ALL)
def test_a_saved_state_dict_loads_into_a_new_layer(subject: Subject) -> None:
    layer, file = subject.layer(), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = subject.build(ours)
    assert (
        str(fresh.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    )
    check_independent(subject, layer, fresh)


@facility("`state_dict` of PyTorch's layer, both ways", [s for s in PLAIN if s.in_torch])
def test_state_dicts_are_torchs_both_ways(subject: Subject) -> None:
    mine, theirs = subject.layer(), subject.build(nn)
    assert [*mine.state_dict()] == [*theirs.state_dict()]
    assert mine.state_dict()._metadata == theirs.state_dict()._metadata
    theirs.load_state_dict(mine.state_dict())
    other = subject.build(ours)
    other.load_state_dict(theirs.state_dict())
    assert torch.equal(check_step(subject, mine), check_step(subject, other))


@facility("`load_state_dict(assign=True)`", ALL)
def test_assigned_tensors_become_the_layers_own(subject: Subject) -> None:
    layer = subject.layer()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    fresh = subject.build(ours)
    fresh.load_state_dict(state, assign=True)
    for name, tensor in fresh.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() == state[name].data_ptr()
        assert isinstance(tensor, nn.Parameter) == (name.rpartition(".")[2] in {"weight", "bias"})
    check_independent(subject, layer, fresh)


@facility("the meta device, then `load_state_dict(assign=True)`", ALL)
def test_a_layer_without_storage_takes_assigned_tensors(subject: Subject) -> None:
    with torch.device("meta"):
        fresh = subject.build(ours)
    assert all(t.is_meta for t in fresh.state_dict().values())
    layer = subject.layer()
    fresh.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()}, assign=True)
    check_independent(subject, layer, fresh)


@facility("the meta device, `to_empty` and `reset_parameters`", ALL)
def test_a_layer_made_without_storage_starts_as_a_fresh_one(subject: Subject) -> None:
    with torch.device("meta"):
        layer = subject.build(ours)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fresh = subject.build(ours)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    check_step(subject, layer)


@facility("`torch.nn.utils.skip_init`", only(PLAIN, in_torch=True))
def test_a_layer_without_initial_values_takes_a_state_dict(subject: Subject) -> None:
    kind, arguments = type(subject.build(ours)), _arguments(subject)
    layer = torch.nn.utils.skip_init(kind, *arguments[0], **arguments[1])
    layer.load_state_dict(subject.layer().state_dict())
    check_step(subject, layer)


def _arguments(subject: Subject) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's arguments, as the table gives them."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def keep(*args: Any, **kwargs: Any) -> nn.Module:
                found.append((args, kwargs))
                return nn.Identity()

            return keep

    subject.build(Recorder())
    return found[0]
