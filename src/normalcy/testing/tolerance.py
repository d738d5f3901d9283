"""The tolerance rule: an error is counted in ulps of what a result was computed from.

Not for errors that are known in advance: a derived bound is better where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ULPS: Mapping[torch.dtype, float] = {
    torch.float64: 4.0,
    torch.float32: 4.0,
    torch.bfloat16: 1.0,
    torch.float16: 1.0,
}
"""How many ulps a well-computed normalization may be off, by dtype.

| dtype | ulps | why |
|---|---|---|
| float64, float32 | 4 | x − s, − r, rounding of rstd, · rstd, · γ, + β: six halves, and one to spare |
| bfloat16, float16 | 1 | computed in float32, then one rounding of half an ulp; as much again for ties |
"""


def errors_in_ulps(actual: Tensor, exact: Tensor, scale: Tensor | None = None) -> Tensor:
    """|actual − exact| / (eps(dtype of actual) · scale), element by element, in float64.

    Args:
        actual: the result to judge, any floating dtype.
        exact: the float64 answer, of the same shape.
        scale: the size of what the result was computed from, which broadcasts to it; by default |exact|, and
            nowhere less than the mean of |exact|.

    Example:
        >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> errors_in_ulps(torch.tensor([1.0, 2.0 + 2**-22]), exact)
        tensor([0., 1.], dtype=torch.float64)
    """
    info = torch.finfo(actual.dtype)
    exact = exact.detach().double()
    size = _scale(exact) if scale is None else scale.detach().double()
    error = (actual.detach().double() - exact).abs()
    agree = (actual.detach().double() == exact) | (actual.isnan() & exact.isnan())
    return torch.where(agree, 0.0, error / (info.eps * size.abs().clamp(min=info.tiny)))


def assert_close(
    actual: Tensor, exact: Tensor, *, ulps: float | None = None, scale: Tensor | None = None, what: str = ""
) -> None:
    """Raise unless `actual` lies within `ulps` ulps of the float64 answer; NaN only where the answer is NaN.

    Args:
        actual: the result to judge.
        exact: the float64 answer.
        ulps: how many; by default `ULPS` of the dtype of `actual`.
        scale: as in `errors_in_ulps`.
        what: names the result in the sentence.

    Raises:
        AssertionError: another shape, or an element too far off; the worst one is named.

    Example:
        >>> assert_close(torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64))
        >>> assert_close(torch.tensor([0.2]), torch.tensor([0.1], dtype=torch.float64), what="y")
        Traceback (most recent call last):
        AssertionError: y at (0,): 0.20000000298023224 is 8.389e+06 ulps from 0.1; allowed: 4.
    """
    _same_shape(actual, exact, what)
    allowed = ULPS[actual.dtype] if ulps is None else ulps
    error = errors_in_ulps(actual, exact, scale)
    worst = _worst(error - allowed)
    if worst is not None:
        raise AssertionError(
            f"{what or 'result'} at {worst}: {actual[worst].item()} is {error[worst].item():.4g} ulps "
            f"from {exact[worst].item()}; allowed: {allowed:g}."
        )


def assert_no_worse_than_plain(
    fast: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    slack_ulps: float | None = None,
    scale: Tensor | None = None,
    what: str = "",
) -> None:
    """Raise unless `fast` misses the float64 answer by no more than plain code does, plus `slack_ulps`.

    Args:
        fast: the result to judge.
        plain: the same by straightforward code in the same dtype.
        exact: the float64 answer.
        slack_ulps: by default `ULPS` of the dtype of `fast`.
        scale: as in `errors_in_ulps`.
        what: names the result in the sentence.

    Raises:
        AssertionError: another shape, or an element too far off; the worst is named with all three values.

    Example:
        >>> exact = torch.tensor([1 / 3], dtype=torch.float64)
        >>> assert_no_worse_than_plain(exact.float(), exact.bfloat16(), exact)
    """
    _same_shape(fast, exact, what)
    _same_shape(plain, exact, what)
    slack = ULPS[fast.dtype] if slack_ulps is None else slack_ulps
    unit = torch.finfo(fast.dtype).eps / torch.finfo(plain.dtype).eps
    error, allowed = errors_in_ulps(fast, exact, scale), errors_in_ulps(plain, exact, scale) / unit + slack
    alike = (fast == plain) | (fast.isnan() & plain.isnan() & exact.isnan())
    worst = _worst(torch.where(alike, 0.0, error - allowed))
    if worst is not None:
        raise AssertionError(
            f"{what or 'result'} at {worst}: fast {fast[worst].item()}, plain {plain[worst].item()}, exact "
            f"{exact[worst].item()}: {error[worst].item():.4g} ulps; allowed: {allowed[worst].item():.4g}."
        )


def _scale(exact: Tensor) -> Tensor:
    finite = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    return finite.clamp(min=finite.mean()) if finite.numel() else finite


def _same_shape(actual: Tensor, exact: Tensor, what: str) -> None:
    if actual.shape != exact.shape:
        raise AssertionError(f"{what or 'result'}: shape {tuple(actual.shape)} is not {tuple(exact.shape)}.")


def _worst(excess: Tensor) -> tuple[int, ...] | None:
    """Where the largest excess over the allowed error is, or None if there is none; NaN is an excess."""
    if excess.numel() == 0 or bool((excess <= 0).all()):
        return None
    at = int(excess.nan_to_num(nan=torch.inf).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), excess.shape))
