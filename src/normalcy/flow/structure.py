"""Finds and replaces the tensors in the arguments and results of a call, however they are nested.

Not for walking modules: those have `named_modules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type,
    ModuleType,
    FunctionType,
    nn.Module,
    torch.dtype,
    torch.Size,
)


def tensors_in(*things: object) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and slices, in order; one that comes twice is listed twice.

    >>> [t.item() for t in tensors_in((torch.tensor(1), {"a": [torch.tensor(2)]}), 3)]
    [1, 2]
    """
    found: list[Tensor] = []
    for thing in things:
        _collect(thing, found)
    return found


def _collect(thing: object, found: list[Tensor]) -> None:
    if isinstance(thing, Tensor):
        found.append(thing)
    elif isinstance(thing, tuple | list | set | frozenset):
        for part in thing:
            _collect(part, found)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            _collect(part, found)
    elif isinstance(thing, slice):
        for part in (thing.start, thing.stop, thing.step):
            _collect(part, found)


def deep_tensors_in(thing: object) -> list[Tensor]:
    """The same, looking also into dataclasses and the attributes of any object (a model's result).

    >>> from types import SimpleNamespace
    >>> len(deep_tensors_in(SimpleNamespace(logits=torch.ones(2), cache=[torch.ones(1)])))
    2
    """
    found: list[Tensor] = []
    seen: dict[int, object] = {}  # held, so that an `id` is not given to the next temporary
    stack = [iter((thing,))]
    while stack:
        part = next(stack[-1], stack)
        if part is stack:
            stack.pop()
        elif isinstance(part, Tensor):
            found.append(part)
        elif part is not None and not isinstance(part, _OPAQUE) and id(part) not in seen:
            seen[id(part)] = part
            stack.append(_parts(part))
    return found


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from list(thing.values())
    elif isinstance(thing, tuple | list | set | frozenset):
        yield from list(thing)
    if dataclasses.is_dataclass(thing):
        yield from (getattr(thing, field.name, None) for field in dataclasses.fields(thing))
        return
    yield from list(getattr(thing, "__dict__", {}).values())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (getattr(thing, name, None) for name in names)


def replaced(thing: Any, by: Callable[[Tensor], Any]) -> Any:
    """`thing` with every tensor in nested tuples, lists, dicts and slices replaced by `by(tensor)`.

    >>> replaced({"a": (torch.ones(2), 3)}, lambda t: tuple(t.shape))
    {'a': ((2,), 3)}
    """
    if isinstance(thing, Tensor):
        return by(thing)
    if isinstance(thing, list):
        return [replaced(part, by) for part in thing]
    if isinstance(thing, tuple):
        parts = [replaced(part, by) for part in thing]
        if all(new is old for new, old in zip(parts, thing, strict=True)):
            return thing
        return tuple(parts)
    if isinstance(thing, Mapping):
        return {key: replaced(part, by) for key, part in thing.items()}
    if isinstance(thing, slice):
        return slice(*(replaced(part, by) for part in (thing.start, thing.stop, thing.step)))
    if isinstance(thing, set | frozenset):
        return tuple(replaced(part, by) for part in thing)
    return thing
