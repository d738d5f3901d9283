"""`normalcy trace`: a normalization, step by step, as a table, as JSON or as a page.

Not for anything that computes: it reads what is asked for, calls `normalcy.trace`, and prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from normalcy.cli import writing
from normalcy.cli.trace.asking import ARRAYS, MANY, ONE, Asked, parse, several
from normalcy.cli.trace.table import table
from normalcy.errors import ArgumentError, NormalcyError
from normalcy.trace import Trace, trace, warm_up

__all__ = ["HELP", "MANY", "ONE", "run"]

HELP: Final = """\
Usage: normalcy trace VALUES... [OPTIONS]

  Normalize numbers and show every step with its numbers.  VALUES are those of
  one feature, one per example; or an array: JSON such as '[[1, 2], [3, 4]]',
  the name of a JSON, CSV or npy file, or - for the standard input.  A matrix is
  examples × channels, three axes are N × C × L.  --updates without values
  shows only the warm-up of a running mean.

    normalcy trace 2 4 6 8 --gamma 3 --beta -1 --eps 0 --dy 0.1 -0.2 0.3 -0.4
    normalcy trace activations.csv --norm layer --explain --html trace.html

What is averaged:
  --norm NAME            batch (default), layer, group, instance or rms
  --groups NUMBER        of group norm
  --axis NUMBERS         of layer and rms norm: the axes that are averaged
                         (default -1; the first axis is 0)
  --mask ARRAY           true or 1 where a value counts

Forward:
  --gamma, --weight      the scale γ (default 1): a number, or an array with one
                         per channel or, for layer and rms norm, per place
  --beta, --bias         the shift β (default 0), likewise
  --eps NUMBER           added to the variance (default 1e-05); 0 only where the
                         variance is positive

Backward:
  --dy ARRAY             the gradient that arrives at y, one number per value

Stored statistics, of batch norm:
  --running-mean ARRAY   } as given: inference, and the folded y = a·x + c
  --running-var ARRAY    }
  --momentum NUMBER      update them (or 0 and 1) by these values, once with
                         momentum as the weight of the new value and once as the
                         weight of the old one; also the momentum of --updates
  --correction NUMBER    the stored variance is var·n/(n - this) (default 1)

Warm-up:
  --updates NUMBERS      means of batches: the running mean after each, the
                         debiased one and the weight left on the initial one;
                         momentum (default 0.1) is the weight of the new value
  --initial NUMBER       the running mean before the first (default 0)

Output:
  --explain              why each step is as it is, with the numbers of this run
  --html FILE            a page to look at, before and after, readable offline
  --json                 for machines, every number in full; what is not defined
                         is null.  Keys: mean var xhat y normalized_variance
                         skewness kurtosis distinct, with --dy dgamma dbeta dx,
                         with --momentum update {momentum correction stored_var
                         initial_mean initial_var weight_of_new {running_mean
                         running_var} weight_of_old {the same}}, with
                         --running-mean and --running-var y_inference a c, with
                         --updates after [{running debiased weight_left}], with
                         --explain why {step: [sentences]}.  For arrays also
                         norm, shares (for each cell, which statistic it has:
                         an index into mean, var, count and so on) and count
  --help                 this text

  Numbers may be negative (-2, -1e-3) and stand anywhere.  A list takes every
  number up to the next option (-- ends it), or is written --dy=0.1,-0.2.
  ARRAY stands for numbers, JSON, a file or -; where the values are one array,
  γ, β and the stored statistics take several numbers too: --gamma 1 0.5 2.
