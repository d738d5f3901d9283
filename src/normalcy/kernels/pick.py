"""Which backend serves an input: the first that can take it."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from normalcy.kernels import eager
from normalcy.kernels.contract import Backend

BACKENDS: tuple[Backend, ...] = (cast("Backend", eager),)


def pick(x: Tensor) -> Backend:
    """The first of `BACKENDS` that can take x; the last one takes everything."""
    return next((backend for backend in BACKENDS[:-1] if backend.why_not(x) is None), BACKENDS[-1])
