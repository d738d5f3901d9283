"""Writes down, in order, each call of a forward pass: functions, modules taken as a whole, and the rest.

Not for use outside a recording; `record` owns the one that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normalcy.flow.ledger import Ledger, storage_of
from normalcy.flow.operations import BLANK, ESCAPES, asks_about, name_of
from normalcy.flow.records import Held, Step, Value
from normalcy.flow.structure import replaced, tensors_in
from normalcy.report import Item

without_interception = torch._C.DisableTorchFunction  # noqa: SLF001  PyTorch has no public name for it


# Their schemas do not say that in training they write to the running statistics, arguments 3 and 4.
_UPDATES_UNDECLARED = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


@dataclass(slots=True)
class _Call:
    """A recorded call while it runs: what it was given, and what it was seen to use besides."""

    name: str
    given: set[int]
    used: list[Value] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Blank:
    """Memory that nobody has filled yet, and every Value that whoever fills it might read."""

    alive: tuple[Value, ...]
    since: int


class Tape:
    """The steps so far, the calls that are running, and the modules they run in."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.ledger = Ledger(held)
        self.steps: list[Step] = []
        self.notes: dict[Item, None] = {}
        self.path = [""]
        self._running: list[_Call] = []
        self._blank: dict[int, _Blank] = {}

    @property
    def inside(self) -> bool:
        """Whether a call that is recorded as a whole is running."""
        return bool(self._running)

    @property
    def inside_of(self) -> str:
        """The name of the innermost call that is running."""
        return self._running[-1].name

    def note(self, where: str, why: str) -> None:
        """Say, once, what this record does not hold."""
        self.notes[Item(where, why)] = None

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function and record it, unless it only asks about a tensor."""
        if self.inside or asks_about(func):
            return func(*args, **kwargs)
        return self.call(name_of(func), func, args, kwargs)

    def call(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaf: nn.Module | None = None,
    ) -> Any:
        """Run a call and record it as one step."""
        with without_interception():
            given = tensors_in(args, kwargs)
            values = self._values(given)
            kept = replaced(args, lambda t: values[id(t)]), replaced(kwargs, lambda t: values[id(t)])
            names = [name for tensor in given for name in self._names(tensor, values[id(tensor)])]
        running = _Call(name, set(values), parameters=names)
        self._running.append(running)
        try:
            result = func(*args, **kwargs)
        finally:
            self._running.pop()
        if not tensors_in(result) and getattr(func, "__name__", "") == "__get__" and name not in ESCAPES:
            return result  # an attribute that holds no tensor
        with without_interception():
            self._finish(running, kept, given, values, result, leaf)
        return result

    def _finish(
        self,
        running: _Call,
        kept: tuple[tuple[Any, ...], dict[str, Any]],
        given: list[Tensor],
        values: dict[int, Value],
        result: Any,
        leaf: nn.Module | None,
    ) -> None:
        """Write down a call that has returned."""
        ledger = self.ledger
        edited = {id(tensor) for tensor in given if ledger.was_edited(tensor)}
        returned = tensors_in(result)
        if result is None:
            returned = list({id(t): t for t in given if id(t) in edited}.values())
        # What a function returns without having been given or having made it (a cache) it has used.
        running.used += [ledger(t) for t in returned if id(t) not in values and ledger.knows(t)]
        inputs = (*(values[id(tensor)] for tensor in given), *running.used)
        names = (self._own_names(leaf) if leaf is not None else []) + running.parameters
        if not (inputs or returned or names):
            return
        in_place = any(id(tensor) in edited for tensor in returned)
        step = self._step(running.name, kept, inputs, names, leaf=leaf, in_place=in_place)
        untouched = values.keys() - edited
        outputs = tuple(self._made(step, tensor, passed=id(tensor) in untouched) for tensor in returned)
        object.__setattr__(step, "outputs", outputs)
        if step.op in ESCAPES:
            for tensor in given:
                ledger.escape(tensor)

    def _values(self, given: list[Tensor]) -> dict[int, Value]:
        values = {id(tensor): self.ledger(tensor) for tensor in given}
        aliased = self.ledger.take_aliased()
        if aliased:
            self._step("unseen", (aliased, {}), aliased, ())
            self.note(
                self.path[-1],
                "a tensor came from nowhere and shares the memory of others: those count as used",
            )
        return values

    def _names(self, tensor: Tensor, value: Value) -> tuple[str, ...]:
        """The parameter or buffer it is; for a tensor of unknown origin, those in whose memory it lies."""
        known = self.held.find(tensor)
        if known:
            return (known[0],)
        return self.held.overlapping(tensor) if value.origin == "unknown" else ()

    def _made(self, step: Step, tensor: Tensor, *, passed: bool) -> Value:
        if passed and self.held.find(tensor):
            return self.ledger(tensor)  # a parameter handed through untouched is still that parameter
        if step.op in BLANK:
            return self.ledger.made(tensor, None, "unknown")
        return self.ledger.made(tensor, step)

    def _own_names(self, leaf: nn.Module) -> list[str]:
        own = [*leaf.parameters(), *leaf.buffers()]
        return [known[0] for known in map(self.held.find, own) if known]

    def _step(
        self,
        name: str,
        kept: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: tuple[Value, ...],
        names: Iterable[str],
        *,
        leaf: nn.Module | None = None,
        in_place: bool = False,
    ) -> Step:
        unique = tuple(dict.fromkeys(names))
        step = Step(len(self.steps), name, self.path[-1], leaf, *kept, inputs, (), unique, in_place)
        self.steps.append(step)
        return step

    # What follows is the safety net: it sees every operator that runs, whoever called it.

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and check that a recorded call explains it."""
        given = tensors_in(args, kwargs)
        self._read(func, args, kwargs)
        if self.inside:
            for tensor in given:
                self._use(self._running[-1], tensor)
            result = func(*args, **kwargs)
        else:
            result = self._unexplained(func, args, kwargs, given)
        self._wrote(func, args, kwargs, result)
        return result

    def _use(self, running: _Call, tensor: Tensor) -> None:
        if id(tensor) in running.given or not self.ledger.knows(tensor):
            return
        value = self.ledger(tensor)
        known = self.held.find(tensor)
        if known:
            running.parameters.append(known[0])
        elif value.id not in running.touched:
            running.touched.add(value.id)
            running.used.append(value)

    def _unexplained(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        known = [tensor for tensor in given if self.ledger.knows(tensor)]
        if known:
            values = self._values(given)
            kept = replaced(args, lambda t: values[id(t)]), replaced(kwargs, lambda t: values[id(t)])
            names = [name for tensor in given for name in self._names(tensor, values[id(tensor)])]
            self._step("unseen", kept, tuple(values[id(tensor)] for tensor in given), names)
            self.note(
                self.path[-1],
                f"{func} ran outside every call that can be intercepted (compiled code, interception off): "
                "what it takes is recorded, what it makes is unknown",
            )
        self._running.append(_Call(str(func), set(map(id, given))))
        try:
            return func(*args, **kwargs)
        finally:
            self._running.pop()

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._blank:
            return
        for tensor, writes, aliases in _arguments(func, args, kwargs):
            blank = None if writes or aliases else self._blank.pop(storage_of(tensor) or 0, None)
            if blank is None:
                continue
            suspects = dict.fromkeys(
                (*blank.alive, *(v for step in self.steps[blank.since :] for v in step.outputs))
            )
            inputs = tuple(value for value in suspects if value.origin in {"step", "input"})
            self._step("unseen", (inputs, {}), inputs, ())
            self.note(
                self.path[-1],
                "memory that nothing recorded has filled was read: code outside PyTorch filled it, and may "
                "have read any tensor that existed then, so each of those counts as used",
            )

    def _wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        aliased = set()
        for tensor, writes, aliases in _arguments(func, args, kwargs):
            if writes:
                self.ledger.write(tensor)
                self._blank.pop(storage_of(tensor) or 0, None)
            elif aliases:
                aliased.add(storage_of(tensor))
        if name_of(func) in _UPDATES_UNDECLARED and args[5]:
            for tensor in tensors_in(args[3:5]):
                self.ledger.write(tensor)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is None or storage in aliased:
                continue
            if name_of(func) in BLANK and tensor.numel():
                self._blank[storage] = _Blank(tuple(self.ledger.alive()), len(self.steps))
            else:
                self._blank.pop(storage, None)


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[tuple[Tensor, bool, bool]]:
    """(tensor, whether it is written to, whether the result may share its memory), as the schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return
    for position, argument in enumerate(schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        for tensor in tensors_in(given):
            yield tensor, alias is not None and alias.is_write, alias is not None
