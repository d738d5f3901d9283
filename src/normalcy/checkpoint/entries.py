"""What a checkpoint file holds, as names with shapes, before any value is read.

Not for deciding what a name means, and nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

_DEEPEST = 8
_WRAPPERS = ("module.", "_orig_mod.")
_COUNTERS = ("n_averaged",)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of a checkpoint; its values are read when `read()` is called.

    Attributes:
        shape: its extents.
        dtype: as the file names it.
        floating: whether it holds real floating-point numbers, of any width.
        held: whether the file has its values; a tensor on the meta device has none.
        read: gives the tensor, on the CPU.
        memory: equal for tensors that share their values, as tied weights do; None where that is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    floating: bool
    held: bool
    read: Callable[[], Tensor]
    memory: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one checkpoint by their names.

    Attributes:
        entries: by name; the names of nested mappings are joined with dots.
        form: "safetensors" or "torch".
        notes: what was left out or looked through to get at them, in sentences.
    """

    entries: Mapping[str, Entry]
    form: str
    notes: tuple[str, ...] = field(default=())


def of_object(made: Any) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """The tensors in what `torch.load` gave, by name, and notes on what was left out.

    Mappings may be nested ("state_dict", "model", "ema", …). What one mapping alone holds is named without
    that mapping's own name, and prefixes that a wrapper put before every name ("module.", "_orig_mod.")
    are taken off. Optimizers' states are left out.

    Example:
        >>> import torch
        >>> entries, notes = of_object({"epoch": 3, "model": {"module.bn.weight": torch.rand(4)}})
        >>> list(entries), notes
        (['bn.weight'], ("The weights lie under 'model'.", "The prefix 'module.' was left out of the names."))
    """
    if isinstance(made, Tensor) or not isinstance(made, Mapping):
        return {}, ()
    left_out: list[str] = []
    groups = {inside: tensors for inside, tensors in _groups(made, (), left_out, set()) if tensors}
    wide = [  # a loss or the state of a generator beside the weights is no second set of them
        inside
        for inside, tensors in groups.items()
        if any(tensor.dim() and tensor.is_floating_point() for tensor in tensors.values())
    ]
    notes: list[str] = []
    if len(wide) == 1 and wide[0]:
        groups = {(): groups[wide[0]]}
        notes.append(f"The weights lie under {'.'.join(wide[0])!r}.")
    entries: dict[str, Entry] = {}
    taken: list[str] = []
    for inside, tensors in groups.items():
        prefix = prefix_of(tensors)
        if prefix and prefix not in taken:
            taken.append(prefix)
        for name, tensor in tensors.items():
            entries[".".join((*inside, name.removeprefix(prefix)))] = _entry(tensor)
    notes += [note for prefix in taken for note in said_of(prefix)]
    if left_out:
        notes.append(f"Not looked at: {', '.join(left_out)} (the state of an optimizer).")
    return entries, tuple(notes)


def _groups(
    made: Mapping[Any, Any], inside: tuple[str, ...], left_out: list[str], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Every mapping with the tensors that lie directly in it, the outer ones first."""
    yield inside, {key: v for key, v in made.items() if isinstance(key, str) and isinstance(v, Tensor)}
    if len(inside) == _DEEPEST:
        return
    seen.add(id(made))
    for key, value in made.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        if not isinstance(key, str) or not any(isinstance(part, Mapping) for part in parts):
            continue
        if any(_of_an_optimizer(key, part) for part in parts):
            left_out.append(".".join((*inside, key)))
            continue
        for number, part in enumerate(parts):
            if isinstance(part, Mapping) and id(part) not in seen:
                place = (key,) if part is value else (key, str(number))
                yield from _groups(part, (*inside, *place), left_out, seen)


def _of_an_optimizer(key: str, value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return "optim" in key.lower() or {"state", "param_groups"} <= value.keys()


def prefix_of(names: Iterable[str]) -> str:
    """What wrappers put before every name ("module.", "_orig_mod."), or ""."""
    rest, prefix = [name for name in names if name not in _COUNTERS], ""
    while found := next((w for w in _WRAPPERS if rest and all(name.startswith(w) for name in rest)), ""):
        prefix += found
        rest = [name.removeprefix(found) for name in rest]
    return prefix


def said_of(prefix: str) -> tuple[str, ...]:
    """The note on a prefix that was taken off."""
    return (f"The prefix {prefix!r} was left out of the names.",) if prefix else ()


def _entry(tensor: Tensor) -> Entry:
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    memory = None
    if dense and not tensor.is_meta and tensor.numel():
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), *tensor.shape)
    return Entry(
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        dense and tensor.is_floating_point(),
        not tensor.is_meta,
        tensor.detach,
        memory,
    )
