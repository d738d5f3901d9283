"""Mask, residual and activation over random settings of every layer, against the float64 definition.

PyTorch's layers know none of the three, so that the definition alone is judge, to the derived bounds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from differential import draws
from differential.draws import Draw
from laws.masked import Right, right
from torch import Tensor, nn

from normalcy import definition, spec
from normalcy import nn as ours
from normalcy.errors import ArgumentError, TooFewValuesError
from normalcy.kernels.activation import ACTIVATIONS

DRAWS = 600
SEED = 20240301
MASKS = ("none", "ones", "some", "few", "by length", "by channel", "by example", "no values")


@dataclass(frozen=True)
class Extra:
    """What is drawn beside a layer's own settings."""

    draw: Draw
    mask: str
    residual: bool
    activation: str | None
    junk: float


def drawn() -> list[Extra]:
    """Settings whose own refusals are looked at elsewhere are left out."""
    generator, found = random.Random(SEED), []  # noqa: S311 - settings, not secrets
    for draw in draws.draws(60 * DRAWS, SEED):
        wide, narrow = draw.dtypes
        fits = wide == narrow or (wide in (torch.float16, torch.bfloat16) and narrow == torch.float32)
        if not fits or draw.eps == 0.0 or draw.data == "nan" or draw.needs != "all":
            continue
        if draw.shape not in ("odd", "even", "one channel", "one example"):
            continue
        found.append(
            Extra(
                draw,
                generator.choice(MASKS),
                generator.random() < 0.6,
                generator.choice((None, *ACTIVATIONS)),
                generator.choice((0.0, torch.nan, torch.inf, 1e30)),
            )
        )
    return found[:DRAWS]


