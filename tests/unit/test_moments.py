"""Moments.of: axes, masks, dtypes, and what is refused. The laws of + are in laws/test_monoid.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normalcy import Moments
from normalcy.errors import ArgumentError, ShapeError, TypeMismatchError


def data(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 1e4) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() + offset).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (1, 2), ()])
def test_moments_are_numpys_on_the_same_values(dim: int | tuple[int, ...] | None, dtype: torch.dtype) -> None:
    x = data(3, 4, 5, dtype=dtype, offset=100)
    moments = Moments.of(x, dim)
    values = x.double().numpy()
    axis = tuple(range(3)) if dim is None else dim
    assert {moments.count.dtype, moments.mean.dtype, moments.m2.dtype} == {torch.float64}
    np.testing.assert_allclose(moments.mean.numpy(), values.mean(axis=axis), rtol=1e-14)
    # NumPy's two passes over float64 carry (offset·2⁻⁵³)² and its own rounding
    np.testing.assert_allclose(moments.var().numpy(), values.var(axis=axis), rtol=1e-12, atol=1e-24)
    assert bool((moments.count == values.size / moments.mean.numel()).all())


def test_kept_axes_have_extent_one() -> None:
    x = data(3, 4, 5)
    kept = Moments.of(x, (0, 2), keepdim=True)
    assert kept.count.shape == kept.mean.shape == kept.m2.shape == (1, 4, 1)
    assert torch.equal(kept.mean.flatten(), Moments.of(x, (0, 2)).mean)


def test_a_mask_broadcasts_and_hides_whatever_stands_there() -> None:
    x = data(3, 4, 5)
    mask = torch.tensor([True, False, True, True, False])
    spoilt = torch.where(mask, x, torch.nan)
    masked, sliced = Moments.of(spoilt, (0, 2), mask), Moments.of(x[..., mask], (0, 2))
    assert torch.equal(masked.count, sliced.count)
    torch.testing.assert_close(masked.mean, sliced.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(masked.m2, sliced.m2, rtol=1e-13, atol=0)


def test_a_mask_of_ones_is_no_mask() -> None:
    x = data(6, 4)
    masked, whole = Moments.of(x, 0, torch.ones(6, 4, dtype=torch.bool)), Moments.of(x, 0)
    assert torch.equal(masked.count, whole.count)
    torch.testing.assert_close(masked.mean, whole.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(masked.var(1), whole.var(1), rtol=1e-13, atol=0)


def test_a_fully_masked_statistic_has_no_values() -> None:
    mask = torch.tensor([[True, False]]).expand(3, 2)
    moments = Moments.of(data(3, 2), 0, mask)
    assert moments.count.tolist() == [3, 0]
    assert (moments.mean[1], moments.m2[1]) == (0, 0)
    assert moments.var()[1].isnan()


def test_integers_count_too() -> None:
    assert Moments.of(torch.tensor([10**6, 10**6 + 2])).var().item() == 1


def test_no_values_along_the_averaged_axis() -> None:
    moments = Moments.of(torch.empty(0, 3), 0)
    assert moments.count.tolist() == [0, 0, 0]
    assert moments.var().isnan().all()


def test_moments_keep_no_graph() -> None:
    assert not Moments.of(data(4).requires_grad_()).mean.requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 3}, ShapeError, r"dim=3 for an input of shape \(2, 3\)"),
        ({"dim": (0, -2)}, ArgumentError, "names an axis twice"),
        ({"mask": torch.ones(2, 3)}, TypeMismatchError, r"mask is torch.float32; needed: torch.bool"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, ShapeError, r"mask has shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Moments.of(data(2, 3), **arguments)


def test_complex_values_are_refused() -> None:
    with pytest.raises(TypeMismatchError, match="complex"):
        Moments.of(torch.complex(data(3), data(3)))
