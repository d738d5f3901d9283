"""The functions: against torch.nn.functional, and what they refuse, in words, before anything has changed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as theirs_of

import normalcy
from normalcy import spec
from normalcy.axes import Axes, Role
from normalcy.errors import ArgumentError, NormalcyError, ShapeError, TooFewValuesError, TypeMismatchError
from normalcy.kernels import standard
from normalcy.kernels.contract import Given
from normalcy.statistics import Stored


def data(*shape: int, offset: float = 100.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


X = data(4, 6, 5)
W, B = data(6, offset=0, seed=1), data(6, offset=0, seed=2)
MEAN, VAR = data(6, offset=100, seed=3), data(6, offset=4, seed=4)


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        (normalcy.batch_norm, theirs_of.batch_norm, (MEAN, VAR, W, B, False, 0.1, 1e-3)),
        (normalcy.batch_norm, theirs_of.batch_norm, (None, None, W, B, True)),
        (
            normalcy.layer_norm,
            theirs_of.layer_norm,
            ((6, 5), data(6, 5, offset=1), data(6, 5, offset=0), 1e-3),
        ),
        (normalcy.group_norm, theirs_of.group_norm, (3, W, B, 1e-3)),
        (normalcy.instance_norm, theirs_of.instance_norm, (None, None, W, B)),
        (normalcy.instance_norm, theirs_of.instance_norm, (MEAN, VAR, W, B, False)),
        (normalcy.rms_norm, theirs_of.rms_norm, ((5,), data(5, offset=0))),
        (normalcy.rms_norm, theirs_of.rms_norm, ((5,), None, 1e-3)),
    ],
)
def test_functions_take_pytorchs_positional_arguments(
    ours: Any, theirs: Any, arguments: tuple[Any, ...]
) -> None:
    # float64 data 100 spreads from zero keep 1e-14 of their spread
    torch.testing.assert_close(ours(X, *arguments), theirs(X, *arguments), rtol=1e-11, atol=1e-11)
    mine = list(inspect.signature(ours).parameters)[1:]
    assert mine[: len(arguments)] == list(inspect.signature(theirs).parameters)[1 : len(arguments) + 1]


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_running_statistics_are_updated_in_place(norm: str) -> None:
    mine, theirs = [MEAN.clone(), VAR.clone()], [MEAN.clone(), VAR.clone()]
    for k in range(2):
        getattr(normalcy, norm)(X + k, *mine, None, None, True, 0.3)
        getattr(theirs_of, norm)(X + k, *theirs, None, None, True, 0.3)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=0)
    assert not torch.equal(mine[0], MEAN)


def test_normalize_is_what_every_function_is_a_row_of() -> None:
    stored = Stored(MEAN, VAR)
    assert torch.equal(
        normalcy.normalize(X, spec.batch, W, B, stored), normalcy.batch_norm(X, MEAN, VAR, W, B)
    )
    assert torch.equal(normalcy.normalize(X, spec.group(2), W, B), normalcy.group_norm(X, 2, W, B))
    assert torch.equal(normalcy.normalize(X, spec.layer(1)), normalcy.layer_norm(X, 5))


def _named(norm: spec.Norm) -> str:
    return f"{norm.name}-{'centred' if norm.center else 'not centred'}"


OTHERS = [
    replace(spec.batch, center=False),
    replace(spec.group(3), center=False),
    replace(spec.channels, center=False),
    replace(spec.batch, name="layer"),
    spec.Norm("batch", spec.instance.axes),
    spec.Norm("mine", Axes(frozenset({Role.EXAMPLE}), frozenset({Role.CHANNEL}))),
]


@pytest.mark.parametrize("norm", [*OTHERS, spec.batch, spec.instance, spec.group(3), spec.rms(2)], ids=_named)
def test_pytorchs_operator_serves_a_norm_only_where_it_is_that_norm_whatever_its_name(norm) -> None:
    x = data(4, 6, 5)
    if standard.knows(norm):
        y = standard.call(Given(x), norm, eps=1e-5)
        torch.testing.assert_close(y, normalcy.normalize(x, norm), rtol=0, atol=1e-3)
    else:
        assert norm in OTHERS
    assert normalcy.normalize(x.to("meta"), norm).shape == x.shape


def test_a_batch_of_one_value_is_refused_under_any_name() -> None:
    mine = replace(spec.batch, name="mine")
    with pytest.raises(TooFewValuesError, match="one value per channel"):
        normalcy.normalize(data(1, 3), mine)
    with pytest.raises(ArgumentError, match="eps=0"):
        normalcy.normalize(data(4, 3), mine, eps=0.0)


def test_a_stored_statistic_in_half_precision_serves_half_input() -> None:
    x = X.bfloat16()
    y = normalcy.batch_norm(x, MEAN.bfloat16(), VAR.bfloat16())
    exact = normalcy.batch_norm(x.double(), MEAN.bfloat16().double(), VAR.bfloat16().double())
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: normalcy.batch_norm(X),
            ArgumentError,
            "training=False and no running statistics; needed: either",
        ),
        (lambda: normalcy.batch_norm(X, MEAN), ArgumentError, "training=False and no running statistics"),
        (
            lambda: normalcy.batch_norm(X, MEAN, training=True),
            ArgumentError,
            "one of running_mean and running_var",
        ),
        (lambda: normalcy.instance_norm(X, use_input_stats=False), ArgumentError, "use_input_stats=False"),
        (lambda: normalcy.batch_norm(X, training=True, momentum=2), ArgumentError, "momentum=2; needed"),
        (
            lambda: normalcy.batch_norm(X, training=True, eps=-1e-5),
            ArgumentError,
            "eps=-1e-05; needed: a finite",
        ),
        (lambda: normalcy.batch_norm(X, training=True, eps=float("nan")), ArgumentError, "eps=nan"),
        (lambda: normalcy.batch_norm(X, training=True, eps=0.0), ArgumentError, "eps=0 with statistics"),
        (
            lambda: normalcy.batch_norm(X[:1, :, :1], training=True),
            TooFewValuesError,
            "one value per channel",
        ),
        (lambda: normalcy.instance_norm(X[..., :1]), TooFewValuesError, "one value per channel and example"),
        (
            lambda: normalcy.batch_norm(X[0, 0], training=True),
            ShapeError,
            r"shape \(5,\); needed: at least 2",
        ),
        (lambda: normalcy.batch_norm(X, weight=W[:2], training=True), ShapeError, r"weight of shape \(2,\)"),
        (
            lambda: normalcy.batch_norm(X, MEAN[:5], VAR[:5]),
            ShapeError,
            r"running_mean of shape \(5,\).*channels-last",
        ),
        (lambda: normalcy.layer_norm(X, (6, 4)), ShapeError, r"shape \(4, 6, 5\); needed: \(\.\.\., 6, 4\)"),
        (lambda: normalcy.layer_norm(X, ()), ShapeError, "empty normalized_shape"),
        (lambda: normalcy.group_norm(X, 4), ShapeError, "6 channels .* in 4 groups"),
        (lambda: normalcy.group_norm(X, 0), ArgumentError, "num_groups is 0"),
        (
            lambda: normalcy.batch_norm(X.long(), training=True),
            TypeMismatchError,
            "torch.int64; needed: float64",
        ),
        (lambda: normalcy.layer_norm([1.0, 2.0], 2), TypeMismatchError, "got list; needed: a torch.Tensor"),
        (lambda: normalcy.group_norm(X, 2, W.float()), TypeMismatchError, "weight of torch.float32"),
        (lambda: normalcy.group_norm(X, 2, W, B.float()), TypeMismatchError, "bias of torch.float32"),
        (
            lambda: normalcy.group_norm(X.half(), 2, W.half(), B.float()),
            TypeMismatchError,
            "weight of torch.float16 and bias of torch.float32",
        ),
        (lambda: normalcy.layer_norm(X, 5, eps=None), ArgumentError, "eps=None; needed: a finite number"),
        (lambda: normalcy.layer_norm(X, 5, eps="1e-5"), ArgumentError, "eps='1e-5'"),
        (lambda: normalcy.layer_norm(X, 5, eps=True), ArgumentError, "eps=True"),
        (lambda: normalcy.layer_norm(X, 5, [1.0] * 5), TypeMismatchError, "weight as list"),
        (lambda: normalcy.layer_norm(X, 5.0), ArgumentError, "normalized_shape=5.0; needed: a whole"),
        (lambda: normalcy.layer_norm(X, True), ArgumentError, "normalized_shape=True"),
        (lambda: normalcy.group_norm(X, True), ArgumentError, "num_groups=True"),
        (lambda: normalcy.group_norm(X, 3.0), ArgumentError, "num_groups=3.0"),
        (
            lambda: normalcy.batch_norm(X, MEAN, [1.0], training=True),
            TypeMismatchError,
            "running_var as list",
        ),
        (lambda: normalcy.batch_norm(X, MEAN, VAR, momentum="a"), ArgumentError, "momentum=a"),
        (lambda: normalcy.batch_norm(X, training=True, activation="tanh"), ArgumentError, "relu, leaky_relu"),
        (lambda: normalcy.batch_norm(X, training=True, residual=X[0]), ShapeError, "residual of shape"),
        (lambda: normalcy.batch_norm(X, training=True, residual=X.float()), TypeMismatchError, "residual of"),
        (
            lambda: normalcy.batch_norm(
                torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), training=True
            ),
            TypeMismatchError,
            "nested tensor",
        ),
        (lambda: normalcy.layer_norm(X.to(torch.float8_e4m3fn), 5), TypeMismatchError, "float8_e4m3fn"),
        (
            lambda: normalcy.layer_norm(X, 5, eps=0, weight=None, mask=X),
            TypeMismatchError,
            "mask is torch.float64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    call: Any, error: type[NormalcyError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_whole_number_may_be_of_any_integer_type() -> None:
    right = normalcy.layer_norm(X, 5)
    assert torch.equal(normalcy.layer_norm(X, np.int64(5)), right)
    assert torch.equal(normalcy.layer_norm(X, (np.int32(5),)), right)
    assert torch.equal(normalcy.group_norm(X, np.int64(2)), normalcy.group_norm(X, 2))


@pytest.mark.parametrize(
    "spoil",
    [{"weight": W[:2]}, {"eps": 0.0}, {"bias": B.float()}, {"eps": -1.0}],
    ids=["weight", "eps", "bias", "sign"],
)
def test_a_refusal_leaves_running_statistics_alone(spoil: dict[str, Any]) -> None:
    mean, var = MEAN.clone(), VAR.clone()
    with pytest.raises(NormalcyError):
        normalcy.batch_norm(X, mean, var, training=True, **spoil)
    assert torch.equal(mean, MEAN)
    assert torch.equal(var, VAR)


def test_tensor_subclasses_and_function_modes_see_the_call() -> None:
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with Recorder():
        normalcy.layer_norm(X, 5)
    assert "layer_norm" in seen

    class Tagged(torch.Tensor):
        pass

    assert type(normalcy.layer_norm(X.as_subclass(Tagged), 5)) is Tagged
