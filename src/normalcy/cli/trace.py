"""`normalcy trace`: one feature's normalization, step by step, as a table or as JSON.

Not for other commands: it parses its own numbers, because values may be negative and come in any order.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Final

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table

from normalcy.errors import ArgumentError, NormalcyError, OutputError
from normalcy.trace import Step, Trace, Value, trace, warm_up

HELP: Final = """\
Usage: normalcy trace VALUES... [OPTIONS]

  Normalize one feature, one value per example, and show every step with its
  numbers.  --updates without values shows only the warm-up of a running mean.

    normalcy trace 2 4 6 8 --gamma 3 --beta -1 --eps 0 --dy 0.1 -0.2 0.3 -0.4

Forward:
  --gamma NUMBER         the scale γ (default 1)
  --beta NUMBER          the shift β (default 0)
  --eps NUMBER           added to the variance (default 1e-05); 0 only where the
                         variance is positive

Backward:
  --dy NUMBERS           the gradient that arrives at y, one number per value

Stored statistics:
  --running-mean NUMBER  } as given: inference, and the folded y = a·x + c
  --running-var NUMBER   }
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
  --json                 for machines, every number in full; what is not defined
                         is null.  Keys: mean var xhat y normalized_variance
                         skewness kurtosis distinct, with --dy dgamma dbeta dx,
                         with --momentum update {momentum correction stored_var
                         initial_mean initial_var weight_of_new {running_mean
                         running_var} weight_of_old {the same}}, with
                         --running-mean and --running-var y_inference a c, with
                         --updates after [{running debiased weight_left}]
  --help                 this text

  Numbers may be negative (-2, -1e-3) and stand anywhere.  A list takes every
  number up to the next option (-- ends it), or is written --dy=0.1,-0.2.
