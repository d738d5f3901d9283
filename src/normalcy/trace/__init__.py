"""One normalization as named steps with every number and, if asked, every reason; the definition computes it.

Not for speed: every value of every step is kept as a Python number, to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from normalcy.errors import ArgumentError
from normalcy.trace.given import check
from normalcy.trace.record import ARRAY_KEYS, KEYS, Step, Trace, Value
from normalcy.trace.steps import steps
from normalcy.trace.warming import warm_up

__all__ = ["ARRAY_KEYS", "KEYS", "Step", "Trace", "Value", "trace", "warm_up"]


def trace(
    x: ArrayLike,
    *,
    norm: str = "batch",
    groups: int | None = None,
    axes: int | Sequence[int] | None = None,
    gamma: ArrayLike = 1.0,
    beta: ArrayLike = 0.0,
    eps: float = 1e-5,
    dy: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    running: tuple[ArrayLike, ArrayLike] | None = None,
    momentum: float | None = None,
    correction: int = 1,
    explain: bool = False,
) -> Trace:
    """Trace the normalization of one feature, one value per example, or of a whole array.

    Forward x̂ = (x − mean)/√(var + eps), y = γ·x̂ + β; with `dy` also backward; with `momentum` also
    the update of the running statistics, in both meanings of momentum; with `running` also inference.

    Args:
        x: the values of one feature; or an array, (N, C, *space), for layer and rms norm of any shape.
        norm: which cells share a statistic: "batch", "layer", "group", "instance" or "rms".
        groups: into how many groups of equal size the channels fall; group norm alone.
        axes: what is averaged, (-1,) if not said; layer and rms norm alone.
        gamma: γ: a number for all, or one per channel (for layer and rms norm per place of the averaged
            axes; per channel is enough where axis 1 is one of several).
        beta: β, as γ; rms norm has none.
        eps: in the unit of the variance; 0 is allowed where the variance is positive.
        dy: the gradient that arrives at y, in the shape of x.
        mask: true where a value counts; broadcast to x.
        running: the stored mean and variance: inference uses them as given, the update starts from them
            (from 0 and 1 without); a number or one per channel, batch norm alone.
        momentum: a weight, from 0 to 1; batch norm alone.
        correction: the stored variance is var·n/(n − correction).
        explain: also say in sentences, with the numbers of this run, why each step is as it is.

    Returns:
        The steps, all in float64. For one feature a statistic is a number; for an array it is a list, and
        `shares` says for each cell which item of it is meant. Skewness is E[x̂³]/Var^(3/2), kurtosis
        E[x̂⁴]/Var² (3 for a Gaussian); `distinct` counts the different values of x̂.

    Raises:
        DataError: no values, more than 250,000, a number that is not finite, or numbers too large or too
            close for float64.
        ShapeError: a shape does not fit the norm or x.
        ArgumentError: there is no such norm; eps, momentum, correction or the stored variance is impossible;
            an option belongs to another norm; or a variance and eps are both 0 (no error with `running`
            alone: inference does not need x̂, and what does is None).

    Source: Ioffe & Szegedy, "Batch Normalization", 2015, algorithms 1 and 2.

    Example:
        >>> trace([18], gamma=4, beta=2, eps=0, running=(10, 16)).as_dict()["y_inference"]
        [10.0]
        >>> trace([[1, 3], [10, 30]], norm="layer", eps=0).as_dict()["shares"]
        [[0, 0], [1, 1]]
    """
    given = check(
        x,
        norm=norm,
        groups=groups,
        axes=axes,
        gamma=gamma,
        beta=beta,
        eps=eps,
        dy=dy,
        mask=mask,
        running=running,
    )
    if momentum is not None and norm != "batch":
        raise ArgumentError(
            f"{norm} norm is given a momentum", "batch norm, which keeps running statistics", "leave it out"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused at the end, by name
        return Trace(tuple(steps(given, momentum, correction, explain=explain))).finite()
