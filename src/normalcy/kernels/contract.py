"""What a backend is: four verbs over a layout, and the one table of precision.

    forward:   collect → (merge) → apply             backward:   collect_grad → (merge) → apply_grad

| what | dtype |
|---|---|
| sums and moments | float64 |
| mean and rstd, kept for the backward pass | float64 |
| element by element | float32; float64 for float64 input |
| output, dx, dresidual | the input's |
| dweight, dbias | the parameter's |

No verb is differentiable: derivatives are the business of `autograd`. A mask is to a backend which places
count; what stands at the others reaches no result, and their output and gradient are 0.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from normalcy.axes import Layout
from normalcy.moments import Moments


class Given(NamedTuple):
    """The tensors of one call, in the caller's shapes; what is not there is None.

    Attributes:
        x: the input.
        weight, bias: of shape `layout.weight`; they broadcast over `layout.shape`.
        residual: added before the activation; the shape and dtype of x.
        mask: bool, the shape of x; True = valid.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    mask: Tensor | None = None


class Stats(NamedTuple):
    """What an input is normalized with: finished, float64, of the layout's statistic shape.

    Attributes:
        mean: None where the norm does not centre (RMS norm).
        rstd: 1/√(var + eps), or 1/√(E[x²] + eps) where the norm does not centre.
        n: how many values each statistic came from, a tensor where a mask decides; None: the statistics
            are constants to the input.
    """

    mean: Tensor | None
    rstd: Tensor
    n: Tensor | int | None


class GradSums(NamedTuple):
    """Sums over the values that share a statistic, with g = dz·weight: s1 = Σg, s2 = Σg·x̂. Both add.

    s1 is None where the norm does not centre; both are unused where statistics are constants.
    dweight = Σdz·x̂ and dbias = Σdz are sums over the *parameter's* index, and None where not needed.
    """

    s1: Tensor | None
    s2: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    bias: bool
    residual: bool = False


class Backend(Protocol):
    """Four verbs. dz is the gradient at the norm's own output, before residual and activation."""

    name: str

    def why_not(self, given: Given) -> str | None:
        """A sentence why this backend cannot take this call, or None if it can."""

    def collect(self, x: Tensor, layout: Layout, mask: Tensor | None) -> Moments:
        """The moments of x, of shape `layout.statistic`."""

    def apply(self, given: Given, layout: Layout, stats: Stats, activation: str | None) -> Tensor:
        """Compute y = activation((x − mean)·rstd·weight + bias + residual), like x in shape and dtype."""

    def collect_grad(self, dz: Tensor, given: Given, layout: Layout, stats: Stats, needs: Needs) -> GradSums:
        """The sums that dx and the parameters' gradients need."""

    def apply_grad(self, dz: Tensor, given: Given, layout: Layout, stats: Stats, sums: GradSums) -> Tensor:
        """Compute dx = (g − (s1 + x̂·s2)/n)·rstd, or g·rstd where statistics are constants."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of elementwise arithmetic on x: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
