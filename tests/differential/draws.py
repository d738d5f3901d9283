"""Random settings of PyTorch's norm layers, and the pairs of settings that the draws must cover."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations

import torch
from torch import Tensor, nn

TRACKING = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
)
LAST = ("channels_last",)  # of four axes, and of five

FACTORS: dict[str, tuple[object, ...]] = {
    "cls": (*TRACKING, "LayerNorm", "GroupNorm", "RMSNorm"),
    "affine": (True, False),
    "bias": (True, False),
    "tracking": (True, False),
    "momentum": (None, 0.0, 0.1, 1.0),
    "eps": (1e-5, 1e-3, 0.5, 0.0, None),
    "dtype": (
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "bfloat16+float32",
        "float16+float32",
        "float32+float64",
        "float64+float32",
        "float32+bfloat16",
    ),
    "layout": ("contiguous", "channels_last", "transposed", "sliced", "expanded", "offset"),
    "mode": ("train", "eval"),
    "needs": ("all", "none", "x", "weight", "bias", "x+weight", "x+bias", "weight+bias"),
    "unbatched": (False, True),
    "shape": (
        "odd",
        "even",
        "one value",
        "one example",
        "empty",
        "empty space",
        "one channel",
        "wrong channels",
        "wrong dims",
    ),
    "data": ("plain", "offset", "constant", "nan"),
    "steps": (1, 2, 3),
}


@dataclass(frozen=True)
class Draw:
    """One value of every factor."""

    cls: str
    affine: bool
    bias: bool
    tracking: bool
    momentum: float | None
    eps: float | None
    dtype: str
    layout: str
    mode: str
    needs: str
    unbatched: bool
    shape: str
    data: str
    steps: int
    seed: int

    @property
    def space(self) -> int:
        """How many space axes the class is for; for the others four axes in all."""
        return int(self.cls[-2]) if self.cls.endswith("d") else 2

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the input, and of parameters and statistics."""
        names = self.dtype.split("+")
        return getattr(torch, names[0]), getattr(torch, names[-1])


def allowed(settings: dict[str, object]) -> bool:
    """Whether settings (of all or of some factors) can occur together."""
    cls = str(settings.get("cls", ""))
    if cls and cls not in TRACKING:
        fixed = {"tracking": False, "momentum": 0.1, "unbatched": False}
        if any(settings.get(name, value) != value for name, value in fixed.items()):
            return False
    if cls == "RMSNorm" and settings.get("bias", False):
        return False
    if settings.get("eps", 1e-5) is None and cls not in ("", "RMSNorm"):
        return False
    if settings.get("eps", 1e-5) is None and settings.get("bias", False):  # only RMS norm has eps=None
        return False
    if settings.get("eps", 1e-5) is None and any(
        settings.get(k, v) != v for k, v in {"tracking": False, "momentum": 0.1, "unbatched": False}.items()
    ):
        return False
    if settings.get("unbatched") and cls.startswith("BatchNorm"):
        return False
    fewer_axes = cls.endswith("1d") or settings.get("unbatched") or settings.get("shape") == "wrong dims"
    if settings.get("layout") == "channels_last" and fewer_axes:
        return False
    return not (settings.get("layout") == "expanded" and settings.get("shape") == "empty")


def draws(count: int, seed: int) -> Iterator[Draw]:
    """`count` random draws, the same for the same seed."""
    generator = random.Random(seed)  # noqa: S311 - settings, not secrets
    while count:
        settings = {name: generator.choice(values) for name, values in FACTORS.items()}
        if settings["cls"] not in TRACKING:
            settings |= {"tracking": False, "momentum": 0.1, "unbatched": False}
        if settings["cls"] == "RMSNorm":
            settings |= {"bias": False, "eps": generator.choice((None, settings["eps"]))}
        elif settings["eps"] is None:
            settings["eps"] = generator.choice(FACTORS["eps"][:-1])
        if allowed(settings):
            yield Draw(**settings, seed=generator.randrange(2**31))  # type: ignore[arg-type]
            count -= 1


