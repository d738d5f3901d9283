"""How a constant added along one axis of a value travels through the operations that follow it.

Not for anything but a shift: what scales it by other than a number, rotates it or is no linear map ends the
journey, and so does whatever is not known for certain. Layout operations are not re-derived but executed, on
a tensor that holds at each place which entry of the shift it carries; what comes out is a shift again only if
it still lies along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normalcy.flow import Flow, Step, Value
from normalcy.sites.kinds import argument

_ALIASES = frozenset({
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze",
    "permute", "transpose", "movedim", "moveaxis", "t", "T", "mT", "expand", "expand_as", "contiguous",
    "chunk", "split", "tensor_split", "narrow", "select", "unbind", "getitem", "detach", "alias",
})  # fmt: skip
_COPIES = frozenset({"clone", "repeat", "flip", "roll", "cat", "stack", "channel_shuffle", "pixel_shuffle"})
# Here the others lend their shape or their place, not their values.
_JOINS = frozenset({"cat", "stack", "view_as", "reshape_as", "expand_as"})
_CASTS = frozenset(
    ["to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "identity", "positive"]
)
_MAX_POOLS = frozenset(f"{a}max_pool{d}d" for a in ("", "adaptive_") for d in (1, 2, 3))
_AVG_POOLS = frozenset(f"{a}avg_pool{d}d" for a in ("", "adaptive_") for d in (1, 2, 3))
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin"})
_SCALES = frozenset({"mul", "div", "neg", "rsub"})
_BLIND = frozenset(f"{a}_like" for a in ("zeros", "ones", "empty", "full", "rand", "randn"))  # shape only
_PARTITIONS = frozenset({"nearest", "nearest-exact", "area", "linear", "bilinear", "trilinear", "bicubic"})


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """Place i along `axis` carries factors[i] · shift[sources[i]], and nothing where sources[i] is −1."""

    axis: int
    sources: Tensor
    factors: Tensor

    @classmethod
    def along(cls, axis: int, size: int) -> Shift:
        """Entry i of the shift at place i of the axis."""
        return cls(axis, torch.arange(size), torch.ones(size, dtype=torch.float64))

    def on(self, axis: int, size: int) -> Shift | None:
        """The same shift told along another axis; None unless it is the same everywhere."""
        if axis == self.axis and len(self.sources) == size:
            return self
        if len(self.sources) and bool(
            (self.sources == self.sources[0]).all() & (self.factors == self.factors[0]).all()
        ):
            return Shift(axis, self.sources[:1].expand(size), self.factors[:1].expand(size))
        return None

    def picked(self, axis: int, places: Tensor) -> Shift:
        """The shift after a layout operation; `places` holds the old place + 1, or 0 for none."""
        there = places > 0
        old = (places - 1).clamp(min=0)
        return Shift(axis, torch.where(there, self.sources[old], -1), self.factors[old] * there)

    @property
    def empty(self) -> bool:
        """Whether no place carries anything."""
        return not bool(((self.sources >= 0) & (self.factors != 0)).any())


class Survives(Exception):  # noqa: N818 - not an error: the walk's way to say that the shift is still there
    """The shift is still there behind this step, or nothing is known of it; the text says why."""


def through(step: Step, shifts: dict[int, Shift], flow: Flow) -> list[Shift | None]:
    """The shift of each output of `step`, given those of its inputs by value id.

    Raises:
        Survives: the step is no shift-equivariant one.
    """
    op = step.op
    if "out" in step.kwargs:
        raise Survives(f"{at(step)} writes into a given tensor")
    if step.in_place:
        _refuse_edit_of_views(step, flow)
    nothing: list[Shift | None] = [None] * len(step.outputs)
    if op in _BLIND:
        return nothing
    if op in ("add", "sub"):
        return [_added(step, shifts)]
    if op in _ALIASES or op in _COPIES or op == "pad":
        return _moved(step, shifts)
    shift = _first(step, shifts)
    if op in _CASTS and _same(step):
        return [shift]
    if op in _SCALES:
        return [_scaled(step, shift)]
    if op in _REDUCTIONS:
        return [_reduced(step, shift)]
    if op in _MAX_POOLS or (op in _AVG_POOLS and _counts_no_padding(step)) or _interpolates(step):
        _refuse_pooled_axis(step, shift)
        return [shift, *nothing[1:]]
    raise Survives(f"{at(step)} does not pass a shift on unchanged")


def at(step: Step) -> str:
    """How a step is named in a sentence."""
    op = type(step.leaf).__name__ if step.leaf is not None else step.op
    return f"{op} in {step.module}" if step.module else op


def _first(step: Step, shifts: dict[int, Shift]) -> Shift:
    """The shift of the first argument, which has to be the only shifted one."""
    first = step.args[0] if step.args else step.kwargs.get("input")
    others = [v for v in step.inputs if v is not first and v.id in shifts]
    if not isinstance(first, Value) or first.id not in shifts or others:
        raise Survives(f"{at(step)} takes it in a role of its own")
    return shifts[first.id]


def _same(step: Step) -> bool:
    return len(step.outputs) == 1 and (step.outputs[0].dtype, step.outputs[0].shape) == (
        step.inputs[0].dtype,
        step.inputs[0].shape,
    )


def _refuse_edit_of_views(step: Step, flow: Flow) -> None:
    target = step.args[0] if step.args else None
    if not isinstance(target, Value):
        raise Survives(f"{at(step)} edits a tensor in place")
    around = [s.op for s in flow.consumers(target) if s is not step]
    if target.step is not None:
        around.append(target.step.op)
    if target.origin != "step" or any(op in _ALIASES or op in _CASTS for op in around):
        raise Survives(f"{at(step)} edits in place what other tensors share memory with")


def _grid(value: Value, shift: Shift | None, start: int = 1) -> Tensor:
    """At each place the number of the entry it carries, counted from `start`; 0 where it carries none."""
    if shift is None:
        return torch.zeros((), dtype=torch.int32).expand(value.shape)
    line = torch.arange(start, start + len(shift.sources), dtype=torch.int32)
    return line.reshape([-1 if d == shift.axis else 1 for d in range(len(value.shape))]).expand(value.shape)


def _line(grid: Tensor) -> tuple[int, Tensor] | None:
    """(axis, the values along it) of a grid that depends on one axis alone."""
    for axis in range(grid.ndim) if grid.numel() else ():
        line = grid[tuple(slice(None) if d == axis else 0 for d in range(grid.ndim))]
        if torch.equal(
            grid, line.reshape([-1 if d == axis else 1 for d in range(grid.ndim)]).expand_as(grid)
        ):
            return axis, line.long()
    return None


def _moved(step: Step, shifts: dict[int, Shift]) -> list[Shift | None]:
    """Execute a layout operation on grids instead of values."""
    carried = {v.id: shifts[v.id] for v in step.inputs if v.id in shifts}
    whole = Shift(
        0,
        torch.cat([shift.sources for shift in carried.values()]),
        torch.cat([shift.factors for shift in carried.values()]),
    )
    starts = dict(
        zip(carried, accumulate((len(s.sources) for s in carried.values()), initial=1), strict=False)
    )

    def filled(argument: object) -> object:
        if isinstance(argument, Value):
            if argument.id not in carried and step.op not in _JOINS:
                raise Survives(f"{at(step)} is steered by other values")  # an index, for example
            return _grid(argument, carried.get(argument.id), starts.get(argument.id, 1))
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(filled, argument)) if type(argument) in (list, tuple) else argument
        return argument

    args, kwargs = [filled(a) for a in step.args], {k: filled(a) for k, a in step.kwargs.items()}
    try:
        result = _function(step.op)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise Survives(f"{at(step)} could not be followed") from error
    grids: list[Any] = list(result) if isinstance(result, (list, tuple)) else [result]
    if [tuple(g.shape) for g in grids] != [tuple(v.shape) for v in step.outputs]:
        raise Survives(f"{at(step)} could not be followed")
    out: list[Shift | None] = []
    for grid in grids:
        if (found := _line(grid)) is None:
            raise Survives(f"{at(step)} spreads it over more than one axis")
        moved = whole.picked(*found)
        out.append(None if moved.empty else moved)
    return out


def _function(op: str) -> Callable[..., object]:
    if op == "pad":
        return _padded
    if op in ("channel_shuffle", "pixel_shuffle"):
        return getattr(functional, op)  # type: ignore[no-any-return]
    op = {"getitem": "__getitem__"}.get(op, op)
    method = getattr(torch.Tensor, op, None) or getattr(torch, op)
    return method if callable(method) else lambda x: getattr(x, op)


def _padded(grid: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Padding a grid: a constant carries nothing, whatever its value."""
    del value
    return functional.pad(grid.double(), pad, mode).int()


