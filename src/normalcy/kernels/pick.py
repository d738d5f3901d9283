"""Which backend serves a call: the first that can take it."""

from __future__ import annotations

from typing import cast

from normalcy.kernels import eager
from normalcy.kernels.contract import Backend, Given

BACKENDS: tuple[Backend, ...] = (cast("Backend", eager),)


def pick(given: Given) -> Backend:
    """The first of `BACKENDS` that can take the call; the last one takes everything."""
    return next((backend for backend in BACKENDS[:-1] if backend.why_not(given) is None), BACKENDS[-1])