def possible_pairs() -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every pair of settings that can occur together."""
    pairs = set()
    for (a, firsts), (b, seconds) in combinations(FACTORS.items(), 2):
        pairs |= {((a, f), (b, s)) for f in firsts for s in seconds if allowed({a: f, b: s})}
    return pairs


def pairs_of(draw: Draw) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """The pairs of settings in one draw."""
    named = [(f.name, getattr(draw, f.name)) for f in fields(draw) if f.name != "seed"]
    return set(combinations(named, 2))


def build(draw: Draw, module: object) -> nn.Module:
    """The layer of `draw` from `torch.nn` or `normalcy.nn`; its state is set from the seed."""
    kind = getattr(module, draw.cls)
    channels, shape = _channels(draw), _full_shape(draw)
    wide = draw.dtypes[1]
    if draw.cls in TRACKING:
        layer = kind(channels, draw.eps, draw.momentum, draw.affine, draw.tracking, dtype=wide)
    elif draw.cls == "GroupNorm":
        layer = kind(_groups(draw), channels, draw.eps, draw.affine, dtype=wide)
    else:
        layer = kind(shape[-_axes(draw) :], draw.eps, draw.affine, dtype=wide)
    if not draw.bias and hasattr(layer, "bias"):
        layer.register_parameter("bias", None)
    generator = torch.Generator().manual_seed(draw.seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5)
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.copy_(torch.randn(channels, generator=generator) * 2)
            layer.running_var.copy_(torch.rand(channels, generator=generator) * 3 + 0.25)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(draw.needs == "all" or name in draw.needs.split("+"))
    return layer.train(draw.mode == "train")


def batches(draw: Draw) -> list[tuple[Tensor, Tensor]]:
    """(x, dy) for each step, x laid out in memory as the draw says."""
    generator = torch.Generator().manual_seed(draw.seed + 1)
    shape = input_shape(draw)
    return [
        (
            _laid(_values(draw, shape, generator), draw),
            torch.randn(shape, generator=generator).to(draw.dtypes[0]),
        )
        for _ in range(draw.steps)
    ]


def input_shape(draw: Draw) -> tuple[int, ...]:
    """The shape of the input, right or wrong."""
    shape = list(_full_shape(draw))
    if draw.shape == "wrong channels":
        at = -1 if draw.cls in ("LayerNorm", "RMSNorm") else 1
        shape[at] += 1
    if draw.unbatched:
        shape = shape[1:]
    if draw.shape == "wrong dims":
        shape = shape[:1] if draw.seed % 2 else [*shape, 2, 2]
    return tuple(shape)


def _channels(draw: Draw) -> int:
    return {"even": 8, "one channel": 1}.get(draw.shape, 5)


def _groups(draw: Draw) -> int:
    return {8: 4, 1: 1, 5: 5 if draw.seed % 2 else 1}[_channels(draw)]


def _axes(draw: Draw) -> int:
    return 1 + draw.seed % 3  # of layer and RMS norm: one to three of the last axes


def _full_shape(draw: Draw) -> tuple[int, ...]:
    even = draw.shape == "even"
    space = (4, 2, 4)[: draw.space] if even else (7, 3, 5)[: draw.space]
    if draw.shape == "one value":
        space = (1,) * draw.space
    if draw.shape == "empty space":
        space = (*space[:-1], 0)
    examples = {"even": 4, "one value": 1, "one example": 1, "empty": 0}.get(draw.shape, 3)
    if draw.cls == "BatchNorm1d" and draw.seed % 2 and draw.shape != "empty space":
        space = ()  # both (N, C) and (N, C, L)
    return (examples, _channels(draw), *space)


def _values(draw: Draw, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Every channel has a spread and a place of its own."""
    each = [1] * len(shape)
    at = 0 if draw.unbatched or len(shape) < 2 else 1
    each[at] = shape[at]
    spread = torch.rand(each, generator=generator) * 2 + 0.5
    place = torch.randn(each, generator=generator) * 3
    if draw.data == "offset":
        place = place * 100 + 300
    if draw.data == "constant":
        spread = spread * 0
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * spread + place
    if draw.data == "nan" and x.numel():
        x.view(-1)[0] = torch.nan
    return x.to(draw.dtypes[0])


def _laid(x: Tensor, draw: Draw) -> Tensor:
    if draw.layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if draw.layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if draw.layout == "sliced":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if draw.layout == "expanded":
        return x[:1].expand(x.shape)
    if draw.layout == "offset":
        longer = torch.full((x.numel() + 3,), torch.nan, dtype=x.dtype)
        longer[3:] = x.reshape(-1)
        return longer[3:].view(x.shape)
    return x
