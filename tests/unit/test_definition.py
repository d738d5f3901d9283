"""The definition judged by cases worked out elsewhere, by finite differences and by its own laws."""

from __future__ import annotations

import ast
import doctest
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.cases import Case, assert_close, cases

from normalcy import definition
from normalcy.errors import ArgumentError, ShapeError

SHAPE = (3, 4, 5)
NORMS: dict[str, dict[str, Any]] = {
    "batch": {"norm": "batch"},
    "instance": {"norm": "instance"},
    "group": {"norm": "group", "groups": 2},
    "layer": {"norm": "layer"},
    "layer over channels": {"norm": "layer", "axes": (1,)},
    "layer over channels and space": {"norm": "layer", "axes": (1, 2)},
    "rms": {"norm": "rms"},
    "rms over channels": {"norm": "rms", "axes": (1,)},
}
PARAMETER_SHAPE = {"layer": (5,), "layer over channels and space": (4, 5), "rms": (5,)}
every_norm = pytest.mark.parametrize("name", NORMS)
centred_norms = pytest.mark.parametrize("name", [n for n in NORMS if not n.startswith("rms")])


def drawn(name: str, seed: int = 0, offset: float = 30.0) -> tuple[Any, Any, Any, Any]:
    """Draw skewed data off centre, dy, weight and bias."""
    random = np.random.default_rng(seed)
    shape = PARAMETER_SHAPE.get(name, (4,))
    x = offset + random.gamma(2.0, 1.5, SHAPE)
    return x, random.normal(size=SHAPE), random.normal(size=shape), random.normal(size=shape)


