"""The norm sites of a model, derived from one recorded pass.

Not for running anything: the pass was recorded before, and everything said here follows from it.
"""

from __future__ import annotations

from torch import nn

from normalcy.flow import Flow, Step
from normalcy.report import Item
from normalcy.sites import biases, folding
from normalcy.sites.kinds import (
    FUNCTIONAL,
    PRODUCERS,
    argument,
    channels_of,
    functional_uses_own_statistics,
    holder_of,
    kind_of,
    overrides,
    unrecognized,
    values_per_statistic,
)
from normalcy.sites.records import DeadBias, Producer, Site, Sites


def find(model: nn.Module, flow: Flow) -> Sites:
    """Every known norm that ran, what feeds it, and the verdicts on dead biases and on folding.

    A norm called twice, or registered under two names, is one site under its first path. Verdicts on dead
    biases are for the mode that each norm will have in training: where the whole model is in evaluation mode,
    a tracking batch norm counts as using the batch's statistics once it trains; where the model trains and
    the norm does not, it is frozen.

    Args:
        model: the model that was recorded.
        flow: `flow.record(model, ...)` of one pass.

    Returns:
        `Sites`: iterable over `Site`, with `.biases`, `.dead`, `.unrecognized` and `.not_seen`.

    Example:
        >>> import torch
        >>> from normalcy.flow import record
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
        >>> sites = find(model, record(model, lambda: model(torch.randn(8, 4))))
        >>> [(s.where, s.kind, s.values, s.fold.ok, s.dead_bias.ok) for s in sites]
        [('1', 'batch', (8,), True, True)]
    """
    judged = biases.examine(model, flow)
    calls: dict[str, list[Step]] = {}
    counts: dict[tuple[str, str], int] = {}
    paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    for step in flow.steps:
        if not biases.known_norm_step(step):
            continue
        if step.leaf is not None:
            calls.setdefault(paths.get(id(step.leaf), step.module), []).append(step)
            continue
        place = (step.module, step.op)
        counts[place] = counts.get(place, 0) + 1
        again = f" (call {counts[place]})" if counts[place] > 1 else ""
        calls[f"{step.module}: {step.op}{again}".removeprefix(": ")] = [step]
    modules = dict(model.named_modules())
    sites = tuple(_site(model, flow, modules, where, tuple(steps), judged) for where, steps in calls.items())
    return Sites(
        sites,
        tuple(verdict for verdict, _ in judged),
        unrecognized(model, flow),
        _not_seen(model, flow),
        _idle(model, flow),
    )


def _site(
    model: nn.Module,
    flow: Flow,
    modules: dict[str, nn.Module],
    where: str,
    steps: tuple[Step, ...],
    judged: list[tuple[DeadBias, frozenset[int]]],
) -> Site:
    module, first = steps[0].leaf, steps[0]
    kind = (kind_of(module) if module is not None else None) or FUNCTIONAL[first.op]
    producer = _producer(first, modules)
    return Site(
        where=where,
        module=module,
        kind=kind,
        cls=type(module).__name__ if module is not None else first.op,
        channels=channels_of(module) if module is not None else _functional_channels(kind, first),
        steps=steps,
        values=tuple(values_per_statistic(kind, step, module) for step in steps),
        tracks=_tracks(kind, first),
        holder=holder_of(first),
        producer=producer,
        dead_bias=_dead_bias(steps, producer, judged),
        fold=folding.examine(model, flow, where, module, kind, steps),
    )


def _tracks(kind: str, step: Step) -> bool:
    if step.leaf is not None:
        return getattr(step.leaf, "running_mean", None) is not None
    return kind in ("batch", "instance") and not functional_uses_own_statistics(step)


def _functional_channels(kind: str, step: Step) -> int | None:
    shape = step.inputs[0].shape
    if kind in ("batch", "group", "instance"):
        return shape[1] if len(shape) > 1 else None
    given = argument(step, 1, "normalized_shape")
    size = 1
    for extent in given if isinstance(given, (tuple, list)) else ():
        size *= int(extent)
    return size


def _producer(step: Step, modules: dict[str, nn.Module]) -> Producer:
    value = step.inputs[0]
    if value.origin != "step" or value.step is None:
        said = {
            "input": "it is the model's input",
            "parameter": "it is a parameter",
            "buffer": "it is a buffer",
        }
        return Producer(None, None, None, said.get(value.origin, "no recorded operation computed it"))
    made = value.step
    module = made.leaf or modules.get(made.module)
    own = made.leaf is not None or (made.op in PRODUCERS and isinstance(module, PRODUCERS[made.op]))
    return Producer(made.module, made.op, module if own else None)


def _dead_bias(
    steps: tuple[Step, ...], producer: Producer, judged: list[tuple[DeadBias, frozenset[int]]]
) -> DeadBias | None:
    """The verdict on the layer right before the norm, otherwise on one farther away that reaches it."""
    indices = {step.index for step in steps}
    reaching = [verdict for verdict, reached in judged if reached & indices]
    direct = [verdict for verdict in reaching if verdict.module is producer.module]
    return next(iter(direct or reaching), None)


def _not_seen(model: nn.Module, flow: Flow) -> tuple[Item, ...]:
    """Known norms that never ran, and everything the recorder itself could not look into."""
    listed = list(flow.not_seen)
    places = {item.where for item in listed}
    ran = {id(step.leaf) for step in flow.steps if step.leaf is not None}
    for path, module in model.named_modules():
        if kind_of(module) and not overrides(module) and id(module) not in ran and path not in places:
            listed.append(Item(path, f"{type(module).__name__} was never called in the recorded pass"))
    return tuple(listed)


def _idle(model: nn.Module, flow: Flow) -> frozenset[str]:
    """Norms that were not called, in no thread and inside nothing else, and that lent no tensor either."""
    return frozenset(
        path
        for path, module in model.named_modules()
        if kind_of(module) is not None
        and not flow.calls(path)
        and not any(flow.uses(tensor) for tensor in (*module.parameters(), *module.buffers()))
    )
