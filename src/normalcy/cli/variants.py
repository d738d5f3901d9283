"""`normalcy doctor --norm …`: which variants are meant, and their comparison for a person at a terminal.

Nothing is computed here: `normalcy.variants` does, and gives the words of each claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from normalcy.cli import render
from normalcy.cli.render import Line, number
from normalcy.errors import ArgumentError

if TYPE_CHECKING:
    from normalcy.measure import Progress
    from normalcy.variants import Comparison

NORMS = ("none", "batch", "layer", "group", "rms")
PLACES = ("before", "after")
_UNASKED = ("batch", "layer")  # where only a place or a batch size is given


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options ask to compare."""

    norms: tuple[str, ...]
    places: tuple[str, ...]
    batch: int | None
    steps: int | None

    def compared(self, seed: int, progress: Progress) -> Comparison:
        """Train and compare."""
        from normalcy import example, variants  # noqa: PLC0415 - the whole library; mistakes come without it

        return variants.compare(
            [variants.Variant(norm, place) for norm in self.norms for place in self.places],
            batch=example.BATCH_SIZE if self.batch is None else self.batch,
            steps=example.STEPS if self.steps is None else self.steps,
            seed=seed,
            progress=progress,
        )


def asked(
    norms: Sequence[str],
    places: Sequence[str],
    batch: int | None,
    steps: int | None,
    *,
    without: Mapping[str, bool],
) -> Asked | None:
    """What the options ask to compare; None where they ask for an examination.

    Args:
        norms: of `--norm`: names, each option one or several with commas between; `all` is all of them.
        places: of `--place`, the same way.
        batch: of `--batch`.
        steps: of `--steps`.
        without: other options, by name, and whether they were given; none of them goes with a comparison.

    Raises:
        ArgumentError: a name that there is not, or an option that goes only with an examination.

    Example:
        >>> asked(["batch,rms"], [], 2, None, without={}).norms
        ('batch', 'rms')
    """
    if not norms and not places and batch is None and steps is None:
        return None
    given = next(
        name
        for name, there in (("--norm", norms), ("--place", places), ("--batch", batch), ("--steps", steps))
        if there or there == 0
    )
    for name, there in without.items():
        if there:
            raise ArgumentError(
                f"{given} with {name}",
                "the embedded example alone: its variants are trained and compared",
                f"leave out one of the two; without {given} the doctor examines",
            )
    chosen = _named("--norm", norms, NORMS) or _UNASKED
    return Asked(chosen, _named("--place", places, PLACES) or PLACES[:1], batch, steps)


def rendered(made: Mapping[str, Any], *, width: int, colour: bool) -> str:
    """Give a comparison as text; lines are wrapped, never cut off."""
    return render.printed(_lines(made), width=width, colour=colour)


def _named(option: str, given: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip().lower() for word in given for name in word.split(",")]
    if "all" in names:
        return known
    for name in names:
        if name not in known:
            raise ArgumentError(f"{option} {name or '(empty)'}", f"one of {', '.join(known)}, or all")
    return tuple(dict.fromkeys(names))


def _lines(made: Mapping[str, Any]) -> Iterator[Line]:
    recipe = made["recipe"]
    seeds = ", ".join(map(str, recipe["seeds"]))
    yield (
        0,
        Text(
            f"Variants of the embedded example: {number(recipe['steps'])} steps in batches of "
            f"{number(recipe['batch'])}, seeds {seeds}"
        ),
    )
    yield from _table(made)
    claims = [variant["against_none"]["sentence"] for variant in made["variants"] if variant["against_none"]]
    if claims:
        yield from render.heading("Against none")
        for claim in claims:
            yield 2, Text(claim)
        yield (
            2,
            Text(
                "All had the same names, initial weights, batches and steps, and each the learning rate with "
                f"the lowest loss on validation names, out of {', '.join(map(number, recipe['rates']))}. "
                "Three seeds on one split of the names; other data or more steps may say otherwise.",
                "dim",
            ),
        )
    for variant in made["variants"]:
        if variant["batch_norm"]:
            yield from _neighbours(variant, recipe["batch"])
    if made["findings"]:
        yield from render.heading("Found")
        told: set[str] = set()
        for group in render.grouped(made["findings"]):
            yield from render.finding_lines(group, told)


def _table(made: Mapping[str, Any]) -> Iterator[Line]:
    yield from render.heading("Held-out loss (nats per character)")
    seeds = [f"seed {seed}" for seed in made["recipe"]["seeds"]]
    head = ("", "rate", "weights", *seeds, "mean", "spread")
    rows = [head]
    for variant in made["variants"]:
        losses = [_loss(value) for value in (*variant["losses"], variant["mean"], variant["spread"])]
        rows.append((variant["name"], number(variant["rate"]), number(variant["parameters"]), *losses))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for k, row in enumerate(rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        yield 2, Text("  ".join(cells), "dim" if k == 0 else "")
    bigram, uniform = (_loss(made["baselines"][name]) for name in ("bigram", "uniform"))
    yield (
        2,
        Text(
            f"A bigram table has {bigram}, a uniform guess {uniform}. Spread: largest minus smallest.", "dim"
        ),
    )


def _neighbours(variant: Mapping[str, Any], batch: int) -> Iterator[Line]:
    found = variant["batch_norm"]
    yield from render.heading(f"One example and its neighbours: {variant['name']}")
    yield (
        2,
        Text("In training its x̂ varies with them by so many standard deviations; in evaluation not at all."),
    )
    for layer in found["neighbours"]:
        parts = []
        for point in layer["curve"]:
            if point["batch"] in {2, 8, 32, 128, batch}:
                here = " (here)" if point["batch"] == batch else ""
                parts.append(f"{number(point['noise'])} at batch {number(point['batch'])}{here}")
        yield 2, Text.assemble((layer["where"], "bold"), f": {', '.join(parts)}")
    mean = next(point for point in found["neighbours"][0]["curve"] if point["batch"] == batch)["by_mean"]
    yield 2, Text(f"The mean alone is to blame for {number(mean)}; it goes as √(n − 1)/n for batches of n.")
    yield (
        2,
        Text(
            f"Held-out loss with stored statistics (evaluation) {_loss(found['stored'])}, with each batch's "
            f"own (training) {_loss(found['batch'])}, with statistics pooled over training data "
            f"{_loss(found['pooled'])}."
        ),
    )


def _loss(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else number(value)
