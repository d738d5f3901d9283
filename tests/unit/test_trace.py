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
from normalcy.trace import ARRAY_KEYS, KEYS, given, grouped, record, trace, warm_up, warming

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


GRID_AXES = {"layer_over_channels_and_positions": (1, 2), "layer_over_channels": 1, "rms_over_channels": [-2]}


@pytest.mark.parametrize("case", cases("grid", through="trace"), ids=str)
def test_whole_arrays_come_out_as_worked_by_hand(case: Case) -> None:
    g = case.given
    got = trace(
        g["x"],
        norm=g["norm"],
        groups=g["groups"],
        axes=GRID_AXES.get(case.id.removeprefix("grid-")),
        gamma=g["weight"],
        beta=g["bias"] or 0.0,
        eps=g["eps"],
        dy=g["dy"],
        explain=True,
    ).as_dict()
    named = {"y": got["y"], "dx": got["dx"], "dweight": got["dgamma"], "dbias": got["dbeta"]}
    assert set(case.right) == set(named)
    assert_close(named, case.right)


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
    ran = [doctest.testmod(m) for m in (module, record, warming)]
    assert all(r.attempted for r in ran)
    assert sum(r.attempted for r in ran) >= 7
    assert not any(r.failed for r in ran)


def offset_array(*shape: int, seed: int = 3) -> Any:
    """Numbers with a location far from 0, different in each channel."""
    rng = np.random.default_rng(seed)
    return rng.gamma(2.0, 1.5, shape) + 50.0 * (1 + np.arange(shape[1]).reshape(-1, *[1] * (len(shape) - 2)))


SHARING: list[tuple[dict[str, Any], list[str]]] = [
    ({"norm": "batch"}, ["c"]),
    ({"norm": "instance"}, ["n", "c"]),
    ({"norm": "group", "groups": 2}, ["n", "g"]),
    ({"norm": "layer", "axes": (1, 2)}, ["n"]),
    ({"norm": "layer", "axes": 1}, ["n", "l"]),
    ({"norm": "layer"}, ["n", "c"]),
    ({"norm": "rms", "axes": (0, -1)}, ["c"]),
]


