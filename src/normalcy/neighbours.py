"""How much one example's x̂ varies with the examples it happens to share a batch with, for each batch norm.

For training only: with stored statistics an example's x̂ does not depend on its neighbours at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.case import Call, run
from normalcy.case.valid import valid_of
from normalcy.errors import ArgumentError, NormalcyError
from normalcy.moments import Moments
from normalcy.undisturbed import on_batch_statistics

SIZES = (2, 8, 32, 128)
_POOL = 256  # examples that neighbours are drawn from
_EXAMPLES, _CHANNELS, _DRAWS = 16, 32, 64  # looked at; 32,768 values of x̂ keep chance to a few percent


@dataclass(frozen=True, slots=True)
class Noise:
    """What neighbours do to one example's x̂ in batches of one size.

    Attributes:
        batch: how many examples share a statistic, the one looked at included.
        total: standard deviation of x̂ over neighbours, root mean square over examples, places and channels;
            in standard deviations of the data, as x̂ itself.
        by_mean: the part that the mean alone is to blame for.
    """

    batch: int
    total: float
    by_mean: float


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The neighbours' noise of one batch norm.

    Attributes:
        examples: how many examples neighbours were drawn from.
        batch: how many examples the data's own batches bring to this norm.
        curve: the noise by batch size, ascending; `batch` is among the sizes.
    """

    examples: int
    batch: int
    curve: tuple[Noise, ...]

    @property
    def here(self) -> Noise:
        """The noise in batches of the data's own size."""
        return next(point for point in self.curve if point.batch == self.batch)

    def at(self, batch: int) -> Noise | None:
        """The noise in batches of this size; None where it was not computed."""
        return next((point for point in self.curve if point.batch == batch), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "examples": self.examples,
            "batch": self.batch,
            "noise": self.here.total,
            "curve": [{"batch": p.batch, "noise": p.total, "by_mean": p.by_mean} for p in self.curve],
        }


def noise(each: Moments, sizes: Iterable[int], eps: float, seed: int = 0) -> tuple[Noise, ...]:
    """The noise that neighbours bring, by batch size, from the moments of single examples.

        x̂ = (x − mean)·rstd, where mean and rstd are of the example and n − 1 neighbours

    Neighbours are drawn with replacement from the same examples, 64 times for each size. Nothing but
    moments is needed: over draws, x̂ = a·x + c with a = rstd and c = −mean·rstd, so that its variance is
    Var(a)·x² + 2·Cov(a, c)·x + Var(c), and the moments of an example give the means of x and x² over its
    places. Where one example is one independent value (no space), by_mean is √(n − 1)/n ≈ 1/√n; the total is
    about √((1 + (kurtosis − 1)/4)/n), √(1.5/n) for Gaussian values, and √(2/3) at n = 2 whatever the
    distribution, because x̂ is then −1 or 1.

    Args:
        each: count, mean and m2 of each example and channel, (examples, channels), counts at least 1.
        sizes: batch sizes, each at least 1.
        eps: as in the layer.
        seed: of the draws; a generator of its own, no other random state moves.

    Returns:
        One `Noise` for each size, ascending. At most 32 channels and 16 examples are looked at, spread
        evenly; channels with values that are not finite are left out.

    Raises:
        ArgumentError: fewer than two examples, a size below 1, or no channel with finite values.

    Example:
        >>> x = 10 + 3 * torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        >>> few, many = noise(Moments.of(x, dim=()), (2, 128), eps=1e-5)
        >>> 0.7 < few.total < 0.9, 0.08 < many.by_mean < 0.10 < many.total < 0.13
        (True, True)
    """
    sizes = sorted(set(sizes))
    if each.mean.dim() != 2 or len(each.mean) < 2 or not sizes or sizes[0] < 1:
        given = f"moments of shape {tuple(each.mean.shape)} and batches of {sizes[:1]}"
        raise ArgumentError(given, "(examples, channels) with at least two examples, and sizes from 1")
    finite = (each.mean.isfinite() & each.m2.isfinite()).all(0).nonzero()[:, 0]
    if not len(finite):
        raise ArgumentError("no channel has finite values only", "one at least")
    each = _select(each, _spread(finite, _CHANNELS), 1)
    middle = (each.count * each.mean).sum(0) / each.count.sum(0)
    # centred, so that squares of an offset cancel nowhere below
    each = Moments(each.count, each.mean - middle, each.m2)
    pooled = _merged(each, torch.ones(1, len(each.mean)).to(each.mean))
    looked = _select(each, _spread(torch.arange(len(each.mean), device=each.mean.device), _EXAMPLES), 0)
    draws = np.random.default_rng(seed)
    even = np.full(len(each.mean), 1 / len(each.mean))
    found = []
    for size in sizes:
        weights = torch.from_numpy(draws.multinomial(size - 1, even, size=_DRAWS)).to(each.mean)
        total, by_mean = _spread_of(looked, _merged(each, weights), pooled.var(), eps)
        found.append(Noise(size, total, by_mean))
    return tuple(found)


