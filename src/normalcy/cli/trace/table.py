"""A trace for a person: one row a step, the formula, the numbers and the reasons below it.

Not for machines: long lists are cut here, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from normalcy.trace import Step, Trace, Value
from normalcy.trace.record import WORDS

_SHOWN: Final = 12  # numbers of a list, and rows of an array
_STEP: Final = 18
_LEAST: Final = 24  # characters that an array's row gets on the narrowest screen


def table(made: Trace) -> str:
    """Lay the steps out for the screen that there is; every line ends in its last sign."""
    screen, text = Console(), StringIO()
    console = Console(
        file=text, width=screen.width, force_terminal=screen.is_terminal, highlight=False, markup=False
    )
    laid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, leading=1)
    laid.add_column("step", style="bold", max_width=_STEP)
    laid.add_column("formula and numbers")
    room = max(screen.width - _STEP - 6, _LEAST)
    for step in made.steps:
        numbers = (Padding(line, (0, 0, 0, 2), expand=False) for line in _lines(step, room))
        laid.add_row(step.name, Group(step.formula, *numbers, *_reasons(step)))
    console.print(laid)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _reasons(step: Step) -> Iterator[RenderableType]:
    for sentence in step.why:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row("·", sentence)
        yield grid


def _lines(step: Step, room: int) -> Iterator[str]:
    for name, value in step.values.items():
        if name == "after" and isinstance(value, list):
            yield from (f"after {k}:  {_pairs(after)}" for k, after in enumerate(value, start=1))
        elif isinstance(value, Mapping):
            yield _pairs({inner: v for inner, v in value.items() if not isinstance(v, Mapping)})
            yield from (
                f"{_word(inner)}:  {_pairs(v)}" for inner, v in value.items() if isinstance(v, Mapping)
            )
        elif isinstance(value, list) and value and isinstance(value[0], list):
            yield f"{_word(name)} ="
            yield from (f"  {line}" for line in _array(value, room))
        else:
            # Of x̂ it is the variance, but for rms norm the mean square: as the formula says.
            word = step.formula.partition(" = ")[0] if name == "normalized_variance" else _word(name)
            yield f"{word} = {_text(value)}"


def _array(value: Sequence[Value], room: int) -> Iterator[str]:
    """Lay an array out in aligned columns, each row of its last axis labelled by its place in the others."""
    rows = [
        (place, ["masked" if v is None else _text(v) for v in row[:_SHOWN]], len(row))
        for place, row in _rows(value, ())
    ]
    label = max(len(place) for place, _, _ in rows[:_SHOWN])
    width = max((len(text) for _, row, _ in rows[:_SHOWN] for text in row), default=1)
    columns = max(min((room - label - 4) // (width + 2), _SHOWN), 1)
    for place, row, _ in rows[:_SHOWN]:
        yield "".join([place.ljust(label), *(f"  {text.rjust(width)}" for text in row[:columns])])
    cut = []
    if len(rows) > _SHOWN:
        cut.append(f"{_SHOWN} of {len(rows)} rows")
    if rows[0][2] > columns:
        cut.append(f"{columns} of {rows[0][2]} columns")
    if cut:
        yield f"… ({' and '.join(cut)}; all of them with --json)"


def _rows(value: Sequence[Value], at: tuple[int, ...]) -> Iterator[tuple[str, Sequence[Value]]]:
    for i, row in enumerate(value):
        if isinstance(row, list) and row and isinstance(row[0], list):
            yield from _rows(row, (*at, i))
        elif isinstance(row, list):
            yield f"[{','.join(map(str, (*at, i)))}]", row


def _pairs(values: Mapping[str, Value] | Value) -> str:
    if not isinstance(values, Mapping):
        return _text(values)
    return "  ".join(f"{_word(name)} = {_text(value)}" for name, value in values.items())


def _word(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _text(value: Value) -> str:
    if value is None:
        return "not defined"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{value + 0.0:.6g}"  # + 0.0 so that nobody reads −0
    if isinstance(value, Sequence):
        shown = "  ".join(_text(v) for v in value[:_SHOWN])
        return shown if len(value) <= _SHOWN else f"{shown}  … ({len(value)} in all, every one with --json)"
    return _pairs(value)


_WORDS: Final = WORDS | {
    "weight_of_new": "if m weighs the new value",
    "weight_of_old": "if m weighs the old value",
}
