"""The layers of a first day: how each is built and called, and with which inputs. A new layer is a new row.

What the right answers are is said in `answers`; which tests there are, by `facilities`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import normalcy.nn as ours
from normalcy.definition import Name

Build = Callable[[Any], nn.Module]
Inputs = tuple[Tensor, ...]

FAMILIES = ("BatchNorm", "InstanceNorm", "LayerNorm", "LayerNorm2d", "GroupNorm", "RMSNorm", "Fused")
"""Columns of the closing table; a last one is for calls with a mask."""


@dataclass(frozen=True)
class Subject:
    """One layer and how it is called.

    Attributes:
        name: unique; what a person reads.
        family: one of `FAMILIES`.
        build: makes the layer from a module that has such layers: `normalcy.nn` or `torch.nn`.
        norm: its name in the definition, with `arguments` of the definition.
        shape: of the input; `mask` is the shape of the mask, if there is one.
        tracked: whether it keeps running statistics.
        fused: whether it takes a residual and ends in relu.
        in_torch: whether `torch.nn` has the same layer.
        offset: where the values lie, in units of about one standard deviation.
    """

    name: str
    family: str
    build: Build = field(repr=False)
    norm: Name
    shape: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] | None = None
    tracked: bool = False
    fused: bool = False
    in_torch: bool = True
    offset: float = 1e3

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def layer(self, module: Any = None, *, dtype: torch.dtype = torch.float32, training: bool = True) -> Any:
        """The layer, with parameters and statistics that are nobody's default."""
        return settle(self.build(module or ours), self.offset).to(dtype).train(training)

    def inputs(
        self, *, batch: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 1
    ) -> Inputs:
        """What the layer is called with, in order: x, then a residual, then a mask, as far as it has them.

        Channels differ in place and spread; x and the residual are leaves that need a gradient.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (self.shape[0] if batch is None else batch, *self.shape[1:])
        each = [n if i == 1 else 1 for i, n in enumerate(shape)]
        place = torch.randn(each, generator=generator)
        spread = torch.rand(each, generator=generator) + 0.5
        x = self.offset + place + spread * torch.randn(shape, generator=generator)
        found = [x.to(dtype).requires_grad_()]
        if self.fused:
            found.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        if self.mask is not None:
            found.append(_valid((shape[0], *self.mask[1:]), generator))
        return tuple(found)

    def has_parameters(self) -> bool:
        """Whether there is a weight to train."""
        return any(True for _ in self.build(ours).parameters())


def settle(layer: nn.Module, offset: float = 1e3, seed: int = 0) -> nn.Module:
    """Give a float32 layer parameters away from 1 and 0, and statistics near those of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.25)
        for name, buffer in layer.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(offset + torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 3 + 0.5)
            elif name.endswith("num_batches_tracked"):
                buffer.fill_(4)
    return layer


def norm_of(layer: Any) -> Any:
    """The layer that holds parameters and statistics: itself, or the child of a `Fused`."""
    return layer.norm if hasattr(layer, "norm") else layer


def _valid(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """About two thirds valid, and at least two of the values that share any statistic."""
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., :2] = True
    mask[:2] |= len(shape) == 2
    if shape[1] > 2:
        mask[:, :2] = True
    return mask


def _fused(module: Any) -> nn.Module:
    layer: nn.Module = module.Fused(module.BatchNorm2d(3), "relu")
    return layer


PLAIN = (
    Subject(
        "BatchNorm1d", "BatchNorm", lambda m: m.BatchNorm1d(5), "batch", (9, 5), tracked=True, offset=1e4
    ),
    Subject("BatchNorm2d", "BatchNorm", lambda m: m.BatchNorm2d(3), "batch", (5, 3, 4, 7), tracked=True),
    Subject("BatchNorm3d", "BatchNorm", lambda m: m.BatchNorm3d(5), "batch", (3, 5, 2, 3, 4), tracked=True),
    Subject("InstanceNorm1d", "InstanceNorm", lambda m: m.InstanceNorm1d(5), "instance", (3, 5, 7)),
    Subject(
        "InstanceNorm2d",
        "InstanceNorm",
        lambda m: m.InstanceNorm2d(3, affine=True),
        "instance",
        (3, 3, 4, 7),
        offset=1e4,
    ),
    Subject(
        "InstanceNorm3d",
        "InstanceNorm",
        lambda m: m.InstanceNorm3d(3, affine=True),
        "instance",
        (3, 3, 2, 3, 5),
    ),
    *(
        Subject(
            f"InstanceNorm{d}d tracked",
            "InstanceNorm",
            lambda m, d=d: getattr(m, f"InstanceNorm{d}d")(3, affine=True, track_running_stats=True),
            "instance",
            shape,
            tracked=True,
        )
        for d, shape in enumerate(((5, 3, 7), (3, 3, 4, 7), (3, 3, 2, 3, 5)), 1)
    ),
    Subject("LayerNorm", "LayerNorm", lambda m: m.LayerNorm(33), "layer", (3, 5, 33), offset=1e4),
    Subject(
        "LayerNorm2d",
        "LayerNorm2d",
        lambda m: m.LayerNorm2d(7),
        "layer",
        (3, 7, 4, 5),
        {"axes": (1,)},
        in_torch=False,
    ),
    Subject(
        "GroupNorm",
        "GroupNorm",
        lambda m: m.GroupNorm(2, 6),
        "group",
        (3, 6, 4, 5),
        {"groups": 2},
        offset=1e4,
    ),
    Subject("RMSNorm", "RMSNorm", lambda m: m.RMSNorm(33), "rms", (3, 5, 33)),
    Subject("Fused", "Fused", _fused, "batch", (5, 3, 4, 7), tracked=True, fused=True, in_torch=False),
)

_MASKS: dict[str, tuple[int, ...]] = {
    "BatchNorm1d": (9, 5),
    "BatchNorm2d": (5, 1, 4, 7),
    "BatchNorm3d": (3, 1, 2, 3, 4),
    "InstanceNorm1d": (3, 1, 7),
    "InstanceNorm2d": (3, 1, 4, 7),
    "InstanceNorm3d": (3, 1, 2, 3, 5),
    "InstanceNorm1d tracked": (5, 1, 7),
    "InstanceNorm2d tracked": (3, 1, 4, 7),
    "InstanceNorm3d tracked": (3, 1, 2, 3, 5),
    "LayerNorm": (3, 5, 33),
    "LayerNorm2d": (3, 7, 4, 5),
    "GroupNorm": (3, 1, 4, 5),
    "RMSNorm": (3, 5, 33),
    "Fused": (5, 1, 4, 7),
}
MASKED = tuple(replace(s, name=f"{s.name} masked", mask=_MASKS[s.name], in_torch=False) for s in PLAIN)
ALL = (*PLAIN, *MASKED)
EACH = tuple(
    s
    for s in PLAIN
    if s.name
    in {
        "BatchNorm2d",
        "InstanceNorm2d",
        "InstanceNorm1d tracked",
        "LayerNorm",
        "LayerNorm2d",
        "GroupNorm",
        "RMSNorm",
        "Fused",
    }
)
"""One of each kind, where a test costs seconds: 1d, 2d and 3d differ in a check of dimensions only."""
EACH_TWICE = (*EACH, *(m for m in MASKED if m.name.removesuffix(" masked") in {s.name for s in EACH}))
"""Each kind without and with a mask."""
