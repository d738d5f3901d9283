"""What one recorded forward pass says: its values, its steps and the questions that can be asked of them.

Plain data: nothing here records, and no tensor is kept alive. `record` makes these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normalcy.errors import ArgumentError
from normalcy.flow.operations import READS
from normalcy.report import Item


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One tensor as it was at one moment; an in-place edit makes a new Value.

    Attributes:
        id: a number of its own in this recording.
        shape: its shape; () where the tensor would not say.
        dtype: its dtype.
        origin: "step" (made by `step`), "input" (given to the model), "parameter" or "buffer" (held by the
            model under `name`, unchanged since the recording began), or "unknown".
        step: the step that made it.
        name: the first name under which the model holds it.
    """

    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    step: Step | None = None
    name: str | None = None

    def __repr__(self) -> str:
        made = f"step {self.step.index} {self.step.op}" if self.step else self.name or self.origin
        return f"Value({self.id}, {list(self.shape)}, {made})"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of a torch function, or of a module that is recorded as a whole.

    Attributes:
        index: its place in the order of calls.
        op: canonical name ("conv2d", "add", "view" …); "module" for a module recorded as a whole;
            "unseen" for what took tensors without being a call that can be intercepted.
        module: path of the innermost module that was running; of a module recorded as a whole, its own.
        leaf: that module, where `op` is "module".
        args: positional arguments as given, every tensor replaced by its Value.
        kwargs: keyword arguments, likewise.
        inputs: the Values among the arguments, in order; then those it used without being given them.
        outputs: the Values among the results, in order (of an edit that returns nothing, what was edited).
        parameters: canonical names of the parameters and buffers it used directly.
        in_place: whether a result is an argument that was overwritten.
    """

    index: int
    op: str
    module: str
    leaf: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...]
    in_place: bool

    def __repr__(self) -> str:
        takes, makes = (", ".join(str(value.id) for value in part) for part in (self.inputs, self.outputs))
        return f"Step({self.index} {self.op} in {self.module or 'the root'!r}: {takes} -> {makes})"


class Held:
    """The parameters and buffers of a model: every name of each, and which share memory. Keeps none alive."""

    def __init__(self, model: nn.Module) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], list[str], str]] = {}
        self._spans: dict[int, list[tuple[int, int, str]]] = {}
        named: list[tuple[str, Tensor, str]]
        named = [
            (name, tensor, "parameter") for name, tensor in model.named_parameters(remove_duplicate=False)
        ]
        named += [(name, tensor, "buffer") for name, tensor in model.named_buffers(remove_duplicate=False)]
        self._shares: dict[str, set[str]] = {}
        for name, tensor, kind in named:
            if id(tensor) in self._by_id:
                self._by_id[id(tensor)][1].append(name)
                continue
            self._by_id[id(tensor)] = (weakref.ref(tensor), [name], kind)
            self._shares[name] = {name}
            memory = _memory(tensor)
            if memory is not None:
                for other in self.overlapping(tensor):
                    self._shares[name].add(other)
                    self._shares[other].add(name)
                self._spans.setdefault(memory[0], []).append((*memory[1:], name))

    def find(self, tensor: Tensor) -> tuple[str, str] | None:
        """(canonical name, "parameter" or "buffer"), by identity."""
        entry = self._by_id.get(id(tensor))
        return (entry[1][0], entry[2]) if entry is not None and entry[0]() is tensor else None

    def names(self, tensor: Tensor) -> tuple[str, ...]:
        """Every name of the tensor and of those that share memory with it."""
        shared = self.shared(tensor)
        own = self._by_id[id(tensor)][1] if shared else []
        others = (names for _, names, _ in self._by_id.values() if names[0] in shared and names is not own)
        return (*own, *(name for names in others for name in names))

    def overlapping(self, tensor: Tensor) -> tuple[str, ...]:
        """The canonical names of those in whose memory the tensor lies, in part or whole."""
        memory = _memory(tensor)
        if memory is None:
            return ()
        key, start, stop = memory
        return tuple(name for first, last, name in self._spans.get(key, ()) if start < last and first < stop)

    def shared(self, tensor: Tensor) -> frozenset[str]:
        """The canonical names of the tensor and of those that share memory with it."""
        known = self.find(tensor)
        return frozenset(self._shares[known[0]]) if known else frozenset()


def _memory(tensor: Tensor) -> tuple[int, int, int] | None:
    """(storage, first byte, byte after the last), or None where there is no memory to compare."""
    try:
        key = tensor.untyped_storage()._cdata  # noqa: SLF001  the only name a storage has
        start = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = tensor.numel()
    except (RuntimeError, ValueError, NotImplementedError, TypeError):
        return None
    return None if size == 0 else (key, int(start), int(start + (last + 1) * tensor.element_size()))


class Flow:
    """One recorded forward pass: who feeds whom, who is called how often, with which values.

    Attributes:
        steps: every call, in order.
        inputs: the tensors that the model's own forward received, nested ones too.
        outputs: the tensors in what it (and the recorded call) returned, nested ones too.
        not_seen: places whose wiring this record does not hold, each with a sentence.

    Example:
        >>> from normalcy.flow import record
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
        >>> flow = record(model, lambda: model(torch.tensor([[1.0, 2.0, 3.0]])))
        >>> made = flow.steps_of("0")[0].outputs[0]
        >>> [step.module for step in flow.consumers(made)], flow.is_output(made), flow.calls("1")
        (['1'], False, 1)
        >>> [step.op for step in flow.uses(model[1].running_mean)], flow.names(model[0].bias)
        (['module'], ('0.bias',))
    """

    def __init__(
        self,
        *,
        steps: Sequence[Step],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        not_seen: Sequence[Item],
        escaped: Iterable[Value],
        paths: Mapping[str, str],
        calls: Mapping[str, int],
        held: Held,
    ) -> None:
        self.steps = tuple(steps)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.not_seen = tuple(not_seen)
        self._leaving = {value.id for value in (*outputs, *escaped)}
        self._paths, self._calls, self._held = dict(paths), dict(calls), held
        self._consumers: dict[int, list[Step]] = {}
        self._by_module: dict[str, list[Step]] = {}
        for step in self.steps:
            self._by_module.setdefault(step.module, []).append(step)
            for number in {value.id for value in step.inputs}:
                self._consumers.setdefault(number, []).append(step)

    def consumers(self, value: Value) -> tuple[Step, ...]:
        """The steps that take `value`, in order; each once."""
        return tuple(self._consumers.get(value.id, ()))

    def is_output(self, value: Value) -> bool:
        """Whether `value` leaves the pass: returned, or still held after it (by an attribute, say)."""
        return value.id in self._leaving

    def steps_of(self, module_path: str) -> tuple[Step, ...]:
        """The steps whose innermost module is the one at this path (any of its paths)."""
        return tuple(self._by_module.get(self._canonical(module_path), ()))

    def calls(self, module_path: str) -> int:
        """How often the module at this path was called, under any of its paths."""
        return self._calls.get(self._canonical(module_path), 0)

    def uses(self, parameter: Tensor) -> tuple[Step, ...]:
        """Every step that takes this parameter or buffer of the model, or one that shares memory with it."""
        names = self._held.shared(parameter)
        return tuple(step for step in self.steps if not names.isdisjoint(step.parameters))

    def names(self, parameter: Tensor) -> tuple[str, ...]:
        """Every name of this tensor in the model, and of those that share memory with it."""
        return self._held.names(parameter)

    def reads(self) -> tuple[Step, ...]:
        """The steps that hand values to Python which depend on the model's input.

        `bool`, `item`, `tolist` and their kin: the forward code may take another branch on other data. A
        value of unknown origin counts as one that depends on the input; one that is made of parameters,
        buffers and random numbers alone does not.

        Example:
            >>> from normalcy.flow import record
            >>> class Gate(nn.Module):
            ...     def forward(self, x):
            ...         return x if x.mean() > 0 else -x
            >>> model = Gate()
            >>> [step.op for step in record(model, lambda: model(torch.tensor([[1.0, 2.0]]))).reads()]
            ['bool']
        """
        depends = {value.id for value in self.inputs}
        found = []
        for step in self.steps:
            if not any(v.id in depends or v.origin == "unknown" for v in step.inputs):
                continue
            depends.update(value.id for value in step.outputs)
            if step.op in READS:
                found.append(step)
        return tuple(found)

    def _canonical(self, path: str) -> str:
        if path not in self._paths:
            raise ArgumentError(
                f"{path!r} is no module of the recorded model",
                "a path as in named_modules()",
                "check the spelling",
            )
        return self._paths[path]

    def __repr__(self) -> str:
        return (
            f"Flow({len(self.steps)} steps, {len(self.inputs)} inputs, {len(self.outputs)} outputs, "
            f"{len(self.not_seen)} not seen)"
        )
