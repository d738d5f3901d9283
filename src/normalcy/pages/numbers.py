"""How a number of a checkup is addressed and how it is written, in one place.

Not for numbers in a terminal: a table there has its own width to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from normalcy.errors import ArgumentError

ABSENT = "–"
_NOT_FINITE = {"nan": "NaN", "inf": "∞", "-inf": "−∞"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: object) -> str:
    """Write one value of a checkup as a page shows it.

    Whole numbers are written out with thousands separators, other numbers with four significant digits
    (as a power of ten below 0.001 and from 100,000 on), what is almost 1 by its distance from it, a missing
    value as a dash, text as it is.

    Example:
        >>> [number(v) for v in (None, 12345, 2.61049, -0.5, 1.25e-7, 0.999996, "-inf", "net.2")]
        ['–', '12,345', '2.61', '−0.5', '1.25×10⁻⁷', '1 − 4×10⁻⁶', '−∞', 'net.2']
    """
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return _NOT_FINITE[str(value)]
    if value.is_integer() and abs(value) < 1e5:
        return number(int(value))
    digits = f"{value:.4g}"
    if digits == "1" and abs(1 - value) > 1e-12:  # a variance of nearly 1 is not 1, and that is the point
        return f"1 {'−' if value < 1 else '+'} {number(float(f'{abs(1 - value):.4g}'))}"
    if not 1e-3 <= abs(float(digits)) < 1e5:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}×10{str(int(exponent)).translate(_RAISED)}".replace("-", "−")
    return f"{float(digits):,.10g}".replace("-", "−")


def measure(value: object) -> float | None:
    """Give a JSON number as a float: "nan", "inf" and "-inf" become what they say, None stays.

    Example:
        >>> measure("inf"), measure(2), measure(None)
        (inf, 2.0, None)
    """
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    return float(value) if isinstance(value, (int, float)) else None


def path(*keys: str | int) -> str:
    """Join keys and indices to the address that a page writes into `data-json`.

    A dot inside a key is written `~1` and a tilde `~0`, as in a JSON pointer.

    Example:
        >>> path("before", "findings", 0, "evidence", "1.5 sigma")
        'before.findings.0.evidence.1~15 sigma'
    """
    return ".".join(str(key).replace("~", "~0").replace(".", "~1") for key in keys)


def lookup(checkup: object, address: str) -> object:
    """Find the value at an address; `length` at the end of one counts a list.

    Raises:
        ArgumentError: the address leads nowhere.

    Example:
        >>> lookup({"before": {"findings": [{"code": "dead-bias"}]}}, "before.findings.length")
        1
    """
    found = checkup
    for written in address.split("."):
        key = written.replace("~1", ".").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, (list, tuple)) and key == "length":
            found = len(found)
        elif isinstance(found, (list, tuple)) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise ArgumentError(
                f"nothing lies at {address!r}", "an address inside the checkup", "check its keys"
            )
    return found
