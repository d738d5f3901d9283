"""Sums, extremes and shapes of values by the statistic that they share.

Not for means and variances themselves: those are the definition's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from normalcy.definition import Array
from normalcy.trace.given import Given
from normalcy.trace.record import Value


def total(given: Given, values: Array) -> Array:
    """Sum per statistic, over the cells that count."""
    if _size(given) == 1:
        return np.array([np.sum(values[given.mask])])  # pairwise, which loses less than one after another
    sums = np.bincount(_index(given), weights=values[given.mask], minlength=_size(given))
    return sums.astype(np.float64)


def spread(given: Given, values: Array) -> Array:
    """The largest less the smallest value per statistic; 0 where there is none."""
    high, low = np.full(_size(given), -np.inf), np.full(_size(given), np.inf)
    np.maximum.at(high, _index(given), values[given.mask])
    np.minimum.at(low, _index(given), values[given.mask])
    return np.where(high >= low, high - np.where(high >= low, low, 0.0), 0.0)


def distinct(given: Given, values: Array) -> list[int]:
    """Count the different values per statistic."""
    index, chosen = _index(given), values[given.mask]
    order = np.lexsort((chosen, index))
    index, chosen = index[order], chosen[order]
    new = np.ones(len(chosen), np.bool_)
    new[1:] = (index[1:] != index[:-1]) | (chosen[1:] != chosen[:-1])
    return [int(n) for n in np.bincount(index[new], minlength=_size(given))]


def shape(given: Given, centred: Array) -> tuple[list[float | None], list[float | None]]:
    """Return skewness and kurtosis per statistic of values around 0; None where they have no spread."""
    largest = np.zeros(_size(given))
    np.maximum.at(largest, _index(given), np.abs(centred[given.mask]))
    there = largest > 0
    scaled = np.zeros_like(centred)  # so that no power underflows
    np.divide(centred, np.where(there, largest, 1.0)[given.shares], out=scaled, where=given.mask)
    count = np.maximum(total(given, np.ones_like(centred)), 1.0)
    second, third, fourth = (total(given, scaled**p) / count for p in (2, 3, 4))
    second = np.where(there, second, 1.0)
    # As Python takes the power: NumPy's may differ in the last digit.
    root = np.array([variance**1.5 for variance in second.tolist()])
    skewness, kurtosis = third / root, fourth / second**2
    return _where(there, skewness), _where(there, kurtosis)


def per_statistic(given: Given, values: Array | list[Any]) -> Value:
    """Report one number per statistic: a list, or the number itself where x is a plain list of values."""
    if not isinstance(values, list):
        values = _where(total(given, np.ones_like(given.x)) > 0, np.ravel(values))
    return values[0] if given.x.ndim == 1 or given.single else values


def per_cell(given: Given, values: Array | NDArray[np.intp], *, masked: bool = False) -> Value:
    """Report one number per cell, nested as x; `masked` puts None where a cell does not count."""
    shown: NDArray[Any] = values
    if masked and not given.mask.all():
        shown = values.astype(object)
        shown[~given.mask] = None
    written: Value = (shown[:, 0] if given.single else shown).tolist()
    return written


def per_place(given: Given, values: Array) -> Value:
    """Report one number per channel or parameter; the number itself where there is but one feature."""
    written: Value = (values[0] if given.single else values).tolist()
    return written


def _index(given: Given) -> NDArray[np.intp]:
    return given.shares[given.mask]


def _size(given: Given) -> int:
    return int(given.shares.max()) + 1


def _where(there: NDArray[np.bool_], values: Array) -> list[float | None]:
    return [value if known else None for value, known in zip(values.tolist(), there.tolist(), strict=True)]
