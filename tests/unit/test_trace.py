"""The trace: every number of one feature's normalization."""

from __future__ import annotations

import doctest
import json
import math
from typing import Any

import numpy as np
import pytest
from golden.cases import Case, assert_close, cases

from normalcy import trace as module
from normalcy.errors import ArgumentError, DataError, ShapeError
from normalcy.trace import KEYS, trace, warm_up

OFFSET = [1000.5, 1003.25, 998.0, 1000.5, 1012.75]


def numbers(made: module.Trace) -> dict[str, Any]:
    """Return every number of every step by name, also those that JSON leaves out."""
    return {name: value for step in made.steps for name, value in step.values.items()}


@pytest.mark.parametrize(
    "case", [c for c in cases(through="trace") if c.kind in {"forward", "backward"}], ids=str
)
def test_one_feature_cases_come_out_as_worked_by_hand(case: Case) -> None:
    given = case.given
    options = {key: given[key] for key in ("gamma", "beta", "eps", "dy") if key in given}
    got = trace(given["x"], **options).as_dict()
    assert_close(got, case.right, scale=max(map(abs, given.get("dy", [0]))))


def test_inference_and_warm_up_come_out_as_worked_by_hand() -> None:
    (case,) = [c for c in cases(through="trace") if c.kind == "inference"]
    given = case.given
    running = (given["running_mean"], given["running_var"])
    got = trace(
        given["x"], gamma=given["gamma"], beta=given["beta"], eps=given["eps"], running=running
    ).as_dict()
    assert_close(got, case.right)
    (case,) = [c for c in cases(through="trace") if c.kind == "warm-up"]
    given = case.given
    made = warm_up(given["batch_means"], momentum=given["momentum"], initial=given["initial"])
    assert_close(made.as_dict()["after"], case.right["after"])


def test_every_case_for_the_trace_is_run_by_one_of_these_tests() -> None:
    kinds = {c.kind for c in cases(through="trace")}
    assert kinds == {"forward", "backward", "inference", "warm-up", "grid"}


def test_the_keys_are_those_of_the_steps_asked_for_in_a_fixed_order() -> None:
    forward = ["mean", "var", "xhat", "y", "normalized_variance", "skewness", "kurtosis", "distinct"]
    assert list(trace(OFFSET).as_dict()) == forward
    everything = trace(OFFSET, dy=[1, 2, 3, 4, 5], running=(3, 4), momentum=0.1) + warm_up([1, 2])
    assert tuple(everything.as_dict()) == KEYS
    assert list(warm_up([1, 2]).as_dict()) == ["after"]
    json.dumps(everything.as_dict(), allow_nan=False)


def test_the_steps_follow_from_one_another_by_their_formulas() -> None:
    n, gamma, beta, eps, dy = 5, -1.5, 0.25, 0.5, [0.5, -0.25, 0.125, 1.0, 2.0]
    got = numbers(trace(OFFSET, gamma=gamma, beta=beta, eps=eps, dy=dy, running=(990.0, 30.0), momentum=0.2))
    mean = math.fsum(OFFSET) / n
    var = math.fsum((v - mean) ** 2 for v in OFFSET) / n
    rstd = 1 / math.sqrt(var + eps)
    xhat = [(v - mean) * rstd for v in OFFSET]
    g = [v * gamma for v in dy]
    s1, s2 = math.fsum(g), math.fsum(a * b for a, b in zip(g, xhat, strict=True))
    assert_close(
        {key: got[key] for key in ("n", "mean", "var", "rstd", "xhat", "S1", "S2", "dgamma", "dbeta")},
        {"n": n, "mean": mean, "var": var, "rstd": rstd, "xhat": xhat, "S1": s1, "S2": s2}
        | {"dgamma": s2 / gamma, "dbeta": math.fsum(dy)},
    )
    assert_close(got["y"], [gamma * v + beta for v in xhat])
    assert_close(got["dx"], [(a - (s1 + v * s2) / n) * rstd for a, v in zip(g, xhat, strict=True)])
    a = gamma / math.sqrt(30.0 + eps)
    assert_close({"a": got["a"], "c": got["c"]}, {"a": a, "c": beta - a * 990})
    assert_close(
        got["y_inference"], [a * v + beta - a * 990 for v in OFFSET], relative=1e-10
    )  # a·x + c cancels
    stored = var * n / (n - 1)
    assert_close(
        got["update"],
        {"momentum": 0.2, "correction": 1, "stored_var": stored, "initial_mean": 990.0, "initial_var": 30.0}
        | {"weight_of_new": {"running_mean": 0.8 * 990 + 0.2 * mean, "running_var": 0.8 * 30 + 0.2 * stored}}
        | {"weight_of_old": {"running_mean": 0.2 * 990 + 0.8 * mean, "running_var": 0.2 * 30 + 0.8 * stored}},
    )


def test_the_update_starts_from_zero_and_one_and_can_store_the_population_variance() -> None:
    update: Any = trace([2, 4, 6, 8], momentum=0.1, correction=0).as_dict()["update"]
    assert_close(update["weight_of_new"], {"running_mean": 0.5, "running_var": 1.4})
    assert_close(update["weight_of_old"], {"running_mean": 4.5, "running_var": 4.6})