@pytest.mark.parametrize(("options", "apart"), SHARING, ids=str)
def test_cells_that_share_a_number_share_mean_variance_and_shape(
    options: dict[str, Any], apart: list[str]
) -> None:
    x = offset_array(3, 4, 5)
    got = trace(x, eps=0.5, **options).as_dict()
    shares = np.array(got["shares"])
    n, c, place = np.indices(x.shape)
    key = {"n": n, "c": c, "g": c // 2, "l": place}
    wanted = {at: tuple(int(key[k][at]) for k in apart) for at in np.ndindex(*x.shape)}
    for one, its in wanted.items():
        for other, others in wanted.items():
            assert (shares[one] == shares[other]) == (its == others)
    got_numbers: Any = got
    for k in range(int(shares.max()) + 1):
        here = x[shares == k]
        mean = 0.0 if options["norm"] == "rms" else math.fsum(here) / here.size
        var = math.fsum((here - mean) ** 2) / here.size
        centred = here - np.mean(here)
        skewness = np.mean(centred**3) / np.mean(centred**2) ** 1.5
        assert got_numbers["count"][k] == here.size
        assert_close(got_numbers["mean"][k], mean)
        assert_close(got_numbers["var"][k], var)
        assert_close(got_numbers["normalized_variance"][k], var / (var + 0.5))
        assert_close(got_numbers["skewness"][k], float(skewness), relative=1e-9)  # the mean here is rounded
        assert_close(
            np.array(got["xhat"])[shares == k].tolist(), ((here - mean) / (var + 0.5) ** 0.5).tolist()
        )
        assert got_numbers["distinct"][k] == here.size


def test_an_array_of_one_channel_has_the_numbers_of_the_feature() -> None:
    options: dict[str, Any] = {"gamma": 2.5, "beta": -1.0, "running": (990.0, 30.0), "momentum": 0.1}
    feature = numbers(trace(OFFSET, dy=[1, -2, 3, 0.5, 2], **options))
    column = numbers(trace([[v] for v in OFFSET], dy=[[1], [-2], [3], [0.5], [2]], **options))
    for name in (
        "mean",
        "var",
        "rstd",
        "skewness",
        "kurtosis",
        "distinct",
        "S1",
        "S2",
        "dgamma",
        "dbeta",
        "a",
        "c",
    ):
        assert column[name] == [feature[name]]
    for name in ("xhat", "y", "dx", "g", "y_inference"):
        assert column[name] == [[v] for v in feature[name]]
    assert column["update"]["weight_of_old"]["running_var"] == [
        feature["update"]["weight_of_old"]["running_var"]
    ]


def test_running_statistics_and_parameters_are_taken_per_channel() -> None:
    x = offset_array(4, 3, 2)
    mean, var, gamma, beta = [60.0, 90.0, 160.0], [4.0, 9.0, 1.0], [1.0, -2.0, 0.5], [0.0, 3.0, -1.0]
    got: Any = trace(x, gamma=gamma, beta=beta, running=(mean, var), momentum=0.25).as_dict()
    a = [g / math.sqrt(v + 1e-5) for g, v in zip(gamma, var, strict=True)]
    assert_close(got["a"], a)
    assert_close(got["c"], [b - s * m for b, s, m in zip(beta, a, mean, strict=True)])
    slope, offset = np.array(a)[:, None], np.array(got["c"])[:, None]
    assert_close(got["y_inference"], (x * slope + offset).tolist(), relative=1e-11)  # a·x + c cancels
    stored = np.var(x, axis=(0, 2)) * 8 / 7
    after = got["update"]["weight_of_new"]
    assert_close(after["running_var"], (0.75 * np.array(var) + 0.25 * stored).tolist())
    assert_close(after["running_mean"], (0.75 * np.array(mean) + 0.25 * np.mean(x, axis=(0, 2))).tolist())


def test_a_parameter_per_channel_stands_for_every_position_and_its_gradient_is_their_sum() -> None:
    x, dy, per_channel = offset_array(2, 3, 4), offset_array(2, 3, 4, seed=5), [1.0, -0.5, 2.0]
    options: dict[str, Any] = {"norm": "layer", "axes": (1, 2), "dy": dy}
    spread = np.broadcast_to(np.array(per_channel)[:, None], (3, 4))
    full: Any = trace(x, gamma=spread, **options).as_dict()
    for written in (per_channel, [[v] for v in per_channel]):
        got: Any = trace(x, gamma=written, **options).as_dict()
        assert got["y"] == full["y"]
        assert np.shape(got["dgamma"]) == np.shape(written)
        assert_close(np.ravel(got["dgamma"]).tolist(), np.sum(full["dgamma"], axis=1).tolist())
    assert np.shape(trace(x, gamma=2.0, **options).as_dict()["dgamma"]) == (3, 4)


@pytest.mark.parametrize("options", [options for options, _ in SHARING], ids=str)
def test_what_is_masked_counts_nowhere_whatever_it_holds(options: dict[str, Any]) -> None:
    x, dy = offset_array(3, 4, 5), offset_array(3, 4, 5, seed=8)
    mask = np.random.default_rng(1).random(x.shape) < 0.7
    clean = trace(x, mask=mask, dy=dy, explain=True, **options).as_dict()
    dirty = np.where(mask, x, np.nan), np.where(mask, dy, np.inf)
    assert trace(dirty[0], mask=mask, dy=dirty[1], explain=True, **options).as_dict() == clean
    shares, whole = np.array(clean["shares"]), np.array(trace(x, **options).as_dict()["shares"])
    assert (shares[mask] == whole[mask]).all()
    assert all(v is None for v in shares[~mask])
    assert not np.array(clean["y"])[~mask].any()
    assert not np.array(clean["dx"])[~mask].any()
    got: Any = clean
    for k in {v for v in shares.ravel() if v is not None}:
        here = x[mask & (whole == k)]
        assert got["count"][k] == here.size
        centre = 0.0 if options["norm"] == "rms" else np.mean(here)
        assert_close(got["var"][k], float(np.mean((here - centre) ** 2)), relative=1e-11)


def test_a_statistic_of_nothing_is_none_and_the_others_stand() -> None:
    x = offset_array(4, 2)
    got: Any = trace(x, mask=[[True, False]], explain=True).as_dict()
    alone: Any = trace(x[:, :1]).as_dict()
    assert (got["mean"][1], got["var"][1], got["skewness"][1], got["count"]) == (None, None, None, [4, 0])
    assert got["mean"][0] == alone["mean"][0]


def test_one_masked_feature_says_which_values_counted() -> None:
    got = trace([2, 4, 6, 1000], mask=[1, 1, 1, 0], eps=0).as_dict()
    assert (got["mean"], got["count"], got["shares"]) == (4.0, 3, [0, 0, 0, None])


def test_a_list_of_values_is_one_example_for_layer_norm() -> None:
    got = trace(OFFSET, norm="layer", gamma=[1, 2, 3, 4, 5]).as_dict()
    assert_close(got["mean"], math.fsum(OFFSET) / 5)
    assert (got["count"], got["shares"]) == (5, [0] * 5)
    assert_close(got["xhat"], trace(OFFSET).as_dict()["xhat"])
    assert_close(trace(OFFSET, norm="rms").as_dict()["var"], math.fsum(v * v for v in OFFSET) / 5)


def test_the_keys_of_an_array_are_those_of_a_feature_and_three_more() -> None:
    got = trace(offset_array(3, 2), dy=offset_array(3, 2)).as_dict()
    assert list(got) == [*KEYS[:11], *ARRAY_KEYS]
    assert got["norm"] == "batch"
    json.dumps(got, allow_nan=False)
    assert not {"why", *ARRAY_KEYS} & set(trace(OFFSET, dy=OFFSET).as_dict())
    rms = trace(offset_array(3, 2), norm="rms", dy=offset_array(3, 2)).as_dict()
    assert list(rms) == list(got)
    assert rms["dbeta"] is None


def said(made: module.Trace, step: str) -> str:
    """Return what is said of a step."""
    return " ".join(next(s.why for s in made.steps if s.name == step))


def test_the_reasons_of_a_feature_carry_the_numbers_of_the_run() -> None:
    x, moved = [2.0, 4.0, 6.0, 8.0], [2.0, 4.0, 6.0, 30.0]
    made = trace(x, dy=[1, -2, 3, 1], running=(4, 6), momentum=0.1, explain=True, gamma=3)
    got, other = numbers(made), numbers(trace(moved))
    assert "around 5 the mean square is 5, around 0 it would be 30, of which mean² = 25" in said(made, "mean")
    assert "With n − 1 the variance would be 6.66667 and the mean of x̂² only 0.75" in said(made, "variance")
    assert f"example 4 moved from 8 to 30 would move x̂ of example 1 from {got['xhat'][0]:.6g} to " in said(
        made, "normalize"
    )
    assert f"to {other['xhat'][0]:.6g}." in said(made, "normalize")
    assert "rstd is 0.447213 instead of 0.447214" in said(made, "normalize")
    assert "100 added to every value moves the mean from 5 to 105" in said(made, "scale and shift")
    assert "(largest change 0)" in said(made, "scale and shift")
    assert "= 0.999998, short of 1 by 2e-06 (measured: 0.999998)" in said(made, "what changes")
    assert "skewness 0 and kurtosis 1.64 before, 0 and 1.64 after" in said(made, "what stays")
    assert f"g·rstd = {3 * got['rstd']:.6g}; they move with x, so it is {got['dx'][0]:.6g}" in said(
        made, "gradient of x"
    )
    assert "5·4/(4 − 1) = 6.66667" in said(made, "running update")
    assert "running variance of 6.06667, as the weight of the old one 6.6" in said(made, "running update")
    assert f"= {got['y_inference'][0]:.6g}, and step by step" in said(made, "inference")
    assert "alone in its batch example 1 gives" in said(made, "inference")
    warm = warm_up([10, 12, 8], momentum=0.1, explain=True)
    assert "After 3 updates it still weighs 0.729, so the running mean is 2.69" in said(warm, "warm-up")
    assert 0.9**43 > 0.01 >= 0.9**44
    assert "It takes 44 updates" in said(warm, "warm-up")
    assert set(made.as_dict()["why"]) >= {"mean", "variance", "inference"}  # type: ignore[arg-type]


def test_a_bias_is_called_useless_only_where_it_is() -> None:
    x = offset_array(4, 3, 2)
    for norm, options in (("batch", {}), ("instance", {})):
        text = said(trace(x, norm=norm, explain=True, **options), "scale and shift")
        assert "Why a bias before the norm is useless" in text
        assert "not useless" not in text
    for norm, options in (("group", {"groups": 1}), ("layer", {"axes": (1, 2)}), ("rms", {"axes": (1, 2)})):
        made = trace(x, norm=norm, explain=True, **options)  # type: ignore[arg-type]
        text = said(made, "scale" if norm == "rms" else "scale and shift")
        assert "not useless" in text
    uneven = x.copy()
    uneven[:, 0] += 100
    change = np.abs(
        np.array(trace(uneven, norm="layer", axes=(1, 2)).as_dict()["xhat"])
        - np.array(trace(x, norm="layer", axes=(1, 2)).as_dict()["xhat"])
    ).max()
    text = said(trace(x, norm="layer", axes=(1, 2), explain=True), "scale and shift")
    assert f"alone changes x̂ by up to {change:.6g}" in text


def test_neighbours_enter_only_through_a_shared_statistic() -> None:
    x = offset_array(3, 2)
    for norm in ("batch", "layer"):
        text = said(trace(x, norm=norm, explain=True), "normalize")
        inside, outside = ("x[2, 0]", "x[2, 1]") if norm == "batch" else ("x[0, 1]", "x[2, 1]")
        assert f"through the statistics: {inside} moved" in text
        assert f"do not enter: {outside} moved" in text
        assert "changes x̂ of x[0, 0] by 0." in text
    assert "No neighbour shares the statistic of x[0, 0]" in said(
        trace([[7.5], [3.25]], norm="layer", explain=True), "normalize"
    )


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e6])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_reasons_are_found_for_every_norm_at_every_scale(eps: float, scale: float) -> None:
    x, found = offset_array(3, 4, 2) * scale, 0
    for options, _ in SHARING:
        made = trace(x, eps=eps, dy=x, explain=True, **options)
        assert made.as_dict() == trace(x, eps=eps, dy=x, **options).as_dict() | {"why": made.as_dict()["why"]}
        for step in made.steps:
            for sentence in step.why:
                found += 1
                assert sentence.endswith(".")
                assert not any(sign in sentence for sign in ("nan", "inf,", "{", "  ", "-0 "))
    assert found > 80
    decides = "eps decides here" in said(trace(x, eps=eps, explain=True), "normalize")
    assert decides == (eps > np.var(x[:, 0]))


