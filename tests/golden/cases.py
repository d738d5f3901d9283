"""The right values, by the place where they can run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One case: what is `given`, what is `right`, and the places it can run `through`."""

    id: str
    kind: str
    through: tuple[str, ...]
    given: dict[str, Any]
    right: dict[str, Any]

    def __str__(self) -> str:
        return self.id


def cases(*files: str, through: str | None = None) -> list[Case]:
    """Load the cases of some files (`worked`, `field`, `grid`; all three without), in order."""
    found = []
    for name in files or ("worked", "field", "grid"):
        for raw in json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")):
            case = Case(raw["id"], raw["kind"], tuple(raw["through"]), raw["given"], raw["right"])
            if through is None or through in case.through:
                found.append(case)
    if not found:
        raise LookupError(f"no case in {files} runs through {through!r}")
    return found


def assert_close(got: Any, right: Any, *, relative: float = 1e-12, scale: float = 0.0) -> None:
    """Raise unless every number of `got` is within `relative` of `right`, None for None.

    `scale` is the size of what was added up: a sum that cancels to 0 is right to the rounding of its terms.
    """
    if isinstance(right, dict):
        if set(right) - set(got):
            raise AssertionError(f"{sorted(set(right) - set(got))} missing in {sorted(got)}")
        for key, value in right.items():
            assert_close(got[key], value, relative=relative, scale=scale)
    elif isinstance(right, list):
        if len(got) != len(right):
            raise AssertionError(f"{len(got)} numbers, right are {len(right)}: {got} and {right}")
        largest = max((abs(v) for v in right if isinstance(v, int | float)), default=0.0)
        for mine, theirs in zip(got, right, strict=True):
            assert_close(mine, theirs, relative=relative, scale=max(scale, largest))
    elif right is None or got is None:
        if got is not right:
            raise AssertionError(f"{got}, right is {right}")
    elif not abs(got - right) <= relative * max(abs(right), scale):
        raise AssertionError(f"{got!r}, right is {right!r}, off by {abs(got - right):.3g}")
