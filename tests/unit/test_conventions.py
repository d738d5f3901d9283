"""Conventions: what frameworks mean by momentum and eps."""

from __future__ import annotations

import inspect

import pytest
import torch

from normalcy.conventions import DEFAULT, FLAX, KERAS, ONNX, TORCH, Convention, replace
from normalcy.errors import ArgumentError

ALL = (TORCH, KERAS, FLAX, ONNX)


@pytest.mark.parametrize(
    ("convention", "momentum", "weight"),
    [
        (TORCH, 0.1, 0.1),
        (TORCH, None, None),
        (KERAS, 0.9, 0.1),
        (KERAS, 0.99, 0.01),
        (FLAX, 0.99, 0.01),
        (ONNX, 0.9, 0.1),
        (KERAS, 1.0, 0.0),
        (KERAS, 0.0, 1.0),
        (TORCH, DEFAULT, 0.1),
        (KERAS, DEFAULT, 0.01),
        (FLAX, DEFAULT, 0.01),
        (ONNX, DEFAULT, 0.1),
    ],
)
def test_momentum_becomes_the_weight_of_the_new_value_to_the_digits_that_were_meant(
    convention: Convention, momentum: float | None, weight: float | None
) -> None:
    assert convention.weight_of_new(momentum) == weight


@pytest.mark.parametrize("convention", ALL, ids=lambda convention: convention.name)
@pytest.mark.parametrize("momentum", [-0.1, 1.5, float("nan")])
def test_a_momentum_that_is_no_weight_is_refused_with_its_meaning(
    convention: Convention, momentum: float
) -> None:
    with pytest.raises(
        ArgumentError, match=f"momentum=.*{convention.name}: the weight of the {convention.weighs}"
    ):
        convention.weight_of_new(momentum)


def test_pytorchs_defaults_are_those_of_its_constructors() -> None:
    for name, layer in (
        ("batch", torch.nn.BatchNorm2d),
        ("layer", torch.nn.LayerNorm),
        ("group", torch.nn.GroupNorm),
        ("instance", torch.nn.InstanceNorm2d),
        ("rms", torch.nn.RMSNorm),
    ):
        assert TORCH.default_eps(name) == inspect.signature(layer).parameters["eps"].default
    assert TORCH.momentum == inspect.signature(torch.nn.BatchNorm2d).parameters["momentum"].default


def test_an_eps_that_is_given_is_kept_and_none_is_a_value() -> None:
    assert KERAS.default_eps("batch") == 1e-3
    assert KERAS.default_eps("batch", 0.5) == 0.5
    assert KERAS.default_eps("rms", None) is None


def test_only_pytorch_stores_the_unbiased_variance() -> None:
    assert [convention.correction for convention in ALL] == [1, 0, 0, 0]


def test_a_convention_differs_by_one_field_and_stays_a_value() -> None:
    debiased = replace(TORCH, debias=True)
    assert debiased != TORCH
    assert replace(debiased, debias=False) == TORCH
    with pytest.raises(AttributeError):
        TORCH.debias = True  # type: ignore[misc]
    assert all(convention.source for convention in ALL)
