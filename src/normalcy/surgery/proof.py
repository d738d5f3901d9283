"""Executed proofs: a changed layer against a derived bound, a changed model against its float64 self.

Not for changing anything: everything runs on copies, with random states put back afterwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normalcy.errors import DataError, ProofError
from normalcy.flow import Flow, record
from normalcy.flow.structure import deep_tensors_in
from normalcy.sites import at, copied
from normalcy.undisturbed import random_states_kept

Pass = Callable[[nn.Module, object], object]
Change = TypeVar("Change")

RELATIVE = 1e-9
"""What a float64 copy of the model may differ by, relative to the largest value of each output."""
# Offset and scale of each fresh input: either side of a branch on the mean, and of one on the size.
_FRESH = ((0.0, 1.0), (3.0, 1.0), (-3.0, 1.0), (0.0, 0.1), (0.0, 10.0), (0.0, 100.0))
_LOOSE_ULPS = 2.0**12
_LOOSEST = 0.1
_CASTS = (
    "the model casts to a lower precision inside or does not run in float64: the proof rests on the bound at "
    "each layer, and the model's outputs were compared only loosely"
)


@contextmanager
def undisturbed(seed: int = 0) -> Iterator[None]:
    """No gradients, no compiler, a fixed seed, and every random state as it was afterwards."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # a compiled model is judged by what it was compiled from
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(random_states_kept())
        stack.enter_context(torch.no_grad())
        torch.manual_seed(seed)
        yield


def recorded(model: nn.Module, run: Pass, example: object) -> Flow:
    """One pass of the model as it stands, recorded with random states put back."""
    with undisturbed():
        return record(model, lambda: run(model, example))


def flat(result: object) -> list[Tensor]:
    """The floating tensors of a returned structure, in order."""
    return [t for t in deep_tensors_in(result) if t.is_floating_point()]