def _scaled(step: Step, shift: Shift) -> Shift:
    """Times a number, divided by one, negated, or subtracted from anything that is not shifted."""
    factor = -1.0
    if step.op in ("mul", "div"):
        number = _number(argument(step, 1, "other"))
        if number is None or not math.isfinite(number) or not number:
            raise Survives(f"{at(step)} does not pass a shift on unchanged")
        factor = number if step.op == "mul" else 1 / number
    if step.kwargs.keys() - {"input", "other"} or len(step.args) > 2 or not _same(step):
        raise Survives(f"{at(step)} does more than scale it")
    return Shift(shift.axis, shift.sources, shift.factors * factor)


def _number(thing: object) -> float | None:
    return float(thing) if isinstance(thing, (int, float)) else None


def _added(step: Step, shifts: dict[int, Shift]) -> Shift | None:
    """The sum's shift: it survives whatever is added, and adds up where both sides carry it."""
    alpha = _number(step.kwargs.get("alpha", 1))
    if alpha is None or len(step.args) != 2 or len(step.outputs) != 1:
        raise Survives(f"{at(step)} scales it")
    out, total = step.outputs[0], None
    for sign, operand in zip((1, -alpha if step.op == "sub" else alpha), step.args, strict=True):
        if not isinstance(operand, Value) or operand.id not in shifts:
            continue
        if operand.dtype != out.dtype:
            raise Survives(f"{at(step)} changes its dtype")
        shift = shifts[operand.id]
        axis = len(out.shape) - len(operand.shape) + shift.axis
        spread = Shift(axis, shift.sources, shift.factors * sign).on(axis, out.shape[axis])
        if spread is None:
            raise Survives(f"{at(step)} spreads it")
        total = spread if total is None else _sum(total, spread, step)
    return None if total is None or total.empty else total


