"""Nested lists as a page shows them: cell by cell, as the first rows of a table, and cut to what is shown.

Not for drawing, and not for arithmetic: every number stays as it is, only its address is worked out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normalcy.pages.numbers import path

ROWS, COLUMNS = 16, 12
"""How many rows and columns of a table are shown."""

_LISTED, _OPEN = 24, 48  # numbers of a list that are written out; of a table that stands open


@dataclass(frozen=True, slots=True)
class Listed:
    """A name and the addresses of its numbers; `more` counts those that are not written out."""

    name: str
    addresses: tuple[str, ...]
    more: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of addresses under a name, each row with its label; `cut` says what is left out."""

    name: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    cut: str
    is_open: bool


def cells(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Walk through nested lists in order.

    Example:
        >>> list(cells([[7.0], [8.0]]))
        [((0, 0), 7.0), ((1, 0), 8.0)]
    """
    if not isinstance(value, list):
        yield at, value
        return
    for i, item in enumerate(value):
        yield from cells(item, (*at, i))


def extents(value: Any) -> list[int]:
    """Give the shape of nested lists.

    Example:
        >>> extents([[1, 2, 3], [4, 5, 6]])
        [2, 3]
    """
    return [len(value), *extents(value[0])] if isinstance(value, list) and value else []


def first_rows(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Give the places, on all axes but the last, of the rows that a table shows.

    Example:
        >>> first_rows([2, 2, 9])
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    outer, rows = shape[:-1], list[tuple[int, ...]]()
    for k in range(min(math.prod(outer), ROWS)):
        at, rest = list[int](), k
        for n in reversed(outer):
            rest, i = divmod(rest, n)
            at.insert(0, i)
        rows.append(tuple(at))
    return rows


def left_out(shape: Sequence[int]) -> str:
    """Say what of an array its table leaves out, or nothing.

    Example:
        >>> left_out([300, 3]), left_out([2, 2])
        ('16 of 300 rows', '')
    """
    rows = math.prod(shape[:-1])
    said = [f"{ROWS} of {rows:,} rows"] if rows > ROWS else []
    said += [f"{COLUMNS} of {shape[-1]:,} columns"] if shape[-1] > COLUMNS else []
    return " and ".join(said)


def label(name: str, at: Sequence[int]) -> str:
    """Name a place of an array.

    Example:
        >>> label("x", (2, 0)), label("x", ())
        ('x[2, 0]', 'x')
    """
    return f"{name}[{', '.join(map(str, at))}]" if at else name


def laid_out(name: str, value: Any, here: tuple[str | int, ...]) -> Listed | Table:
    """Lay out a number, a list, an array or a list of records for a page.

    Args:
        name: what a person calls it.
        value: the number, or lists of numbers, or a list of mappings to numbers.
        here: the keys under which it stands.
    """
    if not isinstance(value, list):
        return Listed(name, (path(*here),), 0)
    if value and isinstance(value[0], Mapping):
        head = tuple(value[0])
        rows = tuple(
            (f"{k + 1}", tuple(path(*here, k, key) for key in head)) for k in range(min(len(value), ROWS))
        )
        cut = f"{ROWS} of {len(value):,} rows" if len(value) > ROWS else ""
        return Table(name, tuple(key.replace("_", " ") for key in head), rows, cut, is_open=True)
    shape = extents(value)
    if len(shape) < 2:
        shown = min(len(value), _LISTED)
        return Listed(name, tuple(path(*here, k) for k in range(shown)), len(value) - shown)
    rows = tuple(
        (label(name, at), tuple(path(*here, *at, k) for k in range(min(shape[-1], COLUMNS))))
        for at in first_rows(shape)
    )
    return Table(name, (), rows, left_out(shape), is_open=math.prod(shape) <= _OPEN)


def only(value: Any, addresses: Iterable[str]) -> Any:
    """Keep of all lists what stands at one of the addresses: a list becomes a mapping from index to item.

    Every key of a mapping stays, so that an address finds in the result what it finds in the whole.

    Example:
        >>> only({"x": [[1.5, 2.5], [3.5, 4.5]], "eps": 1e-05, "y": [6.0]}, ["x.1.0"])
        {'x': {'1': {'0': 3.5}}, 'eps': 1e-05, 'y': {}}
    """
    wanted: dict[str, Any] = {}
    for address in addresses:
        branch = wanted
        for key in address.split("."):
            branch = branch.setdefault(key, {})
    return _only(value, wanted)


def _only(value: Any, wanted: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _only(item, wanted.get(path(key), {})) for key, item in value.items()}
    if isinstance(value, list):
        return {key: _only(value[int(key)], wanted[key]) for key in sorted(wanted, key=int)}
    return value
