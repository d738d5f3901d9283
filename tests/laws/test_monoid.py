"""Moments merge: associative, commutative, with an identity, and every split merges to the whole."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normalcy import Moments

# Float32 values times a power of ten: magnitudes from 1e-3 to 1e9, offsets far beyond the spread among them.
values = st.lists(st.floats(-1000, 1000, width=32), max_size=12)
offsets = st.sampled_from([0.0, 1.0, 1e4, 1e6])


@st.composite
def pieces(draw: st.DrawFn) -> list[float]:
    offset = draw(offsets)
    return [offset + value for value in draw(values)]


def of(numbers: list[float]) -> Moments:
    return Moments.of(torch.tensor(numbers, dtype=torch.float64))


def exact(numbers: list[float]) -> tuple[int, Fraction, Fraction]:
    parts = [Fraction(x) for x in numbers]
    mean = sum(parts, Fraction(0)) / max(len(parts), 1)
    return len(parts), mean, sum(((x - mean) ** 2 for x in parts), Fraction(0))


def assert_is(moments: Moments, numbers: list[float], what: str) -> None:
    """Each of a few dozen operations rounds by 2⁻⁵³ of the largest number among its operands: 64 ulps."""
    count, mean, m2 = exact(numbers)
    size = max((abs(x) for x in numbers), default=0.0)
    spread = max((abs(x - mean) for x in map(Fraction, numbers)), default=Fraction(0))
    ulp = 64 * Fraction(2) ** -53
    assert moments.count.item() == count, what
    assert abs(Fraction(moments.mean.item()) - mean) <= ulp * Fraction(size), what
    # an error e of a mean enters m2 as n·e·spread, and as n·e²
    slack = ulp * m2 + len(numbers) * ulp * Fraction(size) * (2 * spread + ulp * Fraction(size))
    assert abs(Fraction(moments.m2.item()) - m2) <= slack, what


@given(pieces(), pieces(), pieces())
def test_merging_is_associative(a: list[float], b: list[float], c: list[float]) -> None:
    assert_is((of(a) + of(b)) + of(c), a + b + c, "(a + b) + c")
    assert_is(of(a) + (of(b) + of(c)), a + b + c, "a + (b + c)")


@given(pieces(), pieces())
def test_merging_is_commutative(a: list[float], b: list[float]) -> None:
    assert_is(of(a) + of(b), a + b, "a + b")
    assert_is(of(b) + of(a), a + b, "b + a")


@given(pieces())
def test_no_values_are_the_exact_identity(a: list[float]) -> None:
    whole = of(a)
    for merged in (whole + Moments.empty(), Moments.empty() + whole, whole + of([])):
        assert torch.equal(merged.count, whole.count)
        assert torch.equal(merged.mean, whole.mean)
        assert torch.equal(merged.m2, whole.m2)


@given(pieces(), st.data())
def test_any_split_merges_to_the_whole(a: list[float], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(a)), max_size=4)))
    parts = [a[i:j] for i, j in zip([0, *cuts], [*cuts, len(a)], strict=True)]
    assert_is(sum((of(part) for part in parts), Moments.empty()), a, f"split at {cuts}")


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=12), offsets)
def test_masked_moments_are_those_of_the_valid_values(pairs: list[tuple[float, bool]], offset: float) -> None:
    x = torch.tensor([offset + value if valid else torch.nan for value, valid in pairs], dtype=torch.float64)
    mask = torch.tensor([valid for _, valid in pairs])
    assert_is(Moments.of(x, mask=mask), [offset + value for value, valid in pairs if valid], "masked")


def test_counts_stay_exact_beyond_what_float32_can_count() -> None:
    big = Moments(*(torch.tensor(v, dtype=torch.float64) for v in (2.0**24, 1e4, 2.0**24 * 3)))
    merged = big + of([1e4])
    assert merged.count.item() == 2**24 + 1
    assert (merged + merged).count.item() == 2**25 + 2
    assert merged.var().item() == pytest.approx(3 * 2**24 / (2**24 + 1), rel=1e-15)


def test_a_float32_average_of_many_offset_values_keeps_its_digits() -> None:
    x = torch.arange(2**21, dtype=torch.float32).remainder(8) + 1e4
    moments = Moments.of(x)
    assert moments.mean.item() == 1e4 + 3.5
    assert moments.var().item() == pytest.approx(5.25, rel=1e-12)


def test_nothing_and_one_value_have_the_documented_answers() -> None:
    nothing, one = of([]), of([1e4])
    assert (nothing.count.item(), nothing.mean.item(), nothing.m2.item()) == (0, 0, 0)
    assert nothing.var().isnan()
    assert nothing.var(1).isnan()
    assert (one.count.item(), one.mean.item(), one.m2.item(), one.var().item()) == (1, 1e4, 0, 0)
    assert one.var(1).isnan()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible_through_every_merge(bad: float) -> None:
    spoilt = of([1.0, bad, 3.0])
    for merged in (spoilt, spoilt + of([5.0]), of([5.0]) + spoilt, Moments.empty() + spoilt):
        assert not merged.mean.isfinite()
        assert not merged.var().isfinite()
