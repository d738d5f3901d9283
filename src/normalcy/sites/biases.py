"""Which biases are dead: every way out of the layer leads into a norm that subtracts the bias again.

Not for gradients or data: the verdict is about wiring, for the mode that each norm will have in training.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor, nn

from normalcy.flow import Flow, Step, Value, base_kind
from normalcy.sites.kinds import (
    FUNCTIONAL,
    PRODUCERS,
    argument,
    channel_axis,
    functional_uses_own_statistics,
    is_ours,
    kind_of,
    overrides,
)
from normalcy.sites.records import DeadBias, Removal
from normalcy.sites.shift import Shift, Survives, at, through


def examine(model: nn.Module, flow: Flow) -> list[tuple[DeadBias, frozenset[int]]]:
    """The verdict on every bias that reaches a norm, with the indices of the norm calls it reaches."""
    producers = tuple(cls for classes in PRODUCERS.values() for cls in classes)
    found = []
    for path, module in model.named_modules():
        if isinstance(module, producers) and isinstance(getattr(module, "bias", None), Tensor):
            verdict, reached = _Bias(model, flow, path, module).verdict()
            if reached:
                found.append((verdict, reached))
    return found


def bias_axis(step: Step) -> int:
    """The axis of a producer's output along which its bias lies."""
    ndim = len(step.outputs[0].shape)
    return ndim - 1 if step.op == "linear" else ndim - 1 - int(step.op[-2])


def _walk(
    starts: dict[int, tuple[Step, Shift]], flow: Flow, remove: Callable[[Step, Value, Shift], str | None]
) -> tuple[str, frozenset[int]]:
    """Follow a shift from the steps that add it to where it ends.

    `remove(step, value, shift)` is asked at every norm call: None if that call subtracts the shift, otherwise
    a sentence. Returns the first reason why the shift survives ("" if it nowhere does), and the indices of
    the norm calls that were reached.
    """
    shifts: dict[int, Shift] = {}
    why, reached = "", set[int]()
    for step in flow.steps:
        touched = [v for v in step.inputs if v.id in shifts]
        if step.index in starts:
            if touched:
                why = why or f"{at(step)} receives it again"
            shifts[step.outputs[0].id] = starts[step.index][1]
            if step.outputs[0].origin != "step":
                why = why or f"what happens to the output of {at(step)} cannot be seen"
            continue
        if not touched:
            continue
        if step.leaf is not None or step.op.endswith("_norm"):
            reached.add(step.index)
            sole = touched[0] if len(touched) == 1 and touched[0] is step.inputs[0] else None
            said = (
                f"{at(step)} takes it in a role of its own"
                if sole is None
                else remove(step, sole, shifts[sole.id])
            )
            why = why or said or ""
            continue
        try:
            results = through(step, shifts, flow)
        except Survives as survives:
            why = why or str(survives)
            continue
        moved = [(v, s) for v, s in zip(step.outputs, results, strict=True) if s is not None]
        shifts.update({v.id: s for v, s in moved})
        if any(v.origin != "step" for v, _ in moved):
            why = why or f"what happens to the output of {at(step)} cannot be seen"
    known = chain.from_iterable(step.outputs for step in flow.steps)
    if not why and any(v.id in shifts and flow.is_output(v) for v in known):
        why = "it reaches the model's output"
    return why, frozenset(reached)


