"""`examine_checkpoint`: what a file of weights alone says about the norms in it.

Not for a model: `examine` sees its wiring and, with data, measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normalcy.checkpoint import Checkpoint, Layer, found_in, read
from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import SEVERITIES, Examination, Examined
from normalcy.doctor.rules.state import MOMENTA, STATE_RULES
from normalcy.errors import TargetError
from normalcy.statistics import weight_left

_GROUNDS = {
    "statistics": "running statistics",
    "name": "γ and β, by name",
    "shape": "γ and β, by shape",
}
_MOST_COUNTS = 4


def examine_checkpoint(checkpoint: Checkpoint | str | Path) -> Examination:
    """Examine the norms of a checkpoint by their names, shapes and values alone.

    Statistics at their initial values, not warmed up, not finite, negative or below eps; γ or β not finite;
    γ near zero. Momentum and eps are not in a checkpoint: those of the framework that uses such names are
    assumed, the notes say so and tell what the initial state weighs at momentum 0.1 and 0.01.

    Args:
        checkpoint: what `normalcy.checkpoint.found_in` gave, or the path of a file.

    Returns:
        An `Examination`. In its sites, what a file does not tell is None: mode, momentum, eps, weight_left.

    Raises:
        TargetError: the file cannot be read, is no checkpoint, or holds no values of any norm it names.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = torch.nn.BatchNorm1d(3).state_dict()
        ...     state["running_var"][1] = -0.5
        ...     torch.save(state, f"{folder}/bn.pt")
        ...     [finding.code for finding in examine_checkpoint(f"{folder}/bn.pt").findings]
        ['negative-variance']
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = found_in(read(checkpoint))
    if checkpoint.unread and not checkpoint.layers:
        raise TargetError(
            "the checkpoint has the shapes of its norms and no values: its tensors were on the meta device",
            "a checkpoint with values",
            "save it after the weights are loaded",
        )
    norms = tuple(Norm(layer.where, layer, layer.kind) for layer in checkpoint.layers)
    unrecognized = (*checkpoint.unrecognized, *checkpoint.unread)
    evidence = Evidence(checkpoint, norms, None, unrecognized)
    findings = [finding for rule in STATE_RULES for finding in rule.check(evidence)]
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))  # stable: rules keep their order
    return Examination(
        findings=tuple(findings),
        sites=tuple(_examined(layer) for layer in checkpoint.layers),
        unrecognized=unrecognized,
        notes=(*_assumed(checkpoint.layers), *checkpoint.weights.notes),
    )


def updates_of(layers: tuple[Layer, ...]) -> dict[int, int]:
    """How many norms took in how many batches, by the counters that stand in the file."""
    counted: dict[int, int] = {}
    for layer in layers:
        if layer.num_batches_tracked is not None:
            updates = int(layer.num_batches_tracked)
            counted[updates] = counted.get(updates, 0) + 1
    return dict(sorted(counted.items()))


def _examined(layer: Layer) -> Examined:
    return Examined(
        where=layer.where,
        kind=layer.kind,
        cls=_GROUNDS[layer.ground],
        channels=layer.channels,
        mode=None,
        momentum=None,
        eps=None,
        updates=None if layer.num_batches_tracked is None else int(layer.num_batches_tracked),
        weight_left=None,
        calls=None,
        values=None,
    )


def _assumed(layers: tuple[Layer, ...]) -> Iterator[str]:
    """Sentences on what was assumed, and on what ground tensors were taken for norms."""
    tracked = [layer for layer in layers if layer.ground == "statistics"]
    for convention in dict.fromkeys(layer.convention for layer in tracked):
        weight, eps = convention.weight_of_new(), convention.default_eps("batch")
        yield (
            f"Momentum and eps are not in a checkpoint; assumed are {convention.name}'s own: momentum "
            f"{weight:g} (the weight of the new value) and eps {eps:g}."
        )
    counts = updates_of(layers)
    listed = list(counts)
    if len(listed) > _MOST_COUNTS:
        listed = [listed[0], listed[-1]]
        yield f"The counters differ between {len(counts)} values; told here are the smallest and the largest."
    for updates in listed:
        left = " and ".join(
            f"{weight_left(momentum, updates):.3g} at momentum {momentum:g}" for momentum in MOMENTA
        )
        yield f"After {updates:,} update{'' if updates == 1 else 's'} the initial state weighs {left}."
    if len(tracked) > sum(counts.values()):
        yield (
            f"{len(tracked) - sum(counts.values())} of {len(tracked)} norms with running statistics have no "
            "counter: how far they have warmed up cannot be told."
        )
    bare = [layer.ground for layer in layers if layer.ground != "statistics"]
    if bare:
        yield (
            f"Without running statistics: {bare.count('name')} taken for norms by name, {bare.count('shape')}"
            " as weight and bias have one shape. Whether each is one, and which, a checkpoint does not tell."
        )
