"""What a backend is: four verbs over a layout, and the one table of precision.

    forward:   collect → (merge) → apply             backward:   collect_grad → (merge) → apply_grad

| what | dtype |
|---|---|
| sums and moments | float64 |
| mean and rstd, kept for the backward pass | float64 |
| element by element | float32; float64 for float64 input |
| output, dx | the input's |
| dweight, dbias | the parameter's |

No verb is differentiable: derivatives are the business of `autograd`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from normalcy.axes import Layout
from normalcy.moments import Moments


class Stats(NamedTuple):
    """What an input is normalized with: finished, float64, of the layout's statistic shape.

    Attributes:
        mean: None where the norm does not centre (RMS norm).
        rstd: 1/√(var + eps), or 1/√(E[x²] + eps) where the norm does not centre.
        values: how many values each statistic came from; None: they are constants to the input.
    """

    mean: Tensor | None
    rstd: Tensor
    values: int | None


class GradSums(NamedTuple):
    """Sums over the values that share a statistic, with g = dy·weight: s1 = Σg, s2 = Σg·x̂. Both add.

    s1 is None where the norm does not centre; both are unused where statistics are constants.
    dweight = Σdy·x̂ and dbias = Σdy are sums over the *parameter's* index, and None where not needed.
    """

    s1: Tensor | None
    s2: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


class Backend(Protocol):
    """Four verbs. Inputs come in the caller's shape; parameters broadcast over `layout.shape`."""

    name: str

    def why_not(self, x: Tensor) -> str | None:
        """A sentence why this backend cannot take x, or None if it can."""

    def collect(self, x: Tensor, layout: Layout) -> Moments:
        """The moments of x, of shape `layout.statistic`."""

    def apply(
        self, x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Compute y = (x − mean)·rstd·weight + bias, in the shape, memory format and dtype of x."""

    def collect_grad(
        self, dy: Tensor, x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, needs: Needs
    ) -> GradSums:
        """The sums that dx and the parameters' gradients need."""

    def apply_grad(
        self, dy: Tensor, x: Tensor, layout: Layout, stats: Stats, weight: Tensor | None, sums: GradSums
    ) -> Tensor:
        """Compute dx = (g − (s1 + x̂·s2)/values)·rstd, or g·rstd where statistics are constants."""


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    bias: bool


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of elementwise arithmetic on x: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
