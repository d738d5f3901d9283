"""Which Value a tensor is at this moment, and whether somebody has written to its memory since.

A tensor is known by a weak reference that is checked by identity (a bare `id` is reused by the next
temporary), by its version (edits through views raise it) and by the writes seen on its storage (edits through
`.data` raise no version). Where one of these does not fit, the Value is "unknown". Not for use outside a
recording.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from normalcy.flow.records import Held, Step, Value


@dataclass(slots=True)
class _Entry:
    tensor: weakref.ref[Tensor]
    version: int | None
    storage: int | None
    stamp: int
    value: Value

    def is_of(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor


class Ledger:
    """The current Value of every tensor met. To be called with the interception of functions switched off."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._entries: dict[int, _Entry] = {}
        self._written: dict[int, int] = {}
        self._escaped: set[int] = set()
        # The weak reference keeps a storage's number from being given to another one meanwhile.
        self._storages: dict[int, tuple[StorageWeakRef, list[Value]]] = {}
        self._aliased: list[Value] = []
        self._clock = 0
        self._count = 0

    def __call__(self, tensor: Tensor) -> Value:
        """The Value of a tensor as it is now; an unknown one stays the same Value until it is edited."""
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.is_of(tensor):
            return entry.value if self._unchanged(entry, tensor) else self._enter(tensor, "unknown")
        known = self._held.find(tensor)
        storage = _storage(tensor)
        if known is None and storage in self._storages:
            self._aliased += [
                value for value in self._storages[storage][1] if value.origin in {"step", "input"}
            ]
        if known is None or _version(tensor) is None or storage in self._written:
            return self._enter(tensor, "unknown")
        return self._enter(tensor, known[1], name=known[0])

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor has been met, or is held by the model."""
        entry = self._entries.get(id(tensor))
        return (entry is not None and entry.is_of(tensor)) or self._held.find(tensor) is not None

    def was_edited(self, tensor: Tensor) -> bool:
        """Whether a tensor that has been met was written to since its Value was made."""
        entry = self._entries.get(id(tensor))
        return entry is not None and entry.is_of(tensor) and not self._unchanged(entry, tensor, strict=False)

    def made(self, tensor: Tensor, step: Step | None, origin: str = "step") -> Value:
        """Note that `step` has just made this tensor."""
        if _version(tensor) is None:  # made in inference mode: edits would not be seen
            return self._enter(tensor, "unknown")
        return self._enter(tensor, origin, step=step)

    def given(self, tensor: Tensor) -> Value:
        """Note that the model's own forward was given this tensor."""
        if self.knows(tensor):
            value = self(tensor)
            if value.origin != "unknown":
                return value
        return self.made(tensor, None, "input")

    def take_aliased(self) -> tuple[Value, ...]:
        """The Values in whose memory a tensor of unknown origin has appeared, since this was last asked."""
        aliased = tuple(dict.fromkeys(self._aliased))
        self._aliased.clear()
        return aliased

    def write(self, tensor: Tensor) -> None:
        """Note that the tensor's memory was written to."""
        self._clock += 1
        storage = _storage(tensor)
        if storage is not None:
            self._written[storage] = self._clock

    def escape(self, tensor: Tensor) -> None:
        """Note that the tensor's memory may be written to, from now on, where nobody sees it."""
        storage = _storage(tensor)
        if storage is not None:
            self._escaped.add(storage)

    def alive(self) -> list[Value]:
        """The Values of tensors that exist at this moment."""
        return [entry.value for entry in list(self._entries.values()) if entry.tensor() is not None]

    def _unchanged(self, entry: _Entry, tensor: Tensor, *, strict: bool = True) -> bool:
        if strict and entry.storage in self._escaped:
            return entry.value.origin == "unknown"
        if _version(tensor) != entry.version or _storage(tensor) != entry.storage:
            return False
        return entry.storage is None or self._written.get(entry.storage, 0) <= entry.stamp

    def _enter(self, tensor: Tensor, origin: str, step: Step | None = None, name: str | None = None) -> Value:
        self._count += 1
        storage = _storage(tensor)
        if storage in self._escaped:
            origin, step, name = "unknown", None, None
        value = Value(self._count, _shape(tensor), tensor.dtype, origin, step, name)
        if storage is not None:
            if storage not in self._storages:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._storages[storage] = (reference, [])
            self._storages[storage][1].append(value)
        self._entries[id(tensor)] = _Entry(weakref.ref(tensor), _version(tensor), storage, self._clock, value)
        return value


def _version(tensor: Tensor) -> int | None:
    try:
        return None if tensor.is_inference() else tensor._version  # noqa: SLF001  autograd's own name for it
    except RuntimeError:
        return None


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  the only name a storage has
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in tensor.shape)
    except (RuntimeError, TypeError):
        return ()


def storage_of(tensor: Tensor) -> int | None:
    """A number that names the tensor's memory while the tensor lives, or None where it has none."""
    return _storage(tensor)