@pytest.mark.parametrize("eps", [0.0, 1e-5, 3.0, 1e8])
def test_skewness_and_kurtosis_stay_and_the_variance_becomes_its_share(eps: float) -> None:
    x = (np.random.default_rng(2).gamma(1.0, 2.0, 50) + 500).tolist()
    got = numbers(trace(x, eps=eps))
    # The mean taken here is rounded at 500, which costs the third moment a few digits.
    centred = np.array(x) - np.mean(x)
    skewness, kurtosis = (np.mean(centred**p) / np.mean(centred**2) ** (p / 2) for p in (3, 4))
    assert skewness > 1
    assert_close([got["skewness"], got["skewness_of_x"]], [skewness] * 2, relative=1e-11)
    assert_close([got["kurtosis"], got["kurtosis_of_x"]], [kurtosis] * 2, relative=1e-11)
    assert_close(got["normalized_variance"], np.mean(np.square(got["xhat"])))
    assert got["distinct"] == got["distinct_in_x"] == 50


def test_shape_survives_a_variance_far_below_eps() -> None:
    got = trace([1e-150, 2e-150, 4e-150], eps=1e10).as_dict()
    assert_close(got["skewness"], trace([1, 2, 4], eps=0).as_dict()["skewness"])
    assert_close(got["kurtosis"], 1.5)  # three values: always


def test_distinct_counts_the_normalized_values_even_where_the_scale_is_zero() -> None:
    assert trace(OFFSET, gamma=0).as_dict()["distinct"] == 4


def test_a_constant_becomes_the_shift_exactly_and_has_no_shape() -> None:
    got = trace([0.1] * 1000, gamma=7, beta=0.3).as_dict()
    assert got["mean"] == 0.1
    assert got["y"] == [0.3] * 1000
    assert (got["var"], got["normalized_variance"], got["distinct"]) == (0.0, 0.0, 1)
    assert got["skewness"] is got["kurtosis"] is None


def test_what_divides_by_zero_is_none_beside_inference_and_refused_alone() -> None:
    got = trace([7.5, 7.5], eps=0, running=(10.0, 16.0), momentum=0.5).as_dict()
    assert [got[k] for k in ("xhat", "y", "normalized_variance", "skewness", "distinct")] == [None] * 5
    assert (got["mean"], got["var"], got["a"], got["c"]) == (7.5, 0.0, 0.25, -2.5)
    assert got["y_inference"] == [-0.625, -0.625]
    for options in ({}, {"momentum": 0.5}, {"running": (0, 1), "dy": [1, 2]}):
        with pytest.raises(ArgumentError, match="a variance is 0 and eps is 0"):
            trace([7.5, 7.5], eps=0, **options)


def test_warm_up_debiases_whatever_the_initial_value_and_however_small_the_momentum() -> None:
    means = [10.0, 12.0, 8.0]
    for momentum in (1e-9, 0.1, 0.5):
        weights = [momentum * (1 - momentum) ** (len(means) - 1 - k) for k in range(len(means))]
        exact = sum(w * v for w, v in zip(weights, means, strict=True)) / sum(weights)
        for initial in (0.0, -1e9):
            last: Any = warm_up(means, momentum=momentum, initial=initial).as_dict()["after"]
            assert_close(last[-1]["debiased"], exact)
            assert_close(last[-1]["weight_left"], (1 - momentum) ** 3)
    never: Any = warm_up(means, momentum=0, initial=5).as_dict()["after"]
    assert [after["debiased"] for after in never] == [None] * 3
    assert [after["running"] for after in never] == [5] * 3
    at_once: Any = warm_up(means, momentum=1, initial=5).as_dict()["after"]
    assert [(a["running"], a["debiased"], a["weight_left"]) for a in at_once] == [(v, v, 0.0) for v in means]


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([], {}, DataError, "there are no values"),
        ([1, math.nan], {}, DataError, "nan is among the values"),
        ([1, 2], {"gamma": math.inf}, DataError, "inf is among the gamma"),
        ([1, 2], {"dy": [1]}, ShapeError, "dy has length 1; needed: 2"),
        ([1, 2], {"eps": -1}, ArgumentError, "eps is -1"),
        ([1, 2], {"momentum": 1.5}, ArgumentError, "momentum is 1.5"),
        ([1, 2], {"momentum": -0.1}, ArgumentError, "momentum is -0.1"),
        ([1], {"momentum": 0.1}, ArgumentError, "variance of n = 1"),
        ([1, 2], {"running": (0, -1)}, ArgumentError, "running variance is -1"),
        ([1, 2], {"running": (0, 0), "eps": 0}, ArgumentError, "a variance is 0 and eps is 0"),
        ([1e200, -1e200], {}, DataError, "too large"),
        ([1, 2], {"running": (1e300, 1), "gamma": 1e300}, DataError, "step 'inference' are too large"),
        ([1e-170, 2e-170], {"eps": 0}, DataError, "too close together"),
        ([1e-160, 2e-160], {}, DataError, "too close together"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(
    x: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trace(x, **options)


def test_warm_up_refuses_no_batches_and_impossible_numbers() -> None:
    with pytest.raises(DataError, match="no batch means"):
        warm_up([])
    with pytest.raises(DataError, match="inf is among the batch means"):
        warm_up([math.inf])
    with pytest.raises(ArgumentError, match="momentum is 2"):
        warm_up([1.0], momentum=2)


def test_its_examples_run() -> None:
    ran = doctest.testmod(module)
    assert ran.attempted >= 4
    assert ran.failed == 0
