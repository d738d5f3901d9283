"""Moments (count, mean, m2): a mergeable monoid, and what is finished from it.

Not for running averages: those blend finished values as a convention says, in `statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from normalcy import masks
from normalcy.errors import ArgumentError, ShapeError, TypeMismatchError

Dims = int | Sequence[int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """How many values, their mean, and the sum of their squared deviations from it.

        count = n        mean = Σx/n        m2 = Σ(x − mean)²

    All three are float64 tensors of one shape (one entry for each statistic), so that counts are exact up
    to 2⁵³. Unfinished on purpose: degrees of freedom enter in `var`, eps and momentum elsewhere. `+`
    merges by Chan's formula and has an identity, `Moments.empty`; it is associative and commutative up
    to rounding, and exact against the identity.

    No values (n = 0): count, mean and m2 are 0, and every variance is NaN. One value (n = 1): mean is that
    value, m2 is 0, `var(0)` is 0 and `var(1)` is NaN. A NaN or infinity among the values makes mean and m2
    not finite, never silently something else.

    Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances, Stanford TR CS-79-773 (1979).

    Example:
        >>> x = torch.tensor([0.0, 2.0, 4.0, 6.0])
        >>> whole, halves = Moments.of(x), Moments.of(x[:2]) + Moments.of(x[2:])
        >>> whole.mean.item(), halves.mean.item(), halves.var().item(), halves.var(1).item()
        (3.0, 3.0, 5.0, 6.666666666666667)
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @staticmethod
    def of(x: Tensor, dim: Dims = None, mask: Tensor | None = None, *, keepdim: bool = False) -> Moments:
        """The moments of `x` over `dim` (one axis, several, or None for all), where `mask` is true.

        Two passes in float64 over values shifted by one of their own, so that neither an offset nor a
        constant costs precision. Reads x once, and a float64 copy of it three times.

        Args:
            x: any real dtype and shape.
            dim: the axes that share one statistic.
            mask: bool, broadcastable to x; True = valid. What stands at masked places does not matter.
            keepdim: keep the averaged axes at extent 1.

        Raises:
            TypeMismatchError: x is complex, or mask is not bool.
            ShapeError: mask does not broadcast to x.
        """
        dims = _dims(x, dim)
        if not dims:  # torch takes an empty tuple for all axes; here it means none
            x, dims, keepdim = x.unsqueeze(-1), (x.dim(),), False
            mask = masks.checked(mask, x[..., 0]).unsqueeze(-1) if mask is not None else None
        if x.is_complex():
            raise TypeMismatchError("x is complex", "a real dtype", "normalize real and imaginary part apart")
        with torch.no_grad():
            return _of(x.detach(), dims, None if mask is None else masks.checked(mask, x), keepdim=keepdim)

    @staticmethod
    def empty(shape: Sequence[int] = (), device: torch.device | str | None = None) -> Moments:
        """The identity of `+`: the moments of no values at all."""
        zero = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        return Moments(zero, zero, zero)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        gap = other.mean - self.mean
        mean = self.mean + share * gap
        # Where one side has no values, its mean of 0 must not meet an infinity on the other.
        mean = torch.where(other.count == 0, self.mean, torch.where(self.count == 0, other.mean, mean))
        spread = torch.where((self.count == 0) | (other.count == 0), 0.0, self.count * share * gap.square())
        return Moments(count, mean, self.m2 + other.m2 + spread)

    def var(self, correction: float = 0) -> Tensor:
        """m2 / (count − correction): 0 for the population variance, 1 for Bessel's.

        NaN where count ≤ correction: there is no such variance. The moments themselves stay as they are.
        """
        freedom = self.count - correction
        return torch.where(freedom > 0, self.m2 / freedom, torch.nan)


def _of(x: Tensor, dims: tuple[int, ...], mask: Tensor | None, *, keepdim: bool) -> Moments:
    if mask is None:
        shape = [1 if i in dims else extent for i, extent in enumerate(x.shape)]
        count = torch.full(shape, prod(x.shape[i] for i in dims), dtype=torch.float64, device=x.device)
        if x.numel() == 0:
            mean = m2 = torch.zeros_like(count)
        else:
            first = x
            for i in dims:
                first = first.narrow(i, 0, 1)
            first = first.double()
            mean, m2 = _shifted(x.to(torch.float64, copy=True).sub_(first), dims, count)
            mean = mean + first
    else:
        count = mask.sum(dims, keepdim=True, dtype=torch.float64)
        wide = x.double()
        top = torch.where(mask, wide, -torch.inf).amax(dims, keepdim=True) if x.numel() else count
        first = torch.where(count > 0, top, 0.0)  # one of the valid values
        mean, m2 = _shifted(torch.where(mask, wide - first, 0.0), dims, count, mask)
        mean = mean + first
    parts = (count, mean, m2)
    if not keepdim:
        kept = [extent for i, extent in enumerate(x.shape) if i not in dims]
        parts = (count.reshape(kept), mean.reshape(kept), m2.reshape(kept))
    return Moments(*parts)


def _shifted(
    d: Tensor, dims: tuple[int, ...], count: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and m2 of `d`, a fresh tensor that is overwritten; masked places hold 0."""
    mean = d.sum(dims, keepdim=True) / count.clamp(min=1)
    d -= mean
    if mask is not None:
        d = torch.where(mask, d, 0.0)
    return mean, d.mul_(d).sum(dims, keepdim=True)


def _dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.dim())) if x.dim() else ()
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -x.dim() <= d < x.dim() for d in given):
        raise ShapeError(f"dim={dim} for an input of shape {tuple(x.shape)}", "axes that the input has")
    dims = tuple(d % x.dim() for d in given)
    if len(set(dims)) < len(dims):
        raise ArgumentError(f"dim={dim} names an axis twice", "each axis at most once")
    return dims
