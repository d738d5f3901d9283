"""The tables that laws run over: norms, backends, dtypes. A new norm or backend is one more row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normalcy import nn as ours
from normalcy import spec
from normalcy.kernels import eager, pick
from normalcy.kernels.contract import Backend

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS: tuple[Any, ...] = (eager,)


@dataclass(frozen=True)
class Row:
    """One norm as a layer, and a shape it takes."""

    name: str
    norm: spec.Norm
    shape: tuple[int, ...]
    build: Callable[[], nn.Module]

    def __str__(self) -> str:
        return self.name

    def layer(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """In training mode, with parameters and statistics that are nobody's default."""
        generator = torch.Generator().manual_seed(seed)
        layer = self.build().to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.25)
            for name, buffer in layer.named_buffers():
                if name in ("running_mean", "running_var"):
                    buffer.copy_(torch.rand(buffer.shape, generator=generator) * 3 + 0.5)
        return layer

    def input(self, dtype: torch.dtype = torch.float32, *, offset: float = 3.0, seed: int = 1) -> Tensor:
        """Values whose channels differ in spread and place, all of them `offset` away from zero."""
        generator = torch.Generator().manual_seed(seed)
        each = [n if i == 1 else 1 for i, n in enumerate(self.shape)]
        spread = torch.rand(each, generator=generator) + 0.5
        values = torch.randn(self.shape, generator=generator) * spread + torch.randn(
            each, generator=generator
        )
        return (values.double() + offset).to(dtype)


NORMS = (
    Row("batch-1d", spec.batch, (8, 3), lambda: ours.BatchNorm1d(3)),
    Row("batch-1d-length", spec.batch, (4, 3, 7), lambda: ours.BatchNorm1d(3)),
    Row("batch-2d", spec.batch, (4, 3, 5, 6), lambda: ours.BatchNorm2d(3)),
    Row("batch-3d", spec.batch, (2, 3, 2, 3, 4), lambda: ours.BatchNorm3d(3)),
    Row("instance-1d", spec.instance, (3, 4, 9), lambda: ours.InstanceNorm1d(4, affine=True)),
    Row("instance-2d", spec.instance, (3, 4, 5, 3), lambda: ours.InstanceNorm2d(4, affine=True)),
    Row("group", spec.group(2), (3, 6, 4, 5), lambda: ours.GroupNorm(2, 6)),
    Row("layer", spec.layer(1), (6, 33), lambda: ours.LayerNorm(33)),
    Row("layer-two-axes", spec.layer(2), (4, 5, 7), lambda: ours.LayerNorm((5, 7))),
    Row("layer-channels", spec.channels, (2, 6, 4, 5), lambda: ours.LayerNorm2d(6)),
    Row("rms", spec.rms(1), (6, 33), lambda: ours.RMSNorm(33, eps=1e-5)),
)
CENTRED = tuple(row for row in NORMS if row.norm.center)
BATCH = tuple(row for row in NORMS if row.norm is spec.batch)
SAME_IN_EVAL = tuple(row for row in NORMS if row.norm is not spec.batch)


class _Counting:
    """A backend that counts its verbs."""

    def __init__(self, backend: Backend, calls: Counter[str]) -> None:
        self._backend, self._calls = backend, calls
        self.name = backend.name

    def why_not(self, x: Tensor) -> str | None:
        return self._backend.why_not(x)

    def __getattr__(self, verb: str) -> Any:
        self._calls[verb] += 1
        return getattr(self._backend, verb)


@contextmanager
def recording(backend: Backend) -> Iterator[Counter[str]]:
    """Let only `backend` serve, and count what it is asked for."""
    calls: Counter[str] = Counter()
    before, pick.BACKENDS = pick.BACKENDS, (_Counting(backend, calls),)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        pick.BACKENDS = before


def cotangent(y: Tensor, seed: int = 2) -> Tensor:
    """A dy for y."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        y.dtype
    )