def forward_in_longdouble(name: str, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Write the norm once more, value by value and in extended precision, from the list of neighbours."""
    y = np.empty(SHAPE, np.longdouble)
    for at in np.ndindex(*SHAPE):
        n, c, p = at
        block = {
            "batch": x[:, c, :],
            "instance": x[n, c, :],
            "group": x[n, (c // 2) * 2 : (c // 2) * 2 + 2, :],
            "layer": x[n, c, :],
            "layer over channels": x[n, :, p],
            "layer over channels and space": x[n],
            "rms": x[n, c, :],
            "rms over channels": x[n, :, p],
        }[name]
        mean = np.longdouble(0) if name.startswith("rms") else block.mean()
        parameter = {"layer": (p,), "rms": (p,), "layer over channels and space": (c, p)}.get(name, (c,))
        y[at] = (
            weight[parameter] * (x[at] - mean) / np.sqrt(((block - mean) ** 2).mean() + eps) + bias[parameter]
        )
    return y


def layout(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Say how to split the drawn data, and which axes of it share a statistic."""
    if name == "group":
        return (3, 2, 2, 5), (2, 3)
    axes = {"batch": (0, 2), "layer over channels": (1,), "rms over channels": (1,)}
    return SHAPE, {**axes, "layer over channels and space": (1, 2)}.get(name, (2,))


@pytest.mark.parametrize("case", [c for c in cases(through="definition") if c.kind == "forward"], ids=str)
def test_forward_cases_come_out_as_worked_by_hand(case: Case) -> None:
    given = case.given
    x = np.array(given["x"], float)[:, None]
    made = definition.forward("batch", x, [given.get("gamma", 1)], [given.get("beta", 0)], eps=given["eps"])
    var = float(made.var[0])
    z = made.xhat.ravel() / np.sqrt(np.mean(made.xhat**2)) if var else None
    got = {
        "mean": float(made.mean[0]),
        "var": var,
        "xhat": made.xhat.ravel().tolist(),
        "y": made.y.ravel().tolist(),
        "normalized_variance": float(np.mean(made.xhat**2)),
        "distinct": len(np.unique(made.xhat)),
        "skewness": None if z is None else float(np.mean(z**3)),
        "kurtosis": None if z is None else float(np.mean(z**4)),
    }
    assert_close(got, case.right)


@pytest.mark.parametrize("case", [c for c in cases(through="definition") if c.kind == "backward"], ids=str)
def test_backward_cases_come_out_as_worked_by_hand(case: Case) -> None:
    given = case.given
    x, dy = np.array(given["x"], float)[:, None], np.array(given["dy"], float)[:, None]
    made = definition.backward("batch", x, dy, [given.get("gamma", 1)], eps=given["eps"])
    got = {"dx": made.dx.ravel().tolist(), "dgamma": float(made.dweight[0]), "dbeta": float(made.dbias[0])}
    assert_close(got, case.right, scale=float(np.abs(dy).max()))


@pytest.mark.parametrize("case", cases("grid", through="definition"), ids=str)
def test_one_input_through_every_norm_gives_the_right_output_and_gradients(case: Case) -> None:
    given, right = case.given, case.right
    x, dy, weight = (np.array(given[key], float) for key in ("x", "dy", "weight"))
    bias = None if given["bias"] is None else np.array(given["bias"])
    settings: dict[str, Any] = {"norm": given["norm"], "eps": given["eps"], "groups": given["groups"]}
    if given["norm"] in {"layer", "rms"}:
        settings["axes"] = tuple({"channel": 1, "position": 2}[name] for name in given["averaged_over"])
    expanded = settings.get("axes") == (1, 2)
    if expanded:
        weight, bias = np.repeat(weight[:, None], 2, axis=1), np.repeat(bias[:, None], 2, axis=1)
    made = definition.forward(x=x, weight=weight, bias=bias, **settings)
    gradients = definition.backward(x=x, dy=dy, weight=weight, **settings)
    dweight, dbias = gradients.dweight, gradients.dbias
    if expanded:
        dweight, dbias = dweight.sum(axis=1), dbias.sum(axis=1)
    assert_close(made.y.tolist(), right["y"])
    assert_close(gradients.dx.tolist(), right["dx"], scale=float(np.abs(right["dx"]).max()))
    assert_close(dweight.tolist(), right["dweight"])
    if right["dbias"] is not None:
        assert_close(dbias.tolist(), right["dbias"])


def test_the_same_value_among_other_neighbours_comes_out_differently() -> None:
    (case,) = [c for c in cases(through="definition") if c.kind == "noise"]
    given, right = case.given, case.right
    for mean, expected in ((given["mean"], right["xhat"]), (given["before_mean"], right["before"])):
        others = mean + sqrt(given["var"]) * np.array([1.0, -1.0, 1.0, -1.0])
        # The value itself is normalized by what its neighbours' statistics are.
        made = definition.forward("batch", others[:, None], eps=given["eps"])
        got = float((given["x"] - made.mean[0]) * made.rstd[0])
        assert_close(got, expected)


def test_inference_and_its_backward_use_the_statistics_as_constants() -> None:
    (case,) = [c for c in cases(through="definition") if c.kind == "inference"]
    given = case.given
    stored = ([given["running_mean"]], [given["running_var"]], [given["gamma"]])
    y = definition.inference([given["x"]], *stored, [given["beta"]], eps=given["eps"])
    a, c = definition.affine(*stored, [given["beta"]], eps=given["eps"])
    assert_close({"y_inference": y[0].tolist(), "a": float(a[0]), "c": float(c[0])}, case.right)

    (case,) = [c for c in cases(through="definition") if c.kind == "backward-inference"]
    given = case.given
    x, dy = np.array(given["x"])[:, None], np.array(given["dy"])[:, None]
    stored = ([given["running_mean"]], [given["running_var"]], [given["gamma"]])
    made = definition.inference_backward(x, dy, *stored, eps=given["eps"])
    got = {"dx": made.dx.ravel().tolist(), "dgamma": float(made.dweight[0]), "dbeta": float(made.dbias[0])}
    assert_close(got, case.right)


@pytest.mark.parametrize(
    "case", [c for c in cases(through="statistics") if c.kind == "running-update"], ids=str
)
def test_three_running_updates_come_out_as_worked_by_hand(case: Case) -> None:
    given = case.given
    mean, var, m = given["initial_mean"], given["initial_var"], given["momentum"]
    after = []
    for k, batch in enumerate(given["batches"], start=1):
        made = definition.forward("batch", np.array(batch, float)[:, None])
        mean = definition.running_update(mean, made.mean[0], m)
        var = definition.running_update(var, definition.stored_variance(made.var[0], len(batch)), m)
        after.append(
            {
                "running_mean": float(mean),
                "running_var": float(var),
                "debiased_mean": float(definition.debias(mean, given["initial_mean"], m, k)),
                "debiased_var": float(definition.debias(var, given["initial_var"], m, k)),
            }
        )
    assert_close(after, case.right["after"])


def test_the_average_of_variances_is_not_the_square_of_the_average_of_deviations() -> None:
    (case,) = [c for c in cases(through="statistics") if c.kind == "std-versus-variance"]
    of_variances = of_deviations = np.float64(0)
    for k, std in enumerate(case.given["batch_std"]):
        of_variances = definition.running_update(of_variances, std**2, None, updates=k)
        of_deviations = definition.running_update(of_deviations, std, None, updates=k)
    assert_close(
        {"mean_of_std": float(of_deviations), "root_of_mean_variance": sqrt(float(of_variances))}, case.right
    )


@every_norm
def test_every_norm_agrees_with_a_second_writing_in_extended_precision(name: str) -> None:
    x, _, weight, bias = drawn(name, offset=1e4)
    exact = forward_in_longdouble(name, x.astype(np.longdouble), weight, bias, 1e-3)
    made = definition.forward(x=x, weight=weight, bias=bias, eps=1e-3, **NORMS[name])
    # x is exact, so only the last few roundings of float64 remain.
    assert float(np.abs(made.y - exact).max()) < 1e-13 * float(np.abs(exact).max())


@every_norm
def test_the_backward_pass_is_the_slope_of_the_forward_pass(name: str) -> None:
    x, dy, weight, bias = drawn(name)
    gradients = definition.backward(x=x, dy=dy, weight=weight, eps=0.1, **NORMS[name])
    h = np.longdouble(1e-5)  # error of the central difference: h² times a third derivative of a few units

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        return (forward_in_longdouble(name, x, weight, bias, 0.1) * dy).sum()

    point = [np.asarray(v, np.longdouble) for v in (x, weight, bias)]
    for which, gradient in enumerate((gradients.dx, gradients.dweight, gradients.dbias)):
        assert gradient.shape == point[which].shape
        for at in np.ndindex(*gradient.shape):
            ends = []
            for step in (h, -h):
                moved = [v.copy() for v in point]
                moved[which][at] += step
                ends.append(loss(*moved))
            slope = float((ends[0] - ends[1]) / (2 * h))
            assert abs(gradient[at] - slope) < 1e-8 * (1 + abs(slope)), (which, at)


@centred_norms
def test_the_input_gradient_has_no_mean_and_no_part_along_the_normalized_input(name: str) -> None:
    x, dy, weight, _ = drawn(name)
    settings = NORMS[name]
    made = definition.forward(x=x, eps=0, **settings)
    dx = definition.backward(x=x, dy=dy, weight=weight, eps=0, **settings).dx
    split, averaged = layout(name)
    for along in (np.ones_like(made.xhat), made.xhat):
        total = (dx * along).reshape(split).sum(axis=averaged)
        size = np.abs(dx * along).reshape(split).sum(axis=averaged)
        assert np.abs(dx).max() > 0.01
        assert (np.abs(total) <= 1e-12 * size).all()


@every_norm
def test_normalizing_divides_the_variance_by_itself_plus_eps_and_keeps_the_shape(name: str) -> None:
    x, _, _, _ = drawn(name)
    settings, eps = NORMS[name], 0.5
    made = definition.forward(x=x, eps=eps, **settings)
    split, averaged = layout(name)
    blocks, normal = (np.moveaxis(v.reshape(split), averaged, range(len(averaged))) for v in (x, made.xhat))
    blocks, normal = (v.reshape(-1, made.mean.size) for v in (blocks, normal))
    np.testing.assert_allclose(
        (normal**2).mean(axis=0), made.var.ravel() / (made.var.ravel() + eps), rtol=1e-12
    )
    for power in (3, 4):
        moments = []
        for v in (blocks, normal):
            c = v - (v.mean(axis=0) if not name.startswith("rms") else 0)
            moments.append((c**power).mean(axis=0) / (c**2).mean(axis=0) ** (power / 2))
        np.testing.assert_allclose(moments[0], moments[1], rtol=1e-10, atol=1e-10)


@centred_norms
@pytest.mark.parametrize("constant", [0.1, -1000.3, 1e15 / 3])
def test_a_constant_becomes_exactly_the_bias(name: str, constant: float) -> None:
    _, _, weight, bias = drawn(name)
    made = definition.forward(x=np.full(SHAPE, constant), weight=weight, bias=bias, **NORMS[name])
    bias_alone = np.moveaxis(np.broadcast_to(bias, (3, 5, 4)), 1, 2) if bias.shape == (4,) else bias
    assert (made.y == bias_alone).all()
    assert (made.mean == constant).all()
    assert (made.var == 0).all()


def test_a_thousand_tenths_have_the_mean_of_one_tenth() -> None:
    tenths = np.full((1000, 1), 0.1)
    assert sum(tenths.ravel().tolist()) / 1000 != 0.1  # which is why a value of the data is subtracted first
    assert definition.forward("batch", tenths).mean[0] == 0.1


def test_offset_data_keeps_its_statistics_to_the_last_digits() -> None:
    x = 1e8 + np.random.default_rng(3).normal(size=501)
    exact = [Fraction(float(v)) for v in x]
    mean = sum(exact) / len(exact)
    var = sum((v - mean) ** 2 for v in exact) / len(exact)
    made = definition.forward("batch", x[:, None])
    assert_close([float(made.mean[0]), float(made.var[0])], [float(mean), float(var)], relative=1e-14)
    assert abs(float(made.var[0]) - float(var)) < 1e-14 * float(var)


@centred_norms
def test_the_layer_restricts_nothing_since_the_identity_is_reachable(name: str) -> None:
    x, _, _, _ = drawn(name)
    x = x if name != "batch" else x * np.array([1.0, 2.0, 3.0, 4.0])[None, :, None]
    made = definition.forward(x=x, eps=1e-3, **NORMS[name])
    if name == "batch":
        again = definition.forward("batch", x, np.sqrt(made.var + 1e-3), made.mean, eps=1e-3).y
        np.testing.assert_allclose(again, x, rtol=1e-14)
    split, averaged = layout(name)
    rebuilt = made.xhat.reshape(split) / np.expand_dims(made.rstd, averaged) + np.expand_dims(
        made.mean, averaged
    )
    np.testing.assert_allclose(rebuilt.reshape(x.shape), x, rtol=1e-14)


def test_folding_into_a_linear_layer_equals_inference_after_it() -> None:
    random = np.random.default_rng(5)
    x, w, b = 20 + random.normal(size=(6, 3)), random.normal(size=(4, 3)), random.normal(size=4)
    mean, var, gamma, beta = (
        random.normal(size=4),
        random.gamma(2, size=4),
        random.normal(size=4),
        random.normal(size=4),
    )
    for bias in (b, None):
        z = x @ w.T + (0 if bias is None else bias)
        a, c = definition.affine(mean, var, gamma, beta)
        folded_w, folded_b = definition.fold(w, bias, a, c)
        np.testing.assert_allclose(
            x @ folded_w.T + folded_b, definition.inference(z, mean, var, gamma, beta), rtol=1e-12, atol=1e-12
        )
    (case,) = [c for c in cases("field") if c.id == "fold-scalar"]
    given = case.given
    a, c = definition.affine(
        given["running_mean"], given["running_var"], given["gamma"], given["beta"], eps=given["eps"]
    )
    weight, bias = definition.fold([[given["weight"]]], [given["bias"]], [float(a)], [float(c)])
    assert_close([weight.item(), bias.item()], [case.right["weight"], case.right["bias"]])


def test_folding_scales_a_convolution_by_output_channel() -> None:
    random = np.random.default_rng(6)
    w, a, c = random.normal(size=(4, 3, 2, 2)), random.normal(size=4), random.normal(size=4)
    folded, bias = definition.fold(w, None, a, c)
    patch = 7 + random.normal(size=(3, 2, 2))
    before = np.tensordot(w, patch, axes=3)
    np.testing.assert_allclose(
        np.tensordot(folded, patch, axes=3) + bias, a * before + c, rtol=1e-12, atol=1e-12
    )
    with pytest.raises(ShapeError, match="one value of each per output channel"):
        definition.fold(w, None, a[:3], c)


def test_momentum_weighs_the_new_value_or_the_old_one_or_every_batch_alike() -> None:
    assert_close(float(definition.running_update(4.0, 10.0, 0.1)), 4.6)
    assert_close(float(definition.running_update(4.0, 10.0, 0.1, weighs="old")), 9.4)
    assert float(definition.running_update(4.0, 10.0, 0.0)) == 4.0
    assert float(definition.running_update(4.0, 10.0, 1.0)) == 10.0
    running = np.float64(123.0)  # what stands there before the first batch counts for nothing
    for k, new in enumerate([3.0, 5.0, 10.0]):
        running = definition.running_update(running, new, None, updates=k)
    assert_close(float(running), 6.0)
    with pytest.raises(ArgumentError, match=r"momentum is 1\.5; needed: a weight from 0 to 1"):
        definition.running_update(0.0, 1.0, 1.5)


def test_debiasing_is_exact_for_a_small_momentum_and_refused_without_an_update() -> None:
    running = definition.running_update(0.0, 3.0, 1e-12)
    assert_close(float(definition.debias(running, 0.0, 1e-12, 1)), 3.0)
    assert float(definition.debias(3.0, 99.0, 1.0, 1)) == 3.0
    for momentum, updates in ((0.0, 5), (0.1, 0), (1.0, 0)):
        with pytest.raises(ArgumentError, match="initial state alone"):
            definition.debias(1.0, 1.0, momentum, updates)


@every_norm
def test_masked_places_count_nowhere_whatever_they_hold(name: str) -> None:
    x, dy, weight, bias = drawn(name)
    mask = np.random.default_rng(9).random(SHAPE) < 0.7
    mask[0, 0, :] = mask[0, :, 0] = True
    settings = {"weight": weight, "eps": 1e-3, "mask": mask, **NORMS[name]}
    made = [
        definition.forward(x=np.where(mask, x, junk), bias=bias, **settings) for junk in (np.nan, np.inf, 1e9)
    ]
    back = [definition.backward(x=np.where(mask, x, junk), dy=dy, **settings) for junk in (np.nan, 1e9)]
    assert all((m.y == made[0].y).all() for m in made)
    assert all((b.dx == back[0].dx).all() and (b.dweight == back[0].dweight).all() for b in back)
    assert (made[0].y[~mask] == 0).all()
    assert (back[0].dx[~mask] == 0).all()
    full = definition.forward(x=x, weight=weight, bias=bias, eps=1e-3, **NORMS[name])
    whole = definition.forward(x=x, bias=bias, **{**settings, "mask": np.ones(SHAPE, bool)})
    assert (full.y == whole.y).all()
    assert (full.y[mask] != made[0].y[mask]).any()


def test_masking_padding_equals_cutting_it_off() -> None:
    (case,) = [c for c in cases("field") if c.kind == "mask"]
    x, mask = np.array(case.given["x"], float)[:, None], np.array(case.given["mask"], bool)[:, None]
    made = definition.forward("batch", x, mask=mask)
    assert_close([float(made.mean[0]), float(made.var[0])], [case.right["mean"], case.right["var"]])
    cut, dy = definition.forward("batch", x[:5]), np.arange(10.0)[:, None] ** 2
    np.testing.assert_allclose(made.y[:5], cut.y, rtol=1e-14)
    padded_dx = definition.backward("batch", x, dy, mask=mask).dx
    np.testing.assert_allclose(padded_dx[:5], definition.backward("batch", x[:5], dy[:5]).dx, atol=1e-13)


def test_where_nothing_is_valid_the_output_and_the_gradient_are_zero() -> None:
    x = np.random.default_rng(1).normal(5, 1, SHAPE)
    mask = np.ones(SHAPE, bool)
    mask[1] = False
    made = definition.forward("instance", x, mask=mask, eps=0)
    assert (made.y[1] == 0).all()
    assert np.isnan(made.mean[1]).all()
    assert (made.count[1] == 0).all()
    assert (definition.backward("instance", x, x, mask=mask).dx[1] == 0).all()
    empty = definition.forward("batch", np.empty((0, 5, 9)))
    assert empty.y.shape == (0, 5, 9)
    gradients = definition.backward("batch", np.empty((0, 5, 9)), np.empty((0, 5, 9)))
    assert gradients.dweight.tolist() == gradients.dbias.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"norm": "batch", "eps": -1e-5}, ArgumentError, "eps is -1e-05"),
        ({"norm": "batch", "eps": float("nan")}, ArgumentError, "eps is nan"),
        ({"norm": "power"}, ArgumentError, "no norm named 'power'"),
        ({"norm": "group", "groups": 3}, ShapeError, "4 channels in 3 groups"),
        ({"norm": "group"}, ShapeError, "4 channels in None groups"),
        ({"norm": "layer", "axes": (5,)}, ShapeError, "layer norm over axes"),
        ({"norm": "layer", "axes": (2, -1)}, ShapeError, "different axes"),
        ({"norm": "batch", "weight": [1.0, 2.0, 3.0]}, ShapeError, "the weight has shape"),
        ({"norm": "batch", "mask": [[True, False]]}, ShapeError, "the mask has shape"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    settings: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        definition.forward(x=drawn("batch")[0], **settings)


def test_no_variance_and_no_eps_is_refused_and_so_is_dy_of_another_shape() -> None:
    with pytest.raises(ArgumentError, match="a variance is 0 and eps is 0"):
        definition.forward("batch", [[3.0, 1.0], [3.0, 2.0]], eps=0)
    with pytest.raises(ArgumentError, match="a variance is -1"):
        definition.inference([[3.0]], [0.0], [-1.0])
    with pytest.raises(ShapeError, match="dy has shape"):
        definition.backward("batch", [[3.0], [1.0]], [[3.0]])
    with pytest.raises(ShapeError, match=r"put|Put one feature as"):
        definition.forward("batch", [3.0, 1.0])
    with pytest.raises(ArgumentError, match="the variance of n = 1"):
        definition.stored_variance(2.0, 1)


def test_the_definition_imports_nothing_of_the_package_but_its_errors() -> None:
    source = Path(definition.__file__).read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    plain = {
        a.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for a in node.names
    }
    assert imported == {
        "__future__",
        "collections.abc",
        "dataclasses",
        "typing",
        "numpy.typing",
        "normalcy.errors",
    }
    assert plain == {"math", "numpy"}


def test_its_examples_run() -> None:
    ran = doctest.testmod(definition)
    assert ran.attempted >= 9
    assert ran.failed == 0