def a_mask(kind: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """Of an input (examples, channels, *space); narrower where it broadcasts."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    if kind in ("ones", "no values"):
        return torch.full(shape, kind == "ones")
    if kind in ("some", "few"):
        return torch.rand(shape, generator=generator) < (0.7 if kind == "some" else 0.2)
    if kind == "by length":
        lengths = torch.randint(0, shape[-1] + 1, (shape[0],), generator=generator)
        return torch.arange(shape[-1]) < lengths.reshape(-1, *[1] * (len(shape) - 1))
    at = 1 if kind == "by channel" else 0
    narrow = [n if i == at else 1 for i, n in enumerate(shape)]
    return torch.rand(narrow, generator=generator) < 0.6


def norm_of(layer: nn.Module) -> spec.Norm:
    if isinstance(layer, (ours.LayerNorm, ours.RMSNorm)):
        rule = spec.layer if isinstance(layer, ours.LayerNorm) else spec.rms
        return rule(len(layer.normalized_shape))
    if isinstance(layer, ours.GroupNorm):
        return spec.group(layer.num_groups)
    return spec.batch if isinstance(layer, nn.modules.batchnorm._BatchNorm) else spec.instance


class Kept:
    """Running statistics by the definition, in float64."""

    def __init__(self, layer: nn.Module, draw: Draw) -> None:
        self.mean, self.var = (
            getattr(layer, n).double().numpy().copy() for n in ("running_mean", "running_var")
        )
        self.draw, self.batches = draw, 0

    def take(self, exact: Right) -> None:
        count, mean, var = (t.numpy() for t in (exact.count, exact.mean, exact.var))
        known = count > 1
        unbiased = np.where(known, var * count / np.maximum(count - 1, 1), 0.0)
        mean = np.where(known, mean, 0.0)
        if self.draw.cls.startswith("Instance"):  # the examples' own, averaged over those that have any
            examples = np.maximum(known.sum(0), 1)
            mean, unbiased, known = mean.sum(0) / examples, unbiased.sum(0) / examples, known.any(0)
        momentum = self.draw.momentum
        for name, new in (("mean", mean), ("var", unbiased)):
            old = getattr(self, name)
            updated = definition.running_update(old, new, momentum, updates=self.batches)
            setattr(self, name, np.where(known, updated, old))
        self.batches += bool(known.any())

    def uneven(self, exact: Right) -> bool:
        """Whether channels have taken in different batches, where their weight hangs on the one counter."""
        known = exact.count.numpy() > 1
        known = known.any(0) if self.draw.cls.startswith("Instance") else known
        return self.draw.mode == "train" and self.draw.momentum is None and len(set(known.ravel())) > 1


def compare(extra: Extra) -> str:
    """Raise where a step is wrong; say what came of it."""
    draw = extra.draw
    layer: Any = draws.build(draw, ours)
    norm, fused = norm_of(layer), ours.Fused(layer, extra.activation)
    tracked = getattr(layer, "running_mean", None) is not None
    kept = Kept(layer, draw) if tracked else None
    eps = layer.eps
    if eps is None:
        eps = torch.finfo(torch.float64 if draw.dtypes[0] == torch.float64 else torch.float32).eps
    for step, (x, dy) in enumerate(draws.batches(draw)):
        shape = (1, *x.shape) if draw.unbatched else tuple(x.shape)
        mask = a_mask(extra.mask, shape, draw.seed + step)
        residual = torch.randn(x.shape, generator=torch.Generator().manual_seed(draw.seed)).to(x.dtype)
        residual = residual if extra.residual else None
        stored = None if draw.mode == "train" or kept is None else (layer.running_mean, layer.running_var)
        given = [t if t is None else t.reshape(shape) for t in (x, dy, residual)]
        exact = right(
            *(norm, given[0], given[1], layer.weight, getattr(layer, "bias", None)),
            eps=eps,
            mask=mask,
            residual=given[2],
            activation=extra.activation,
            stored=stored,
        )
        whole = None if mask is None else mask.broadcast_to(shape).reshape(x.shape)
        if whole is not None and draw.layout != "expanded":
            x[~whole] = extra.junk
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        leaf, other = x.requires_grad_(), residual if residual is None else residual.requires_grad_()
        wanted = {
            "dx": leaf,
            "dresidual": other,
            "dweight": layer.weight,
            "dbias": getattr(layer, "bias", None),
        }
        wanted = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        passed = mask if mask is None or not draw.unbatched else mask.broadcast_to(shape)[0]
        if norm is spec.batch and stored is None and mask is not None and bool((exact.count == 1).any()):
            with pytest.raises(TooFewValuesError):
                fused(leaf, other, passed)
            assert all(torch.equal(before[name], now) for name, now in layer.state_dict().items())
            return "refused"
        if kept is not None and kept.uneven(exact):
            with pytest.raises(ArgumentError, match="leaves some channels no values"):
                fused(leaf, other, passed)
            assert all(torch.equal(before[name], now) for name, now in layer.state_dict().items())
            return "refused"
        y = fused(leaf, other, passed)
        found = torch.autograd.grad(y, list(wanted.values()), dy)
        assert y.dtype == x.dtype
        results = {
            name: tensor.reshape(exact.results[name].shape)
            for name, tensor in zip(wanted, found, strict=True)
        }
        exact.judge({"y": y.reshape(shape), **results})
        if kept is not None:
            check_statistics(layer, kept, exact, draw, step)
    return "masked" if mask is not None and not mask.all() else "whole"


def check_statistics(layer: Any, kept: Kept, exact: Right, draw: Draw, step: int) -> None:
    if draw.mode == "train":
        kept.take(exact)
    assert layer.num_batches_tracked == kept.batches
    ulp = torch.finfo(draw.dtypes[1]).eps
    for name, buffer in (("mean", layer.running_mean), ("var", layer.running_var)):
        answer = torch.from_numpy(getattr(kept, name))
        # each step rounds the buffer once; what it is blended from may be larger than what comes out
        size = answer.abs() + exact.mean.nan_to_num().abs().max() + exact.var.nan_to_num().max() + 4
        assert ((buffer.double() - answer).abs() <= (step + 1) * ulp * size).all(), (name, buffer, answer)


@pytest.fixture(scope="module")
def sample() -> list[Extra]:
    return drawn()


def test_every_layer_meets_every_kind_of_mask_and_every_activation(sample: list[Extra]) -> None:
    assert len(sample) == DRAWS
    for field in ("mask", "activation", "residual"):
        met = {(extra.draw.cls, getattr(extra, field)) for extra in sample}
        values = {getattr(extra, field) for extra in sample}
        assert len(met) == len(draws.FACTORS["cls"]) * len(values), field
    layouts = {(extra.draw.layout, extra.mask) for extra in sample}
    assert len(layouts) == len(draws.FACTORS["layout"]) * len(MASKS)


@pytest.mark.parametrize("cls", draws.FACTORS["cls"])
def test_a_layer_with_mask_residual_and_activation_is_the_definition(cls: str, sample: list[Extra]) -> None:
    came: Counter[str] = Counter()
    failures = []
    for extra in sample:
        if extra.draw.cls == cls:
            try:
                came[compare(extra)] += 1
            except AssertionError as error:
                failures.append(f"{extra}\n    {error}")
    assert not failures, f"{len(failures)} failed\n" + "\n".join(failures[:5])
    assert came["masked"] > 10
    assert came["whole"] > 5