"""

_ONE: Final = ("gamma", "beta", "eps", "running-mean", "running-var", "momentum", "correction", "initial")
_MANY: Final = ("dy", "updates")
_OPTIONS: Final = (*_ONE, *_MANY, "json", "help")
_SHOWN: Final = 12


@dataclass(slots=True)
class _Asked:
    """What the command line says: the numbers of each option (the values under "")."""

    numbers: dict[str, list[float]] = field(default_factory=lambda: {"": []})
    json: bool = False

    def one(self, name: str) -> float | None:
        return self.numbers[name][0] if name in self.numbers else None

    def or_else(self, name: str, default: float) -> float:
        given = self.one(name)
        return default if given is None else given


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
            _write(HELP)
            return 0
        asked = _parse(argv)
        made = _trace(asked)
        _write(json.dumps(made.as_dict(), allow_nan=False) + "\n" if asked.json else _table(made))
    except NormalcyError as error:
        sys.stderr.write(f"normalcy trace: {error}\n")
        return 2
    return 0


def _trace(asked: _Asked) -> Trace:
    """Check which options go together, and compute."""
    x = asked.numbers[""]
    updates = asked.numbers.get("updates")
    if not x:
        forward = [name for name in asked.numbers if name not in {"", "updates", "initial", "momentum"}]
        if updates is None or forward:
            given = f"there are no values for --{forward[0]}" if forward else "there are no values"
            raise ArgumentError(
                given, "at least one number", "write them first, as in normalcy trace 2 4 6 8"
            )
    _needs(asked, "initial", "updates")
    _needs(asked, "correction", "momentum")
    _needs(asked, "running-mean", "running-var")
    _needs(asked, "running-var", "running-mean")
    momentum, steps = asked.one("momentum"), Trace(())
    if x:
        running = (asked.or_else("running-mean", 0.0), asked.or_else("running-var", 1.0))
        steps += trace(
            x,
            gamma=asked.or_else("gamma", 1.0),
            beta=asked.or_else("beta", 0.0),
            eps=asked.or_else("eps", 1e-5),
            dy=asked.numbers.get("dy"),
            running=running if "running-mean" in asked.numbers else None,
            momentum=momentum,
            correction=_whole(asked.or_else("correction", 1)),
        )
    if updates is not None:
        weight = 0.1 if momentum is None else momentum
        steps += warm_up(updates, momentum=weight, initial=asked.or_else("initial", 0.0))
    return steps


def _needs(asked: _Asked, name: str, other: str) -> None:
    if name in asked.numbers and other not in asked.numbers:
        raise ArgumentError(
            f"--{name} is given without --{other}", f"--{other} with it", "give both, or neither"
        )


def _whole(correction: float) -> int:
    if correction < 0 or correction != int(correction):
        raise ArgumentError(
            f"--correction is {correction:g}", "a whole number from 0", "give 1 for PyTorch's store"
        )
    return int(correction)


def _parse(argv: Sequence[str]) -> _Asked:
    """Read the arguments: an option takes the number after it, a list every number up to the next option."""
    asked = _Asked()
    taker = ""  # whose number comes next; "" is the values
    for word in argv:
        number = _number(word)
        if number is not None:
            _take(asked, taker, number)
            taker = taker if taker in _MANY else ""
            continue
        _not_waiting(asked, taker)
        if word == "--":
            taker = ""
        elif word.startswith("-"):
            taker = _option(asked, word)
        else:
            raise ArgumentError(
                f"{word!r} is no number", "numbers, and options that begin with --", "see --help"
            )
    _not_waiting(asked, taker)
    return asked


def _option(asked: _Asked, word: str) -> str:
    """Read one option, with its numbers where they follow a "="; return who takes the next number."""
    name, equals, inline = word.removeprefix("--").partition("=")
    if not word.startswith("--") or name not in _OPTIONS:
        close = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), _OPTIONS, n=1)
        do = f"perhaps --{close[0]} is meant" if close else "see --help"
        raise ArgumentError(f"there is no option {word.partition('=')[0]}", "", do)
    if name not in (*_ONE, *_MANY):
        if equals:
            raise ArgumentError(f"--{name} takes no value and got {inline!r}", f"--{name} alone")
        asked.json = True
        return ""
    if name in _ONE and name in asked.numbers:
        raise ArgumentError(f"--{name} is given twice", "one number", "leave one out")
    asked.numbers.setdefault(name, [])
    if not equals:
        return name
    parts = inline.split(",")
    for part in parts:
        number = _number(part)
        if number is None:
            raise ArgumentError(f"--{name} got {part!r}", "a number", "write it with digits, as in -1e-3")
        _take(asked, name, number)
    return name if name in _MANY and len(parts) == 1 else ""


def _take(asked: _Asked, name: str, number: float) -> None:
    if not math.isfinite(number):
        where = f"--{name}" if name else "the values"
        raise ArgumentError(f"{number} is given for {where}", "finite numbers", "take it out")
    if name in _ONE and asked.numbers[name]:
        raise ArgumentError(f"--{name} got several numbers", "one number", "leave the others out")
    asked.numbers[name].append(number)


def _not_waiting(asked: _Asked, taker: str) -> None:
    if taker and not asked.numbers[taker]:
        raise ArgumentError(f"--{taker} is given without a number", "a number after it", "see --help")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _table(made: Trace) -> str:
    """Lay the steps out for a person: one row a step, the formula and below it the numbers."""
    screen, text = Console(), StringIO()  # laid out for the screen, printed by `_write`
    console = Console(
        file=text, width=screen.width, force_terminal=screen.is_terminal, highlight=False, markup=False
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1)
    table.add_column("step", style="bold", max_width=18)
    table.add_column("formula and numbers")
    for step in made.steps:
        numbers = (Padding(line, (0, 0, 0, 2), expand=False) for line in _lines(step))
        table.add_row(step.name, Group(step.formula, *numbers))
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _lines(step: Step) -> Iterator[str]:
    for name, value in step.values.items():
        if name == "after" and isinstance(value, list):
            yield from (f"after {k}:  {_pairs(after)}" for k, after in enumerate(value, start=1))
        elif isinstance(value, Mapping):
            yield _pairs({inner: v for inner, v in value.items() if not isinstance(v, Mapping)})
            yield from (
                f"{_word(inner)}:  {_pairs(v)}" for inner, v in value.items() if isinstance(v, Mapping)
            )
        else:
            yield f"{_word(name)} = {_text(value)}"


def _pairs(values: Mapping[str, Value]) -> str:
    return "  ".join(f"{_word(name)} = {_text(value)}" for name, value in values.items())


def _word(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _text(value: Value) -> str:
    if value is None:
        return "not defined"
    if isinstance(value, int | float):
        return f"{value + 0.0:.6g}"  # + 0.0 so that nobody reads −0
    if isinstance(value, Sequence):
        shown = "  ".join(_text(v) for v in value[:_SHOWN])
        return shown if len(value) <= _SHOWN else f"{shown}  … ({len(value)} in all, every one with --json)"
    return _pairs(value)


def _write(text: str) -> None:
    """Print to the standard output, whatever its encoding; a failure is one sentence."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail again, and noisily, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        given = f"the result cannot be written: {error.strerror}"
        raise OutputError(given, "a standard output that takes it", "write elsewhere") from None


_WORDS: Final = {
    "xhat": "x̂",
    "gamma": "γ",
    "beta": "β",
    "dgamma": "dγ",
    "dbeta": "dβ",
    "S1": "S₁",
    "S2": "S₂",
    "y_inference": "y",
    "normalized_variance": "variance of x̂",
    "skewness": "skewness of x̂",
    "kurtosis": "kurtosis of x̂",
    "distinct": "distinct in x̂",
    "weight_of_new": "if m weighs the new value",
    "weight_of_old": "if m weighs the old value",
}