"""


def run(argv: list[str]) -> int:
    """Trace what the arguments after `normalcy trace` ask for, and print it.

    Returns:
        The exit code: 0, or 2 where the arguments do not fit or the result cannot be written; then one
        sentence on the standard error says what was given, what is needed and what to do.

    Example:
        >>> run(["--updates", "10", "--json"])
        {"after": [{"running": 1.0, "debiased": 10.0, "weight_left": 0.9}]}
        0
    """
    try:
        if "--help" in argv or "-h" in argv:
            writing.write_out(HELP)
            return 0
        asked = parse(argv)
        _together(asked)
        page = _page(asked)
        made = _trace(asked)
        if page is not None:
            _draw(made, page, asked)
        said = f"\nThe page is in {page}\n" if page is not None else ""
        writing.write_out(
            json.dumps(made.as_dict(), allow_nan=False) + "\n"
            if "json" in asked.flags
            else table(made) + said
        )
    except NormalcyError as error:
        sys.stderr.write(f"normalcy trace: {error}\n")
        return 2
    return 0


def _together(asked: Asked) -> None:
    """Check which options go together."""
    values = bool(asked.numbers.get("")) or "" in asked.sources
    if not values:
        names = (*asked.numbers, *asked.sources, *asked.texts)
        forward = [name for name in names if name not in {"", "updates", "initial", "momentum"}]
        if "updates" not in asked or forward:
            given = f"there are no values for --{forward[0]}" if forward else "there are no values"
            do = "write them first, as in normalcy trace 2 4 6 8, or name a file"
            raise ArgumentError(given, "at least one number", do)
    feature = bool(asked.numbers.get("")) and asked.texts.get("norm", "batch") == "batch"
    for name in ARRAYS if feature else ():
        if name in ONE and len(asked.numbers.get(name, ())) > 1:
            raise several(name)
    for name, other in (
        ("initial", "updates"),
        ("correction", "momentum"),
        ("running-mean", "running-var"),
        ("running-var", "running-mean"),
    ):
        if name in asked and other not in asked:
            raise ArgumentError(
                f"--{name} is given without --{other}", f"--{other} with it", "give both, or neither"
            )


def _trace(asked: Asked) -> Trace:
    """Compute what is asked for."""
    x, explain = asked.array(""), "explain" in asked.flags
    momentum, steps = asked.one("momentum"), Trace(())
    if x:
        gamma, beta = asked.array("gamma"), asked.array("beta")
        mean, var = asked.array("running-mean"), asked.array("running-var")
        steps += trace(
            x,
            norm=asked.texts.get("norm", "batch"),
            groups=_first(asked.whole("groups")),
            axes=asked.whole("axis"),
            gamma=1.0 if gamma is None else gamma,
            beta=0.0 if beta is None else beta,
            eps=asked.or_else("eps", 1e-5),
            dy=asked.array("dy"),
            mask=asked.array("mask"),
            running=None if mean is None or var is None else (mean, var),
            momentum=momentum,
            correction=_correction(asked),
            explain=explain,
        )
    if "updates" in asked:
        steps += warm_up(
            asked.numbers["updates"],
            momentum=0.1 if momentum is None else momentum,
            initial=asked.or_else("initial", 0.0),
            explain=explain,
        )
    return steps


def _correction(asked: Asked) -> int:
    given = _first(asked.whole("correction", lowest=0, do="give 1 for PyTorch's store"))
    return 1 if given is None else given


def _first(numbers: list[int] | None) -> int | None:
    return None if numbers is None else numbers[0]


def _page(asked: Asked) -> Path | None:
    """Where the page goes, if it is asked for: seen to be writable, and no array of this very command."""
    if "html" not in asked.texts:
        return None
    from normalcy import pages  # noqa: PLC0415 - needs an optional dependency

    pages.require()
    file = Path(asked.texts["html"])
    read = {f"--{name}" if name else "input": word for name, word in asked.sources.items()}
    writing.apart({"--html": file}, read)
    writing.check(file)
    return file


def _draw(made: Trace, file: Path, asked: Asked) -> None:
    """Write the page; nothing is loaded for it unless it is asked for."""
    from normalcy import pages  # noqa: PLC0415 - needs an optional dependency

    steps: list[dict[str, Any]] = [
        {"name": step.name, "formula": step.formula, "values": step.values, "why": list(step.why)}
        for step in made.steps
    ]
    page = pages.render_trace({"norm": asked.texts.get("norm", "batch"), "steps": steps})
    with writing.atomic(file) as opened:
        opened.write(page)
