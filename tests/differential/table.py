"""The ids of docs/differences.md."""

from __future__ import annotations

from pathlib import Path

TABLE = Path(__file__).parents[2] / "docs" / "differences.md"


def rows() -> list[str]:
    """The first column of the table, in order."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines[1:]]