def of_model(
    model: nn.Module,
    norms: Mapping[str, _BatchNorm],
    batches: Iterable[Any],
    *,
    call: Call | None = None,
    sizes: Sequence[int] = SIZES,
    most: int = 16,
) -> dict[str, Neighbours]:
    """The neighbours' noise of each of `norms`, on what they are given with batch statistics.

    Reads batches until each norm was given 256 examples, `most` at most; of a norm that runs several times
    in a pass, the first time counts. Masked places count nowhere. The model is left as it was.

    Norms that the data do not reach, that are given fewer than two examples, or no finite value, are missing
    from the result, as are all where the model fails on every batch.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> found = of_model(model, {"1": model[1]}, [torch.randn(64, 4)] * 4)["1"]
        >>> found.batch, found.examples, found.at(2).total > found.here.total > found.at(128).total
        (64, 256, True)
    """
    held: dict[str, list[Moments]] = {path: [] for path in norms}
    rows: dict[str, int] = {}
    with on_batch_statistics(model, norms):
        for number, batch in enumerate(batches, 1):
            fresh: dict[str, Moments] = {}
            with _listening(norms, fresh, rows):
                try:
                    run(model, batch, call)
                except NormalcyError:  # one value per channel, for instance: other batches may do
                    fresh.clear()
            for path, moments in fresh.items():
                held[path].append(moments)
            if number >= most or all(_count(pieces) >= _POOL for pieces in held.values()):
                break
    found = {}
    for path, pieces in held.items():
        each = _pool(pieces)
        if each is None:
            continue
        try:
            curve = noise(each, (*sizes, rows[path]), norms[path].eps)
        except ArgumentError:  # nothing finite among its values
            continue
        found[path] = Neighbours(len(each.mean), rows[path], curve)
    return found


def _spread_of(looked: Moments, others: Moments, var: Tensor, eps: float) -> tuple[float, float]:
    """Total and by_mean: over draws (first axis), root mean square over examples and channels."""
    own = Moments(*(part.unsqueeze(0) for part in (looked.count, looked.mean, looked.m2)))
    drawn = Moments(*(part.unsqueeze(1) for part in (others.count, others.mean, others.m2)))
    together = drawn + own  # (draws, examples, channels)
    a = _inverse(together.var() + eps).sqrt()
    c = -together.mean * a
    square = looked.var() + looked.mean.square()
    joint = ((a - a.mean(0)) * (c - c.mean(0))).sum(0) / (len(a) - 1)
    total = a.var(0) * square + 2 * joint * looked.mean + c.var(0)
    by_mean = together.mean.var(0) * _inverse(var + eps)
    return float(total.clamp(min=0).mean().sqrt()), float(by_mean.mean().sqrt())


def _inverse(x: Tensor) -> Tensor:
    """1/x, and 0 where x is 0: values that do not vary become β, whatever eps is."""
    return torch.where(x > 0, x.reciprocal(), 0.0)


def _merged(each: Moments, weights: Tensor) -> Moments:
    """For each row of weights: the moments of all examples, each taken so many times."""
    counts = weights @ each.count
    share = counts.clamp(min=1).reciprocal()
    mean = (weights @ (each.count * each.mean)) * share
    # `each` is centred on the mean of all, so that little cancels in Σ(mean_e − mean)² = Σmean_e² − n·mean²
    between = weights @ (each.count * each.mean.square()) - counts * mean.square()
    m2 = weights @ each.m2 + between.clamp(min=0)
    return Moments(counts, mean, m2)


def _select(each: Moments, index: Tensor, dim: int) -> Moments:
    return Moments(*(part.index_select(dim, index) for part in (each.count, each.mean, each.m2)))


def _spread(index: Tensor, most: int) -> Tensor:
    """At most so many of these, at even distances."""
    if len(index) <= most:
        return index
    return index[torch.arange(most, device=index.device) * len(index) // most]


def _pool(pieces: list[Moments]) -> Moments | None:
    if not pieces:
        return None
    parts = ("count", "mean", "m2")
    each = Moments(*(torch.cat([getattr(piece, part) for piece in pieces]) for part in parts))
    valid = (each.count > 0).all(1).nonzero()[:, 0]
    return _select(each, _spread(valid, _POOL), 0) if len(valid) > 1 else None


def _count(pieces: list[Moments]) -> int:
    return sum(len(piece.mean) for piece in pieces)


@contextmanager
def _listening(
    norms: Mapping[str, _BatchNorm], fresh: dict[str, Moments], rows: dict[str, int]
) -> Iterator[None]:
    """Within: the moments of each example of a norm's first call go to `fresh`, how many to `rows` once."""

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if inputs else named["input"]
            if path in fresh or x.dim() < 2 or not x.numel():
                return
            rows.setdefault(path, len(x))
            mask = valid_of(norm, inputs, named)
            taken = _spread(torch.arange(len(x), device=x.device), _POOL)
            channels = _spread(torch.arange(x.shape[1], device=x.device), 4 * _CHANNELS)
            x = x.detach().index_select(0, taken).index_select(1, channels)
            if mask is not None:
                mask = mask.index_select(0, taken).index_select(1, channels)
            fresh[path] = Moments.of(x, dim=tuple(range(2, x.dim())), mask=mask)

        return before

    with ExitStack() as stack:
        for path, norm in norms.items():
            stack.callback(norm.register_forward_pre_hook(hook(path), with_kwargs=True).remove)
        yield
