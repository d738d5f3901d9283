"""Variants of the embedded example trained under one recipe, each at the rate that suits it.

It prints nothing and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from normalcy import example, neighbours
from normalcy.errors import ArgumentError
from normalcy.example import BATCH_SIZE, STEPS, Batch, CharacterMLP, Split
from normalcy.measure import Progress
from normalcy.variants.results import Comparison, OnBatches, Result, too_few_values, verdict
from normalcy.variants.training import (
    Variant,
    drawn,
    loss_on_batches,
    must_have_neighbours,
    norms_of,
    recalibrated,
    train,
)

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = 3
_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_MOST = 2048  # a batch of held-out windows must be full


def compare(
    variants: Sequence[Variant],
    *,
    batch: int = BATCH_SIZE,
    steps: int = STEPS,
    seed: int = 0,
    rates: Sequence[float] = RATES,
    progress: Progress | None = None,
) -> Comparison:
    """Train variants of the embedded example and judge them on names held out, always against none.

    What all share: the names and their split, for each of three seeds the initial weights of every matrix
    and the batches in their order, the number of steps, the optimizer (AdamW, weight decay 0.01 on matrices).
    Each has the learning rate that suits it best, chosen on validation names; the held-out names choose
    nothing.

    Args:
        variants: which; `none` is added in front where it is missing.
        batch: examples in a batch, 1 to 2048; at least 2 with batch norm.
        steps: training steps, at least 1.
        seed: the first of three, one after another; the split of the names follows from it alone.
        rates: learning rates to choose from.
        progress: `progress(what, done, of)`.

    Raises:
        ArgumentError: a number out of range, or batch norm in batches of one.

    Example:
        >>> found = compare([Variant("layer")], steps=5, rates=(1e-2,))
        >>> [result.variant.name for result in found.results], len(found.results[1].losses)
        (['none', 'layer before'], 3)
    """
    if not 1 <= batch <= _MOST:
        raise ArgumentError(f"batches of {batch}", f"1 to {_MOST} examples")
    if steps < 1 or not rates:
        raise ArgumentError(f"{steps} steps at {len(rates)} rates", "at least one of either")
    ordered = list(dict.fromkeys([Variant(), *(v if v.norm != "none" else Variant() for v in variants)]))
    for variant in ordered:
        must_have_neighbours(variant, batch)
    parts = Split.of(example.load_names(), seed)
    seeds = tuple(range(seed, seed + SEEDS))
    results: list[Result] = []
    for variant in ordered:
        none = results[0].losses if results else None
        results.append(_result(variant, parts, none, batch, steps, seeds, tuple(rates), progress))
    return Comparison(
        results=tuple(results),
        batch=batch,
        steps=steps,
        seeds=seeds,
        rates=tuple(rates),
        windows=(len(parts.train[1]), len(parts.validation[1]), len(parts.test[1])),
        baselines={
            "uniform": math.log(len(example.ALPHABET)),
            "bigram": example.bigram_loss(parts.train, parts.test),
        },
        findings=tuple(found for result in results for found in too_few_values(result, batch)),
    )


def _result(
    variant: Variant,
    parts: Split,
    none: tuple[float, ...] | None,
    batch: int,
    steps: int,
    seeds: tuple[int, ...],
    rates: tuple[float, ...],
    progress: Progress | None,
) -> Result:
    done, of = 0, steps * len(seeds) * len(rates)

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(f"training {variant.name}", done, of)

    validation: dict[float, float] = {}
    best: list[CharacterMLP] = []
    for rate in rates:
        models = [
            train(variant, parts.train, rate=rate, batch=batch, steps=steps, seed=seed, progress=step)
            for seed in seeds
        ]
        validation[rate] = fmean(
            _or_inf(example.evaluation_loss(model, parts.validation)) for model in models
        )
        if not best or validation[rate] < min(loss for r, loss in validation.items() if r != rate):
            best = models
    losses = tuple(example.evaluation_loss(model, parts.test) for model in best)
    return Result(
        variant=variant,
        parameters=sum(parameter.numel() for parameter in best[0].parameters()),
        rate=min(validation, key=lambda rate: validation[rate]),
        validation=validation,
        losses=losses,
        against=None if none is None else verdict(losses, none),
        on_batches=_on_batches(best, losses, parts, batch, seeds) if variant.norm == "batch" else None,
    )


def _or_inf(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _on_batches(
    models: Sequence[CharacterMLP], losses: Sequence[float], parts: Split, batch: int, seeds: Sequence[int]
) -> OnBatches:
    pieces = list(drawn(parts.train, batch, 128, seeds[0]))  # 256 examples, also in batches of two
    sizes = (*_SIZES, batch)
    found = neighbours.of_model(models[0], norms_of(models[0]), pieces, sizes=sizes, most=len(pieces))
    pairs = list(zip(models, seeds, strict=True))
    own = fmean(loss_on_batches(model, parts.test, batch, seed) for model, seed in pairs)
    pooled = [_pooled(model, parts.train, parts.test, batch, seed) for model, seed in pairs]
    return OnBatches(fmean(losses), own, fmean(pooled), found)


def _pooled(model: CharacterMLP, data: Batch, test: Batch, batch: int, seed: int) -> float:
    return example.evaluation_loss(recalibrated(model, data, batch, seed), test)
