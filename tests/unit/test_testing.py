"""The shipped checks: each accepts a right layer and rejects one that breaks just its law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normalcy import nn as ours
from normalcy import testing
from normalcy.errors import ArgumentError

X = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)) + 2


class Wrong(nn.Module):
    """Instance norm, followed by something that breaks a law."""

    eps = 1e-5

    def __init__(self, spoil: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.spoil = ours.InstanceNorm1d(4, affine=True), spoil

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.norm(x), x)


class Backward(torch.autograd.Function):
    """The identity, with another backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.change(dy), None


class Own(nn.Module):
    """A norm over the last axis written out, with a formula of its own."""

    eps = 1e-5

    def __init__(self, formula: Callable[..., Tensor], size: int = 5) -> None:
        super().__init__()
        self.formula, self.normalized_shape = formula, (size,)
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def own(formula: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Own(formula)


def wrong(spoil: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Wrong(spoil)


def normalized(layer: Own, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + layer.eps).rsqrt()


def naive_variance(layer: Own, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * (var + layer.eps).rsqrt() * layer.weight + layer.bias


def statistics_detached(layer: Own, x: Tensor) -> Tensor:
    still = x.detach()
    centred = x - still.mean(-1, keepdim=True)
    return centred * (still.var(-1, keepdim=True, correction=0) + layer.eps).rsqrt() * layer.weight


def eps_outside_the_root(layer: Own, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + layer.eps)


class Before(nn.Module):
    """Instance norm, with something added to the gradient of each channel."""

    def __init__(self, *added: float) -> None:
        super().__init__()
        self.norm, self.added = ours.InstanceNorm1d(4, affine=True), added

    def forward(self, x: Tensor) -> Tensor:
        added = torch.tensor(self.added)[:, None]
        return self.norm(Backward.apply(x, lambda dx: dx + added.to(dx)))


def by_strides(y: Tensor, x: Tensor) -> Tensor:
    return y if x.is_contiguous() else y.flip(-1)


class Forgetful(nn.LayerNorm):
    """It owns a bias, and leaves it out."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


class BatchStatisticsAlways(nn.BatchNorm1d):
    """Evaluation as in training."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


class Alone(nn.BatchNorm1d):
    """Training as in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def nothing_finite(y: Tensor, _: Tensor) -> Tensor:
    return y * torch.nan


def one_not_finite(y: Tensor, _: Tensor) -> Tensor:
    return torch.cat([y[..., :-1], y[..., -1:] * torch.nan], -1)


def check_constant(layer: nn.Module, x: Tensor) -> None:
    testing.check_constant_gives_bias(layer, x.shape, dtype=x.dtype)


Check = Callable[[nn.Module, Tensor], None]
LAYER, INSTANCE, BATCH = (
    lambda: ours.LayerNorm(5),
    lambda: ours.InstanceNorm1d(4, affine=True),
    lambda: ours.BatchNorm1d(4),
)
RIGHT: dict[Check, list[Callable[[], nn.Module]]] = {
    testing.check_shift_invariance: [LAYER, INSTANCE, BATCH, wrong(lambda y, _: y)],
    testing.check_scale_invariance: [
        LAYER,
        INSTANCE,
        BATCH,
        lambda: ours.RMSNorm(5, eps=1e-5),
        own(normalized),
    ],
    testing.check_train_equals_eval: [LAYER, INSTANCE, lambda: ours.RMSNorm(5), lambda: nn.RMSNorm(5)],
    testing.check_eval_independent_of_neighbours: [LAYER, INSTANCE, BATCH, lambda: ours.RMSNorm(5)],
    testing.check_depends_on_neighbours: [BATCH, lambda: nn.BatchNorm1d(4)],
    testing.check_batch_order: [LAYER, INSTANCE, BATCH, lambda: ours.RMSNorm(5), lambda: nn.RMSNorm(5)],
    testing.check_layouts: [LAYER, INSTANCE, BATCH, lambda: ours.RMSNorm(5), lambda: nn.RMSNorm(5)],
    check_constant: [LAYER, INSTANCE, BATCH, lambda: ours.GroupNorm(2, 4), lambda: ours.InstanceNorm1d(4)],
    testing.check_gradient_sums_to_zero: [
        LAYER,
        INSTANCE,
        BATCH,
        lambda: ours.GroupNorm(2, 4),
        lambda: ours.LayerNorm2d(4),
        wrong(lambda y, _: 3 * y),
    ],
    testing.check_gradients: [LAYER, INSTANCE, BATCH, lambda: ours.RMSNorm(5)],
}
WRONG: dict[Check, list[tuple[str, Callable[[], nn.Module], str]]] = {
    testing.check_shift_invariance: [
        ("x leaks", wrong(lambda y, x: y + 1e-3 * x), r"of x \+ 100 at .* ulps from"),
        ("rms", lambda: ours.RMSNorm(5), r"of x \+ 100 at"),
        ("naive variance", own(naive_variance), r"of x \+ 100 at"),
    ],
    testing.check_scale_invariance: [
        ("x leaks", wrong(lambda y, x: y + 1e-3 * x), r"of 8·x at .* ulps from"),
        ("eps outside", own(eps_outside_the_root), r"of 8·x at"),
    ],
    testing.check_train_equals_eval: [
        ("batch", BATCH, "training and evaluation differ"),
        ("dropout", lambda: nn.Sequential(LAYER(), nn.Dropout(0.5)), "training and evaluation differ"),
    ],
    testing.check_eval_independent_of_neighbours: [
        ("batch leaks", wrong(lambda y, x: y + 1e-3 * x.mean()), "of example 0 alone at"),
        ("batch statistics", lambda: BatchStatisticsAlways(4), "of example 0 alone at"),
        ("last example", wrong(lambda y, x: y + (torch.arange(len(x)) == 5)[:, None, None]), "example 5"),
    ],
    testing.check_depends_on_neighbours: [
        ("layer", LAYER, "does not depend on its neighbours"),
        ("stored statistics", lambda: Alone(4), "does not depend on its neighbours"),
    ],
    testing.check_batch_order: [
        ("first example leaks", wrong(lambda y, _: y + y[:1] * 1e-3), "of the batch reversed at"),
        ("by place", wrong(lambda y, _: y + torch.arange(6.0)[:, None, None].to(y)), "of the batch reversed"),
    ],
    testing.check_layouts: [("reads strides", wrong(by_strides), "of a transposed input at")],
    check_constant: [
        ("bias forgotten", lambda: Forgetful(5), "something else than the bias, by up to 1.9"),
        ("bias twice", own(lambda m, x: normalized(m, x) + 2 * m.bias), "something else than the bias"),
        ("bias reversed", own(lambda m, x: normalized(m, x) + m.bias.flip(0)), "else than the bias"),
        ("offset", wrong(lambda y, _: y + 1e-6), "something else than the bias"),
        ("x leaks", wrong(lambda y, x: y + 1e-3 * x), "the constant 0.1 misses the bias by up to 0.0001"),
        ("no bias", own(lambda m, x: normalized(m, x) * m.weight), "something else than the bias"),
    ],
    testing.check_gradient_sums_to_zero: [
        ("x leaks", wrong(lambda y, x: y + 1e-3 * x), "over the 5 values of a statistic dx sums to"),
        ("per channel", lambda: Before(3e-3, -1e-3, -1e-3, -1e-3), "over the 5 values"),
        ("rms", lambda: ours.RMSNorm(5), "over the 5 values of a statistic dx sums to"),
        ("statistics detached", own(statistics_detached), "dx sums to"),
        ("stored statistics", lambda: BATCH().eval(), "over the 1 values of a statistic dx sums to"),
        ("no gradient", wrong(lambda y, _: y.detach()), "no gradient reaches x"),
        ("none to x", own(lambda m, x: normalized(m, x.detach()) * m.weight), "no gradient reaches x"),
        ("not finite", wrong(lambda y, _: Backward.apply(y, lambda dy: dy * torch.nan)), "dx sums to nan"),
    ],
    testing.check_gradients: [
        ("one percent", wrong(lambda y, _: Backward.apply(y, lambda dy: dy * 1.01)), "Jacobian mismatch"),
        ("not twice", wrong(lambda y, _: Backward.apply(y, lambda dy: dy.detach())), "mismatch|not require"),
        ("bias twice", own(lambda m, x: normalized(m, x) + Backward.apply(m.bias, lambda d: 2 * d)), "Jacob"),
    ],
}  # fmt: skip
for refused in (many for check, many in WRONG.items() if check is not testing.check_gradients):
    refused.append(
        ("NaN", wrong(nothing_finite), "finite input gives .* values that are not finite|sums to nan")
    )
    refused.append(
        ("a NaN", wrong(one_not_finite), "finite input gives .* values that are not finite|to nan")
    )
WRONG[testing.check_gradients].append(("NaN", wrong(nothing_finite), "Jacobian mismatch|nan"))


def example(check: Check) -> Tensor:
    return X[:2, :, :5] if check is testing.check_gradients else X


@pytest.mark.parametrize(
    ("check", "build"),
    [pytest.param(c, b, id=f"{c.__name__}-{type(b()).__name__}") for c, many in RIGHT.items() for b in many],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_check_accepts_a_layer_that_keeps_its_law(
    check: Check, build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = build().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) + 0.25)
    plain_half = dtype == torch.bfloat16 and not isinstance(layer, (ours.LayerNorm, ours.InstanceNorm1d))
    if plain_half and check in (testing.check_scale_invariance, testing.check_shift_invariance):
        layer = build()  # what is written out in plain operations loses digits, as half precision does
        dtype = torch.float32
    check(layer, example(check).to(dtype))


@pytest.mark.parametrize(
    ("check", "build", "message"),
    [pytest.param(c, b, m, id=f"{c.__name__}-{n}") for c, many in WRONG.items() for n, b, m in many],
)
def test_a_check_refuses_a_layer_that_breaks_its_law(
    check: Check, build: Callable[[], nn.Module], message: str
) -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=message) as caught:
        check(build(), example(check))
    assert "\n" not in str(caught.value)


def test_two_values_of_a_statistic_have_a_gradient_of_rounding_alone_and_pass() -> None:
    """Then x̂ is ±1 whatever x is, dx is eps/(var + eps) of what cancelled, and Σ|dx| is no measure."""
    layer = ours.BatchNorm1d(3)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3)) * 50 + 1e4
    testing.check_gradient_sums_to_zero(layer, x)


def test_a_wrong_sum_of_one_statistic_is_not_hidden_by_the_size_of_another() -> None:
    x = X * torch.tensor([1e3, 1.0, 1.0, 1e-2])[:, None]
    testing.check_gradient_sums_to_zero(ours.InstanceNorm1d(4), x)
    with pytest.raises(AssertionError, match="over the 5 values of a statistic"):
        testing.check_gradient_sums_to_zero(Before(1e-6, 0, 0, 0), x)


def test_an_eps_of_none_is_that_of_the_dtype_computed_in() -> None:
    """Values so small that eps decides: the float64 copy must not take its own, 2e-16."""
    x = X * 1e-4
    for build in (lambda: ours.RMSNorm(5), lambda: nn.RMSNorm(5)):
        testing.check_layouts(build(), x)
        testing.check_batch_order(build(), x)
        layer = build().bfloat16()
        testing.check_layouts(layer, x.bfloat16())
        assert layer.eps is None


def test_what_is_not_finite_in_the_input_may_stay_so() -> None:
    x = X.clone()
    x[0, 0, 0] = torch.nan
    testing.check_batch_order(ours.LayerNorm(5), x)


def test_constants_are_told_from_almost_constants() -> None:
    testing.check_constant_gives_bias(ours.BatchNorm1d(1), (1000, 1), 7.3)
    with pytest.raises(AssertionError, match=r"BatchNorm1d: the constant 7.3 misses the bias by up to 0\.0"):
        testing.check_constant_gives_bias(nn.BatchNorm1d(1), (1000, 1), 7.3)


def test_a_layer_that_loses_channels_last_is_rejected() -> None:
    class Contiguous(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean()).contiguous()

    with pytest.raises(AssertionError, match="a channels_last input gives an output with strides"):
        testing.check_layouts(Contiguous(), X[..., None].repeat(1, 1, 1, 3), ulps=64)


def test_checks_leave_the_layer_as_it_was() -> None:
    layer = ours.BatchNorm1d(4)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for check in (testing.check_layouts, testing.check_batch_order, testing.check_depends_on_neighbours):
        check(layer, X)
    testing.check_train_equals_eval(ours.LayerNorm(5), X)
    testing.check_eval_independent_of_neighbours(layer, X)
    testing.check_gradient_sums_to_zero(layer, X)
    assert layer.training
    assert layer.weight.grad is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_scale_law_without_eps_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a layer with a number as `eps`"):
        testing.check_scale_invariance(nn.RMSNorm(5), X)


def test_the_worst_element_is_named_with_its_three_values() -> None:
    exact = torch.tensor([[1.0, 2.0], [3.0, 1e4]], dtype=torch.float64)
    fast = exact.float()
    fast[1, 0] += 1e-3
    plain = exact.float()
    plain[0, 1] += 1.0
    with pytest.raises(AssertionError, match=r"y at \(1, 0\): fast 3\.0009.*, plain 3\.0, exact 3\.0"):
        testing.assert_no_worse_than_plain(fast, plain, exact, scale=exact, what="y")
    testing.assert_no_worse_than_plain(plain, plain, exact)


def test_plain_code_of_lower_precision_allows_its_own_error() -> None:
    exact = torch.tensor([1 / 3, 1e4 / 3], dtype=torch.float64)
    testing.assert_no_worse_than_plain(exact.bfloat16().float(), exact.bfloat16(), exact, slack_ulps=0)
    with pytest.raises(AssertionError):
        testing.assert_no_worse_than_plain(exact.bfloat16(), exact.float(), exact, slack_ulps=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_close_to_nothing_but_itself(bad: float) -> None:
    exact = torch.tensor([1.0, bad], dtype=torch.float64)
    testing.assert_close(exact.float(), exact)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        testing.assert_close(torch.tensor([1.0, 2.0]), exact)
    with pytest.raises(AssertionError, match=r"at \(0,\)"):
        testing.assert_close(torch.tensor([bad, bad]), exact)


def test_another_shape_is_no_match() -> None:
    with pytest.raises(AssertionError, match=r"y: shape \(2,\) is not \(1, 2\)"):
        testing.assert_close(torch.ones(2), torch.ones(1, 2).double(), what="y")


def test_layouts_hold_the_same_values_in_different_places() -> None:
    x = X[..., None]
    found = dict(testing.layouts(x))
    assert {"contiguous", "channels_last", "transposed", "sliced", "offset"} == set(found)
    assert all(torch.equal(laid, x) for laid in found.values())
    assert found["offset"].storage_offset() == 3
    assert not found["sliced"].is_contiguous()