def test_a_constant_is_explained_by_eps() -> None:
    made = trace([7.5, 7.5], explain=True, dy=[1, 2])
    assert "The variance is 0, and eps = 1e-05 alone keeps the division possible" in said(made, "normalize")
    assert "have no shape" in said(made, "what stays")


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([[1, 2], [3]], {}, ShapeError, "equally long at each level"),
        ([[1, 2], [3, "x"]], {}, ShapeError, "no array of numbers"),
        ([[1, 2], [3, math.nan]], {}, DataError, "nan is among the values"),
        ([[]], {}, DataError, "there are no values"),
        (np.zeros((501, 500)), {}, DataError, "250,500 values; needed: at most 250,000"),
        ([[1, 2]], {"norm": "weight"}, ArgumentError, "no norm named 'weight'; needed: batch, layer"),
        ([1, 2], {"norm": "group", "groups": 1}, ShapeError, "for group norm"),
        ([[1, 2]], {"norm": "group"}, ArgumentError, "not told into how many groups"),
        ([[1, 2, 3]], {"norm": "group", "groups": 2}, ShapeError, "3 channels in 2 groups"),
        ([[1, 2]], {"groups": 2}, ArgumentError, "batch norm is given groups"),
        ([[1, 2]], {"axes": 1}, ArgumentError, "batch norm is given axes; needed: none, because it averages"),
        ([[1, 2]], {"norm": "layer", "axes": 2}, ShapeError, "over axes"),
        ([[1, 2]], {"norm": "layer", "axes": (1, -1)}, ShapeError, "over axes"),
        ([[1, 2]], {"norm": "layer", "axes": [0.5]}, ArgumentError, "whole numbers"),
        ([[1, 2]], {"norm": "rms", "beta": 1}, ArgumentError, "rms norm got a β"),
        (
            [[1, 2]],
            {"gamma": [1, 2, 3]},
            ShapeError,
            r"gamma has shape \(3,\); needed: a number or the shape \(2,\)",
        ),
        ([[1, 2], [3, 4]], {"dy": [1, 2]}, ShapeError, r"dy has shape \(2,\)"),
        ([[1, 2], [3, 4]], {"mask": [True, False, True]}, ShapeError, "broadcasts to"),
        ([[1, 2], [3, 4]], {"mask": [[0, 0]]}, DataError, "leaves no value"),
        ([[1, 2], [3, 4]], {"mask": [[2, 1]]}, DataError, "other values than true and false"),
        ([[1, 2], [3, 4]], {"running": ([1, 2, 3], 1)}, ShapeError, "one for each of 2 channels"),
        ([[1, 2], [3, 4]], {"running": ([1, 2], [1, -3])}, ArgumentError, "running variance is -3"),
        ([[1, 2]], {"norm": "layer", "running": (0, 1)}, ArgumentError, "layer norm is given running"),
        ([[1, 2]], {"norm": "layer", "momentum": 0.1}, ArgumentError, "layer norm is given a momentum"),
        ([[1, 5], [1, 7]], {"eps": 0}, ArgumentError, "a variance is 0 and eps is 0"),
        ([[1e-170, 1], [2e-170, 3]], {}, DataError, "too close together"),
        ([[1e200, 1], [-1e200, 3]], {}, DataError, "step 'variance' are too large"),
        (
            [[1e150, 1], [-1e150, 3]],
            {},
            DataError,
            "other values are tried, and there is one as large as 1e.150",
        ),
    ],
)
def test_an_array_that_cannot_be_traced_is_refused_in_a_sentence(
    x: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trace(x, explain=True, **options)


def test_counting_and_sorting_by_statistic_agree_with_one_at_a_time() -> None:
    x = np.round(offset_array(5, 3, 4), 0)
    taken = given.check(
        x,
        norm="batch",
        groups=None,
        axes=None,
        gamma=1.0,
        beta=0.0,
        eps=0.0,
        dy=None,
        mask=None,
        running=None,
    )
    # The largest value of one channel is the smallest of the next.
    assert numbers(trace([[0.0, 1.0, 3.0], [1.0, 3.0, 5.0]]))["distinct_in_x"] == [2, 2, 2]
    assert grouped.distinct(taken, x) == [len(set(x[:, c].ravel().tolist())) for c in range(3)]
    assert grouped.spread(taken, x).tolist() == [float(np.ptp(x[:, c])) for c in range(3)]


def test_one_feature_keeps_its_shape_to_the_last_digit_however_long_it_is() -> None:
    # Pairwise sums and Python's power: what the trace has always printed, told apart from other orders.
    told = 0
    for n in range(2, 90):
        x = np.random.default_rng(n).normal(1000.0, 3.0, n)
        got: Any = trace(x).as_dict()
        scaled = np.array(got["xhat"]) / np.max(np.abs(got["xhat"]))
        var, third = float(np.mean(scaled**2)), float(np.mean(scaled**3))
        assert got["skewness"] == third / var**1.5
        assert got["kurtosis"] == float(np.mean(scaled**4)) / var**2
        told += sum((scaled**3).tolist()) / n != third
    assert told > 20
