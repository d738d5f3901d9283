"""What an operation on a model did, what it refused and why, and what was proved.

Shared by `nn.adopt`, `nn.release` and everything in `surgery`. Not for findings: those are the doctor's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Item:
    """One place in a model (`where`, the module's path) and one sentence (`why`)."""

    where: str
    why: str


@dataclass(slots=True)
class Report:
    """The result of an operation on a model.

    Attributes:
        model: the changed model (the one given, or its copy).
        done: what was changed.
        refused: what was left alone, each with its reason.
        failed: those of `refused` that were tried, failed their proof and were taken back.
        error: largest measured error of what was proved, absolute; None where nothing is proved.
        bound: the derived bound that `error` has to stay under; same unit.
        notes: sentences about the whole.
    """

    model: torch.nn.Module
    done: list[Item] = field(default_factory=list)
    refused: list[Item] = field(default_factory=list)
    failed: list[Item] = field(default_factory=list)
    error: float | None = None
    bound: float | None = None
    notes: list[str] = field(default_factory=list)

    def fail(self, where: str, why: str) -> None:
        """Refuse a place because its proof failed."""
        item = Item(where, why)
        self.refused.append(item)
        self.failed.append(item)