class _Bias:
    """One bias, followed through the recorded pass."""

    def __init__(self, model: nn.Module, flow: Flow, path: str, module: nn.Module) -> None:
        self.model, self.flow, self.path, self.module = model, flow, path, module
        self.removed: dict[int, tuple[str, nn.Module | None, bool, Shift]] = {}

    def verdict(self) -> tuple[DeadBias, frozenset[int]]:
        starts, odd = self._starts()
        if not starts:
            return self._survives(odd or "it is not called"), frozenset()
        why, reached = _walk(starts, self.flow, self._remove)
        why = odd or why or self._uneven()
        if why:
            return self._survives(why), reached
        if not self.removed:
            return self._survives("nothing removes it"), reached
        removals = self._removals()
        names = ", ".join(dict.fromkeys(r.where for r in removals))
        done = DeadBias(
            self.path, True, f"{names} subtracts it again with the batch's mean", self.module, removals
        )
        return done, reached

    def _survives(self, why: str) -> DeadBias:
        return DeadBias(self.path, False, why, self.module)

    def _starts(self) -> tuple[dict[int, tuple[Step, Shift]], str]:
        """The steps that add the bias, and why some use of it is not understood."""
        bias = self.module.bias
        assert isinstance(bias, Tensor)  # noqa: S101 - tells the type checker what `examine` has tested
        starts, odd = {}, ""
        for step in self.flow.uses(bias):
            given = argument(step, 2, "bias")
            names = self.flow.names(bias)
            takes = step.op in PRODUCERS and isinstance(given, Value) and given.name in names
            if not takes or sum(v.name in names for v in step.inputs) != 1 or len(step.outputs) != 1:
                odd = odd or f"its values are also used by {step.op} in {step.module or 'the model'}"
                continue
            axis = bias_axis(step)
            starts[step.index] = (step, Shift.along(axis, step.outputs[0].shape[axis]))
        return starts, odd

    def _remove(self, step: Step, value: Value, shift: Shift) -> str | None:
        """None if this norm call subtracts the shift, with what is needed to say so; otherwise why not."""
        module, ndim = step.leaf, len(value.shape)
        name = type(module).__name__ if module is not None else step.op
        where = step.module if module is not None else f"{step.module}: {step.op}".removeprefix(": ")
        kind = base_kind(module) if module is not None else FUNCTIONAL.get(step.op)
        if kind is None or (module is not None and overrides(module)):
            return f"{name} in {where} is not known to subtract it"
        if kind not in ("batch", "instance", "group"):
            return f"{name} in {where} has one mean for all channels, so differences between them stay"
        if module is not None and (why := _given_more(step, value)):
            return f"{name} in {where} {why}"
        if why := self._no_own_mean(step, kind):
            return f"{name} in {where} {why}"
        axis = channel_axis(kind, ndim, module)
        at_norm = shift.on(axis, value.shape[axis]) if axis < ndim else None
        if at_norm is None:
            return f"{name} in {where} has its channels on axis {axis}, the bias lies on axis {shift.axis}"
        tracks = module is not None and getattr(module, "running_mean", None) is not None
        self.removed[step.index] = (where, module, tracks, at_norm)
        return None

    def _no_own_mean(self, step: Step, kind: str) -> str | None:
        module = step.leaf
        if kind == "group":
            groups = (
                module.num_groups if isinstance(module, nn.GroupNorm) else argument(step, 1, "num_groups")
            )
            one_each = groups == step.inputs[0].shape[1]
            return (
                None if one_each else "has more than one channel in a group, so differences between them stay"
            )
        if module is None:
            alone = functional_uses_own_statistics(step)
            return None if alone else "is given stored statistics"
        if getattr(module, "running_mean", None) is None or module.training:
            return None
        if kind == "instance":
            return "uses its stored statistics"
        return (
            "is frozen: it stays in evaluation mode while the model trains" if self.model.training else None
        )

    def _uneven(self) -> str:
        """A tracking norm can take the bias over only if each of its calls receives it alike."""
        for where, module, tracks, shift in self.removed.values():
            if not tracks or module is None:
                continue
            alike = [s for _, m, _, s in self.removed.values() if m is module and _equal(s, shift)]
            calls = sum(step.leaf is module for step in self.flow.steps)
            if len(alike) != calls:
                return f"{where} is called {calls} times and does not receive it alike each time"
        return ""

    def _removals(self) -> tuple[Removal, ...]:
        seen, removals = set[int](), []
        for where, module, tracks, shift in self.removed.values():
            if module is not None and id(module) in seen:
                continue
            seen.add(id(module))
            places = [i for i, source in enumerate(shift.sources.tolist()) if source >= 0]
            sources = tuple(shift.sources[places].tolist())
            factors = tuple(shift.factors[places].tolist())
            removals.append(Removal(where, module, tracks, tuple(places), sources, factors))
        return tuple(removals)


def _given_more(step: Step, value: Value) -> str | None:
    """Why a norm layer that is called with more than its input may not subtract the shift; None if it does.

    A mask or lengths, of this library's layers, change nothing: masked places count nowhere and give 0.
    """
    places = ("input", "mask", "lengths", "more")
    given = {**dict(zip(places, step.args, strict=False)), **step.kwargs}
    given = {name: thing for name, thing in given.items() if thing is not None and name != "input"}
    strange = given.keys() - ({"mask", "lengths"} if step.leaf is not None and is_ours(step.leaf) else set())
    if strange:
        return f"is called with {', '.join(sorted(strange))}"
    known = [value, *(thing for thing in given.values() if isinstance(thing, Value))]
    others = [v for v in step.inputs if all(v is not each for each in known)]
    return (
        "uses other values besides" if any(v.origin not in ("parameter", "buffer") for v in others) else None
    )


def _equal(one: Shift, two: Shift) -> bool:
    return one.sources.equal(two.sources) and one.factors.equal(two.factors)


def known_norm_step(step: Step) -> bool:
    """Whether the step is one call of a norm that is known."""
    if step.leaf is not None:
        return kind_of(step.leaf) is not None
    return step.op in FUNCTIONAL
