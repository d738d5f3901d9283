"""How a number stands in a sentence.

Not for tables: a table has its own width to keep.
"""

from __future__ import annotations


def number(value: float | None) -> str:
    """Six significant digits."""
    return "not defined" if value is None else f"{value + 0.0:.6g}"  # + 0.0 so that nobody reads −0


def digits(value: float) -> str:
    """As many digits as show the distance from a round number, up to twelve."""
    return next(text for digits in (6, 9, 12) if float(text := f"{value:.{digits}g}") != 1 or digits == 12)


def apart(value: float, other: float) -> str:
    """As many digits as tell the value from the other one, six at least."""
    texts = ((f"{value + 0.0:.{digits}g}", f"{other + 0.0:.{digits}g}") for digits in (6, 9, 12, 15))
    return next((mine for mine, its in texts if mine != its), f"{value:.17g}")


def counted(n: int, word: str) -> str:
    """A number with its noun."""
    return f"{n:,} {word}{'s' * (n != 1)}"


def upper(text: str) -> str:
    """Begin a sentence."""
    return text[:1].upper() + text[1:]