def mapped(structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(structure, Tensor):
        return change(structure)
    if isinstance(structure, dict):
        return {key: mapped(value, change) for key, value in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(mapped(value, change) for value in structure))
    if isinstance(structure, (list, tuple)):
        parts = [mapped(value, change) for value in structure]
        return tuple(parts) if isinstance(structure, tuple) else parts
    return structure


def widened(x: Tensor) -> Tensor:
    """In float64, where it is floating."""
    return x.double() if x.is_floating_point() else x


def decides(flows: Iterable[Flow]) -> list[str]:
    """A sentence where the forward code hands values of its data to Python, or nothing."""
    places = dict.fromkeys(at(step) for flow in flows for step in flow.reads())
    if not places:
        return []
    named = ", ".join(list(places)[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    seen = "a proof sees only the branches that the example and the fresh inputs take"
    return [f"the model may decide by its data ({named}): {seen}"]


def fresh(x: Tensor, seed: int, offset: float = 0.0, scale: float = 1.0) -> Tensor:
    """Random values of the same shape, location and scale, moved by `offset` standard deviations.

    Then all of it is multiplied by `scale`.

    Whole numbers (tokens) of two or more axes are shuffled, so that they stay among those that were given.
    """
    generator = torch.Generator().manual_seed(seed)
    if not x.is_floating_point():
        shuffles = x.ndim > 1 and x.dtype in (torch.int64, torch.int32)
        order = torch.randperm(x.numel(), generator=generator).to(x.device)
        return x.flatten()[order].reshape(x.shape) if shuffles else x
    if x.numel() == 0:
        return x.clone()
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    wide = x.double()
    spread = wide.std(correction=0).nan_to_num(1.0).clamp(min=1e-3, max=1e3)
    moved = wide.mean().nan_to_num(0.0).clamp(-1e3, 1e3) + (drawn + offset) * spread
    return (scale * moved).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Gap:
    """The element with the largest ratio of error to bound."""

    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Error over bound; 0 where both are zero, infinite where something is not finite."""
        if not math.isfinite(self.error):
            return float("inf")
        return self.error / self.bound if self.bound > 0 else (0.0 if self.error == 0 else float("inf"))

    @property
    def holds(self) -> bool:
        """Whether the error stays within the bound."""
        return self.ratio <= 1


def gap(before: Tensor, after: Tensor, bound: Tensor) -> Gap:
    """Compare elementwise; a shape that differs or a value that is not finite counts as an infinite error."""
    if before.shape != after.shape:
        return Gap(float("inf"), 0.0)
    if before.numel() == 0:
        return Gap(0.0, 0.0)
    error = (before.double() - after.double()).abs()
    error = torch.where(before.isfinite() & after.isfinite(), error, torch.inf)
    bound = bound.expand_as(error)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf, posinf=torch.inf)
    at = int(ratio.argmax())
    return Gap(float(error.flatten()[at]), float(bound.flatten()[at]))


def keep_what_holds(
    whole: Whole, changes: list[Change], apply: Callable[[nn.Module, Change], None]
) -> tuple[list[Change], dict[Change, Gap], Gap]:
    """The changes with which a model stays what it was, those with which it does not, and the last proof.

    All together where that holds; else one by one, each on top of those that held.

    Raises:
        ProofError: the model does not agree with itself even without any change.
    """

    def together(chosen: list[Change]) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            for one in chosen:
                apply(model, one)

        return change

    found = whole.compare(together(changes))
    if found.holds:
        return changes, {}, found
    kept: list[Change] = []
    failed: dict[Change, Gap] = {}
    for one in changes:
        alone = whole.compare(together([*kept, one]))
        if alone.holds:
            kept.append(one)
        else:
            failed[one] = alone
    found = whole.compare(together(kept))
    if not found.holds and not math.isfinite(found.error):
        raise ProofError(
            "the unchanged model's own output is not finite, or changes its shape from one run to the next",
            "a finite output to compare",
            "examine the model with normalcy.doctor.examine first, or return another output in call=…",
        )
    if not found.holds:
        raise ProofError(
            f"the unchanged model's own output differs by {found.error:.3g} from one run to the next",
            "a model that answers the same twice",
            "fix the seed in call=…, or leave out what changes from run to run",
        )
    return kept, failed, found


def worst(gaps: list[Gap]) -> Gap:
    """The one with the largest ratio."""
    return max(gaps, key=lambda g: (g.ratio, g.error), default=Gap(0.0, 0.0))


class Whole:
    """A model's outputs before a change, to compare with those after it.

    The comparison runs on float64 copies, on the example and on fresh inputs. Where the model casts inside,
    or does not run in float64, no such copy can be exact; then outputs in the model's own precision are
    compared loosely, as a check of the wiring only, and `notes` says so.
    """

    def __init__(self, model: nn.Module, example: object, passes: tuple[Pass, ...]) -> None:
        self.model, self.passes = model, passes
        self.notes: list[str] = []
        wide = mapped(example, widened)
        self.examples = [wide]
        for seed, (offset, scale) in enumerate(_FRESH, 1):
            self.examples.append(mapped(wide, partial(fresh, seed=seed, offset=offset, scale=scale)))
        self.exact = copied(model).double()
        self.expected = self._expected()
        self._lower = self._lower_dtypes() if self.examples else set()
        if self._lower or not self.examples:
            self.notes.append(_CASTS)
        self.native = example
        self.native_expected = self._outputs(copied(model), example)
        if not self.native_expected:
            raise DataError(
                "the model returns no floating-point tensor",
                "an output to compare before and after",
                "use call=… to return one",
            )

    def compare(self, change: Callable[[nn.Module], None]) -> Gap:
        """The largest error over bound that the whole model shows after `change`."""
        gaps = []
        for example, expected in zip(self.examples, self.expected, strict=True):
            gaps.append(self._against(self.exact, example, expected, change, RELATIVE))
        found = worst(gaps)
        if self.expected and (found.holds or not self._lower):
            return found
        return self._loosely(change)

    def _loosely(self, change: Callable[[nn.Module], None]) -> Gap:
        dtypes = {t.dtype for t in (*self.native_expected, *self.model.parameters()) if t.is_floating_point()}
        lowest = max(torch.finfo(dtype).eps for dtype in (*dtypes, *self._lower))
        relative = min(_LOOSE_ULPS * lowest, _LOOSEST)
        found = [self._against(self.model, self.native, self.native_expected, change, relative)]
        for example, expected in zip(self.examples, self.expected, strict=True):
            found.append(self._against(self.exact, example, expected, change, relative))
        return worst(found)

    def _expected(self) -> list[list[Tensor]]:
        kept, expected, unsuited = [], [], 0
        for number, example in enumerate(self.examples):
            try:
                outputs = self._outputs(copied(self.exact), example)
            except Exception:  # noqa: BLE001 - fresh inputs may not suit a user's forward
                outputs = []
            if outputs and all(bool(t.isfinite().all()) for t in outputs):
                kept.append(example)
                expected.append(outputs)
            elif number:
                unsuited += 1
        if kept and unsuited == len(_FRESH):
            self.notes.append("fresh random inputs do not suit the model; only the example was compared")
        elif kept and unsuited:
            self.notes.append(f"{unsuited} of {len(_FRESH)} fresh inputs do not suit the model")
        self.examples = kept
        return expected

    def _outputs(self, model: nn.Module, example: object) -> list[Tensor]:
        outputs: list[Tensor] = []
        for run in self.passes:
            with undisturbed():
                outputs += [t.clone() for t in flat(run(model, mapped(example, Tensor.clone)))]
        return outputs

    def _against(
        self,
        model: nn.Module,
        example: object,
        expected: list[Tensor],
        change: Callable[[nn.Module], None],
        relative: float,
    ) -> Gap:
        changed = copied(model)
        try:
            change(changed)
            outputs = self._outputs(changed, example)
        except Exception:  # noqa: BLE001 - a forward that no longer runs is a failed proof
            return Gap(float("inf"), 0.0)
        if len(outputs) != len(expected):
            return Gap(float("inf"), 0.0)
        pairs = zip(expected, outputs, strict=True)
        return worst([gap(a, b, a.double().abs().amax() * relative) for a, b in pairs if a.numel()])

    def _lower_dtypes(self) -> set[torch.dtype]:
        """What the float64 copy computes in less than float64."""
        model, example = copied(self.exact), self.examples[0]
        with undisturbed():
            flow = record(model, lambda: self.passes[0](model, example))
        made = {v.dtype for step in flow.steps for v in step.outputs}
        return made & {torch.float32, torch.float16, torch.bfloat16}
