"""The shipped checks: each accepts a right layer and rejects one that breaks just its law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normalcy import nn as ours
from normalcy import testing
from normalcy.errors import ArgumentError

X = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)) + 2


class Broken(nn.Module):
    """A layer followed by something that breaks a law."""

    eps = 1e-5

    def __init__(self, spoil: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.spoil = ours.InstanceNorm1d(4, affine=True), spoil

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.norm(x), x)


class Detached(torch.autograd.Function):
    """A backward pass that is wrong by one percent."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, dy: Tensor) -> Tensor:
        return dy * 1.01


def by_strides(y: Tensor, x: Tensor) -> Tensor:
    return y if x.is_contiguous() else y.flip(-1)


@pytest.mark.parametrize(
    ("check", "spoil", "message"),
    [
        (testing.check_shift_invariance, lambda y, x: y + 1e-3 * x, r"of x \+ 100 at .* ulps from"),
        (testing.check_scale_invariance, lambda y, x: y + 1e-3 * x, r"of 8·x at .* ulps from"),
        (testing.check_batch_order, lambda y, _: y + y[:1] * 1e-3, "of the batch reversed at"),
        (testing.check_layouts, by_strides, "of a transposed input at"),
        (
            testing.check_eval_independent_of_neighbours,
            lambda y, x: y + 1e-3 * x.mean(),
            "of example 0 alone at",
        ),
        (testing.check_gradient_sums_to_zero, lambda y, x: y + 1e-3 * x, "dx sums to"),
        (testing.check_gradients, lambda y, _: Detached.apply(y), "Jacobian mismatch"),
    ],
)
def test_a_check_accepts_what_keeps_its_law_and_rejects_what_breaks_it(
    check: Callable[[nn.Module, Tensor], None], spoil: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    x = X[:2, :, :3] if check is testing.check_gradients else X
    check(ours.InstanceNorm1d(4, affine=True), x)
    with pytest.raises(AssertionError, match=message) as caught:
        check(Broken(spoil), x)
    assert "\n" not in str(caught.value)


def test_constants_are_told_from_almost_constants() -> None:
    testing.check_constant_gives_bias(ours.BatchNorm1d(1), (1000, 1), 7.3)
    with pytest.raises(AssertionError, match=r"BatchNorm1d: the constant 7.3 misses the bias by up to 0\.0"):
        testing.check_constant_gives_bias(nn.BatchNorm1d(1), (1000, 1), 7.3)


def test_modes_and_neighbours_are_told_apart() -> None:
    batch, layer = ours.BatchNorm1d(4), ours.LayerNorm(5)
    testing.check_train_equals_eval(layer, X)
    testing.check_depends_on_neighbours(batch, X)
    with pytest.raises(AssertionError, match="training and evaluation differ"):
        testing.check_train_equals_eval(batch, X)
    with pytest.raises(AssertionError, match="does not depend on its neighbours"):
        testing.check_depends_on_neighbours(layer, X)


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