def _sum(one: Shift, two: Shift, step: Step) -> Shift:
    other = two.on(one.axis, len(one.sources))
    if other is None:
        raise Survives(f"{at(step)} adds it along two axes")
    both = (one.sources >= 0) & (other.sources >= 0)
    if bool((both & (one.sources != other.sources)).any()):
        raise Survives(f"{at(step)} adds different parts of it")
    return Shift(one.axis, torch.maximum(one.sources, other.sources), one.factors + other.factors)


def _reduced(step: Step, shift: Shift) -> Shift:
    """A mean, a sum, or an extreme, over axes along which the shift is constant."""
    grid = _grid(step.inputs[0], shift)
    given: Any = argument(step, 1, "dim")
    dims, keep = tuple(range(grid.ndim)) if given is None else given, bool(argument(step, 2, "keepdim"))
    low, high = grid.amin(dims, keep), grid.amax(dims, keep)
    found = _line(low) if torch.equal(low, high) and step.outputs[0].dtype == step.inputs[0].dtype else None
    if found is None:
        raise Survives(f"{at(step)} mixes its entries")
    kept = shift.picked(*found)
    if step.op != "sum":
        return kept
    return Shift(kept.axis, kept.sources, kept.factors * (grid.numel() // max(low.numel(), 1)))


def _counts_no_padding(step: Step) -> bool:
    """Whether every average is over values alone: padded zeros would not carry the shift."""
    if step.op.startswith("adaptive_"):
        return True
    if argument(step, 6, "divisor_override") is not None:
        return False
    padding = argument(step, 3, "padding")
    sizes = padding if isinstance(padding, (tuple, list)) else (padding or 0,)
    return not any(sizes) or argument(step, 5, "count_include_pad") is False


def _interpolates(step: Step) -> bool:
    mode = argument(step, 3, "mode") or "nearest"
    return step.op == "interpolate" and mode in _PARTITIONS


def _refuse_pooled_axis(step: Step, shift: Shift) -> None:
    space = int(step.op[-2]) if step.op.endswith("d") else len(step.inputs[0].shape) - 2
    before, after = step.inputs[0].shape, step.outputs[0].shape
    ok = (
        len(before) == len(after)
        and shift.axis < len(before) - space
        and before[shift.axis] == after[shift.axis]
    )
    if not ok or step.inputs[0].dtype != step.outputs[0].dtype:
        raise Survives(f"{at(step)} pools along the axis that it lies on")
