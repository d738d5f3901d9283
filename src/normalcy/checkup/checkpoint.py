"""The checkup of a checkpoint alone: the same value that a model's checkup is, with what was assumed.

Not for repairs: a file of weights has no model to run, so nothing is recalibrated, folded or proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normalcy.case import Case
from normalcy.checkpoint import Checkpoint, found_in, read
from normalcy.checkup import Checkup
from normalcy.doctor.rules.state import weights_left
from normalcy.doctor.state import examine_checkpoint, updates_of
from normalcy.errors import ArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointCheckup(Checkup):
    """A checkup whose model is a `Checkpoint`.

    Attributes:
        file: the checkpoint's form, its number of tensors, what was assumed about its norms, and the weight
            left on the initial state for each counter that stands in it.
    """

    file: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON, with `file` under the key "checkpoint"."""
        return {**Checkup.as_dict(self), "checkpoint": dict(self.file)}


def examined(path: str | Path) -> CheckpointCheckup:
    """Examine a checkpoint alone.

    Raises:
        TargetError: the file cannot be read, or is no checkpoint.
        MissingExtraError: the package safetensors is needed and not installed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.BatchNorm1d(3).state_dict(), f"{folder}/bn.pt")
        ...     made = examined(f"{folder}/bn.pt").as_dict()
        >>> made["model"]["norms"], made["checkpoint"]["assumed"]
        (1, [{'convention': 'PyTorch', 'momentum': 0.1, 'eps': 1e-05}])
    """
    checkpoint = found_in(read(path))
    found = examine_checkpoint(checkpoint)
    return CheckpointCheckup(
        target=str(path),
        case=Case(checkpoint),
        before=found,
        parameters=checkpoint.trained,
        file=_file(checkpoint),
    )


def refuse(options: Mapping[str, bool]) -> None:
    """Say of the first option that is given why it cannot be had with a checkpoint alone.

    Args:
        options: "--fix", "--fold", "--data" and whether each is given.

    Raises:
        ArgumentError: one is given.
    """
    why = {
        "--fix": "there is nothing to run that statistics could be measured with",
        "--fold": "what feeds a norm does not stand in it",
        "--data": "there is no model to run on them",
    }
    for option, given in options.items():
        if given:
            raise ArgumentError(
                f"{option} with a checkpoint alone: {why[option]}",
                "a model for it",
                "write a function that builds the model and loads the weights: file.py:callable",
            )


def _file(checkpoint: Checkpoint) -> dict[str, Any]:
    conventions = dict.fromkeys(
        layer.convention for layer in checkpoint.layers if layer.ground == "statistics"
    )
    return {
        "form": checkpoint.weights.form,
        "tensors": len(checkpoint.weights.entries),
        "assumed": [
            {"convention": c.name, "momentum": c.weight_of_new(), "eps": c.default_eps("batch")}
            for c in conventions
        ],
        "warmup": [
            {"updates": updates, "norms": norms, **weights_left(updates)}
            for updates, norms in updates_of(checkpoint.layers).items()
        ],
    }
