"""Arrays as a person hands them over: JSON in the arguments, a JSON, CSV or .npy file, or the standard input.

Not for tensors or checkpoints: what is read is small, to be followed number by number, and never unpickled.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from normalcy.errors import ArgumentError, DataError, ShapeError

LARGEST = 16 * 2**20
"""How many bytes are read at most; 250,000 numbers in full digits are a third of it."""

_SUFFIXES = (".json", ".csv", ".tsv", ".txt", ".npy")
_NPY = b"\x93NUMPY"
_TRUTH = {"true": True, "false": False}
_DEEPEST = 16
Nested = list[Any]


def is_source(word: str) -> bool:
    """Tell whether a word of the command line names an array: JSON, a file, or - for the standard input.

    Example:
        >>> [is_source(word) for word in ("[1, 2]", "activations.csv", "-", "three")]
        [True, True, True, False]
    """
    if word == "-" or word.lstrip()[:1] in {"[", "{"} or Path(word).suffix.lower() in _SUFFIXES:
        return True
    try:
        return bool(word) and Path(word).exists()
    except (OSError, ValueError):  # too long, or a NUL inside: no name of a file
        return False


def read(word: str, *, truths: bool = False) -> Nested:
    """Read the array that a word names, as nested lists of finite numbers, equally long at each level.

    Args:
        word: JSON, the name of a JSON, CSV or .npy file, or -.
        truths: also take true and false, for a mask.

    Raises:
        DataError: what is there is no such array; the sentence names the place.
        ArgumentError: there is no such file, or it cannot be read.
    """
    if word.lstrip()[:1] in {"[", "{"}:
        return _json(word, "the argument", truths=truths)
    name = "the standard input" if word == "-" else word
    found = _bytes(word, name)
    if found.startswith(_NPY):
        return _npy(found, name, truths=truths)
    text = _text(found, name)
    if not text.strip():
        raise DataError(f"{name} is empty", "numbers, as JSON or CSV")
    suffix = "" if word == "-" else Path(word).suffix.lower()
    if suffix == ".npy":
        raise DataError(f"{name} is no .npy file", "what numpy.save wrote", "save it as JSON or CSV")
    if suffix == ".json" or (suffix not in _SUFFIXES and text.lstrip()[0] in "[{"):
        return _json(text, name, truths=truths)
    return _csv(text, name, truths=truths)


def _bytes(word: str, name: str) -> bytes:
    try:
        if word == "-":
            if sys.stdin is None:
                raise ArgumentError("the standard input is closed", "an array on it", "name a file instead")
            found = sys.stdin.buffer.read(LARGEST + 1)
        else:
            with Path(word).open("rb") as file:
                found = file.read(LARGEST + 1)
    except FileNotFoundError:
        do = "check the name, or write the array itself, as in '[[1, 2], [3, 4]]'"
        raise ArgumentError(f"there is no file {word}", "a JSON or CSV file that is there", do) from None
    except OSError as error:
        given = f"{name} cannot be read ({error.strerror or 'it failed'})"
        raise ArgumentError(given, "a file that can be read") from None
    if len(found) > LARGEST:
        needed = f"at most {LARGEST // 2**20} MiB, because every number is followed through every step"
        raise DataError(f"{name} is larger than {LARGEST // 2**20} MiB", needed, "trace a part of it")
    return found


def _text(found: bytes, name: str) -> str:
    wide = found.startswith((b"\xff\xfe", b"\xfe\xff"))  # as spreadsheets save it
    try:
        text = found.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError(f"{name} is not text", "numbers, as JSON or CSV", "save it as one of these") from None
    return text


def _json(text: str, name: str, *, truths: bool) -> Nested:
    def constant(word: str) -> NoReturn:
        raise DataError(f"{word} is among the numbers of {name}", "finite numbers", "take it out")

    try:
        found = json.loads(text, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        wrong = error.msg[:1].lower() + error.msg[1:]
        given = f"{name} is no JSON ({wrong} at {where})"
        raise DataError(given, "nested lists of numbers, as in [[1, 2], [3, 4]]") from None
    except RecursionError:
        raise DataError(f"{name} is nested too deeply", f"at most {_DEEPEST} levels of lists") from None
    except DataError:
        raise
    except ValueError:  # a whole number with thousands of digits
        raise DataError(f"{name} has a number that is too long", "numbers that fit float64") from None
    if not isinstance(found, list):
        given = f"{name} is {_kind(found)}"
        raise DataError(given, "nested lists of numbers, as in [[1, 2], [3, 4]]")
    return list(_checked(found, name, (), truths=truths))


def _checked(found: Nested, name: str, at: tuple[int, ...], *, truths: bool) -> Iterator[Any]:
    """Yield the items of a list, each a finite number or a list as long as its siblings."""
    place = f"item {list(at)} of {name}" if at else name
    if not found:
        raise DataError(f"{place} is an empty list", "at least one number")
    if len(at) >= _DEEPEST:
        raise DataError(f"{name} is nested too deeply", f"at most {_DEEPEST} levels of lists")
    for i, item in enumerate(found):
        if isinstance(item, list) is not isinstance(found[0], list):
            given = f"item {[*at, i]} of {name} is {_kind(item)} and item {[*at, 0]} is {_kind(found[0])}"
            raise ShapeError(given, "the same depth everywhere", "even the lists out")
        if isinstance(item, list):
            if len(item) != len(found[0]):
                given = f"item {[*at, i]} of {name} has {_values(len(item))}, item {[*at, 0]} {len(found[0])}"
                raise ShapeError(given, "equally long lists", "even them out, or mask what is missing")
            yield list(_checked(item, name, (*at, i), truths=truths))
        else:
            yield _number(item, f"item {[*at, i]} of {name}", truths=truths)


def _number(item: object, place: str, *, truths: bool) -> float | bool:
    if isinstance(item, bool):
        if truths:
            return item
    elif isinstance(item, int | float):
        try:
            number = float(item)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise DataError(f"{place} is too large for float64", "finite numbers", "take it out")
    raise DataError(f"{place} is {_kind(item)}", "true and false" if truths else "numbers alone")


def _kind(item: object) -> str:
    if item is None or isinstance(item, bool):
        return {None: "null", True: "true", False: "false"}[item]
    if isinstance(item, str):
        return f"the text {item[:20]!r}" + ("…" if len(item) > 20 else "")
    if isinstance(item, list):
        return "a list"
    return "an object" if isinstance(item, dict) else "a number"


def _npy(found: bytes, name: str, *, truths: bool) -> Nested:
    """Read what numpy.save wrote; objects, which only unpickling would give, are refused."""
    do = "save numbers with numpy.save"
    try:
        array = np.lib.format.read_array(io.BytesIO(found), allow_pickle=False)
    except (ValueError, MemoryError, OverflowError, EOFError):
        raise DataError(f"{name} is no whole .npy file of numbers", "one array of numbers", do) from None
    if array.dtype.kind not in ("biuf" if truths else "iuf"):
        raise DataError(f"{name} has values of type {array.dtype}", "real numbers", do)
    if not array.ndim or not array.size:
        raise DataError(f"{name} has the shape {array.shape}", "at least one number, in one axis or more")
    if not np.isfinite(array).all():
        at = np.argwhere(~np.isfinite(array))[0].tolist()
        given, do = f"item {at} of {name} is not finite", "write 0 there, and mask it with --mask"
        raise DataError(given, "finite numbers", do)
    nested: Nested = array.tolist()
    return nested


def _csv(text: str, name: str, *, truths: bool) -> Nested:
    """Read a matrix: rows are examples; commas, semicolons, tabs or spaces between the numbers."""
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise DataError(f"{name} has no line with numbers", "numbers, as JSON or CSV")
    rows = [(number, _cells(line, name, number)) for number, line in lines]
    if len(rows) > 1 and all(_is_name(cell) for cell in rows[0][1]):
        rows = rows[1:]
    first, width = rows[0][0], len(rows[0][1])
    table = []
    for number, cells in rows:
        if len(cells) != width:
            given = f"line {number} of {name} has {_values(len(cells))} and line {first} has {_values(width)}"
            raise ShapeError(given, "rows of one length", "fill what is missing, and mask it with --mask")
        places = (f"line {number}, column {k} of {name}" for k in range(1, width + 1))
        table.append([_cell(cell, place, truths=truths) for cell, place in zip(cells, places, strict=True)])
    return table


def _cells(line: str, name: str, number: int) -> Sequence[str]:
    delimiter = next((sign for sign in ";\t," if sign in line), None)
    if delimiter is None:
        return line.split()
    try:
        cells = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True))
    except csv.Error:
        raise DataError(f"line {number} of {name} is no CSV", "numbers with one sign between them") from None
    return [cell.strip() for cell in cells]


def _cell(cell: str, place: str, *, truths: bool) -> float | bool:
    if truths and cell.lower() in _TRUTH:
        return _TRUTH[cell.lower()]
    number = _float(cell)
    if number is None:
        what = f"is {cell[:20]!r}" if cell else "is empty"
        do = "write a point for the decimal comma" if "," in cell else ""
        raise DataError(f"{place} {what}", "a number", do)
    if not math.isfinite(number):
        do = "write 0 there, and mask it with --mask"
        raise DataError(f"{place} is {cell}", "finite numbers", do)
    return number


def _is_name(cell: str) -> bool:
    """Tell the name of a column from a number, also from one that is miswritten, such as 1,5."""
    return (cell[:1].isalpha() or cell[:1] == "_") and _float(cell) is None and cell.lower() not in _TRUTH


def _float(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _values(n: int) -> str:
    return f"{n} value{'s' * (n != 1)}"
