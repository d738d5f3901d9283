"""The page of a comparison of variants, and the charts of the neighbours' noise that a checkup shows as well.

Not for training anything: it reads finished values, the same that the command prints as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from normalcy.pages.charts import Mark, Row, bars, dots
from normalcy.pages.figures import DRAWN
from normalcy.pages.numbers import measure, number, path
from normalcy.pages.page import embedded, render, shown
from normalcy.pages.svg import AFTER, BATCH, BEFORE, QUIET

_CLAIMS = {"lower": AFTER, "higher": BEFORE, "within": QUIET}


def render_variants(made: Mapping[str, Any]) -> str:
    """Render a comparison as one page that needs no network, no script and no other file.

    Args:
        made: what `normalcy doctor --norm … --json` prints, as a dictionary.

    Every number in its tables and charts stands in an element whose `data-json` is its address, and the
    comparison itself is embedded as JSON.

    Raises:
        MissingExtraError: Altair or vl-convert is not installed; `pages.require()` says so beforehand.
    """
    data, _ = embedded(made)
    noisy = [
        (variant, path("variants", i, "batch_norm"), _noise(variant, i))
        for i, variant in enumerate(made["variants"])
        if variant["batch_norm"]
    ]
    claims = {variant["against_none"]["claim"] for variant in made["variants"] if variant["against_none"]}
    status = "mixed" if made["findings"] or "higher" in claims else "good" if "lower" in claims else "plain"
    return render(
        "variants.html",
        title="Variants of the embedded example",
        made=made,
        shown=partial(shown, made),
        number=number,
        path=path,
        status=status,
        losses=_losses(made),
        noisy=noisy,
        data=data,
    )


def neighbours(sites: Sequence[Any]) -> Markup | None:
    """Draw each layer's noise in batches of the data's size, and in the smallest for comparison.

    Args:
        sites: of a checkup, as `figures.sites` gives them.
    """
    rows = []
    measured = [(site, found) for site in sites if (found := site.before.get("neighbours"))]
    for site, found in sorted(measured, key=lambda row: -row[1]["noise"])[:DRAWN]:
        few = found["curve"][0]
        here = Mark(
            found["noise"],
            f"{site.path}.neighbours.noise",
            BATCH,
            f"{site.where}, batch {number(found['batch'])}: {number(found['noise'])}",
        )
        other = Mark(
            few["noise"],
            f"{site.path}.neighbours.curve.0.noise",
            QUIET,
            f"{site.where}, batch {number(few['batch'])}: {number(few['noise'])}",
        )
        label = f"{site.where}, batches of {number(found['batch'])}"
        rows.append(Row(label, (here, other) if few["batch"] != found["batch"] else (here,)))
    if not rows:
        return None
    told = "; ".join(mark.title for row in rows for mark in row.marks)
    return bars(rows, "standard deviations of the data", f"One example's x̂ over its neighbours. {told}.")


def _losses(made: Mapping[str, Any]) -> Markup:
    rows = []
    for i, variant in enumerate(made["variants"]):
        against = variant["against_none"]
        colour = _CLAIMS[against["claim"]] if against else QUIET
        marks = tuple(
            Mark(
                loss,
                path("variants", i, "losses", k),
                colour,
                f"{variant['name']}, seed {seed}: {number(loss)}",
            )
            for k, (seed, loss) in enumerate(zip(made["recipe"]["seeds"], variant["losses"], strict=True))
        )
        rows.append(Row(variant["name"], marks))
    told = "; ".join(mark.title for row in rows for mark in row.marks)
    reference = measure(made["variants"][0]["mean"])
    return dots(rows, "held-out loss, nats per character", f"Losses by variant and seed. {told}.", reference)


def _noise(variant: Mapping[str, Any], i: int) -> Markup | None:
    """Draw the noise by batch size, of the layer where it is largest."""
    layers = variant["batch_norm"]["neighbours"]
    if not layers:
        return None
    k = max(range(len(layers)), key=lambda index: layers[index]["noise"])
    at, layer = path("variants", i, "batch_norm", "neighbours", k, "curve"), layers[k]
    rows = []
    for j, point in enumerate(layer["curve"]):
        here = point["batch"] == layer["batch"]
        said = f"batch {number(point['batch'])}{', as trained' if here else ''}"
        whole = Mark(point["noise"], f"{at}.{j}.noise", BATCH, f"{said}: {number(point['noise'])}")
        rows.append(Row(said, (whole,)))
    told = "; ".join(mark.title for row in rows for mark in row.marks)
    return bars(rows, "standard deviations of the data", f"One example's x̂ in {layer['where']}. {told}.")
