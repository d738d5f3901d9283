"""Fold batch norm in inference into the layer before it, and prove the result equal.

Not for training: a folded model has no norm left to train. Not for norms whose statistics come from the data.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy import sites
from normalcy.case import Call
from normalcy.case import run as run_batch
from normalcy.report import Item, Report
from normalcy.sites import copied
from normalcy.surgery.layer import Affine, Edge, apply, bare, folded, install, pair, prove_layer, refusal
from normalcy.surgery.proof import (
    Gap,
    Pass,
    Whole,
    decides,
    fresh,
    keep_what_holds,
    recorded,
    undisturbed,
    worst,
)


@dataclass(slots=True)
class FoldReport(Report):
    """A `Report` that also tells what was proved of the whole model.

    Attributes:
        model_error: largest difference between the outputs of float64 copies, before and after; absolute.
        model_bound: what it has to stay under, 1e-9 of that output's largest value.
    """

    model_error: float | None = None
    model_bound: float | None = None


def fold(model: nn.Module, example: object, *, call: Call | None = None, inplace: bool = False) -> FoldReport:
    """Fold every batch norm in evaluation mode into the Linear or Conv layer before it, where that is right.

    With stored statistics y = γ·(Wx + b − mean)/√(var + eps) + β; and with a = γ/√(var + eps), per channel,

        W′ = a·W        b′ = a·(b − mean) + β

    The norm becomes `nn.Identity`; a layer without a bias gets one. A norm that cannot be folded stays and is
    refused with a sentence: something between, a second consumer, a shared or tied layer, channels on another
    axis, mixed dtypes, and more.

    Shapes: W (out, in/groups, *kernel), everything else (out,).
    Dtypes: computed in float64 and rounded once to the layer's own dtype.
    Proof: at each folded layer's output, on the layer's own input and on fresh ones, every element agrees
    with the unfolded pair within 2(k + 3)·u·(|W′||x| + |a·b| + |a·mean| + |β|), where k is the length of the
    dot product and u the unit roundoff; and a float64 copy of the whole model agrees to 1e-9. What fails is
    taken back and refused. A branch of the forward code that neither the example nor the fresh inputs take
    (random ones, moved to either side, and from a tenth to a hundred times as large) is not seen; where the
    forward code reads values of its data, `notes` says so.

    Args:
        model: a module with its norms in evaluation mode.
        example: one batch, as `case.run` takes it: the model gets the first element of a tuple, a tensor or a
            dict whole.
        call: `call(model, batch)` for models that are called in another way.
        inplace: change `model` itself; otherwise a copy is changed.

    Returns:
        A report with `.model`, `.done`, `.refused`, `.error` and `.bound` (of the element with the largest
        ratio), `.model_error` and `.model_bound`.

    Raises:
        ArgumentError: the model cannot be copied.
        DataError: the model fails on the example.
        ProofError: the unchanged model does not even agree with itself.

    Source: Jacob et al. 2018 (arXiv:1712.05877), section 3.2, for inference.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
        >>> report = fold(net, torch.randn(8, 4))
        >>> [(item.where, item.why) for item in report.done], report.error <= report.bound
        ([('1', 'folded into 0')], True)
        >>> report.model
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): Identity()
          (2): ReLU()
        )
    """

    def run(module: nn.Module, batch: object) -> object:
        return run_batch(module, batch, call)

    report = FoldReport(model)
    edges = _candidates(copied(model), example, run, report)
    proved = _prove_layers(copied(model), example, run, edges, report)
    kept = _prove_model(model, example, run, list(proved), report)
    report.model = model if inplace else copied(model)
    for edge in kept:
        apply(report.model, edge)
        report.done.append(Item(edge.norm, f"folded into {edge.layer}"))
    if kept:
        largest = worst([proved[edge] for edge in kept])
        report.error, report.bound = largest.error, largest.bound
    return report


def _candidates(probe: nn.Module, example: object, run: Pass, report: FoldReport) -> list[Edge]:
    """The edges that wiring and numbers allow; everything else goes to `refused`."""
    flow = recorded(probe, run, example)
    found = sites.find(probe, flow)
    edges = []
    for site in found:
        if site.kind not in ("batch", "instance"):
            continue
        if not site.fold.ok or site.fold.producer is None:
            report.refused.append(Item(site.where, site.fold.why))
            continue
        edge = Edge(site.fold.producer, site.where)
        if why := refusal(*pair(probe, edge)):
            report.refused.append(Item(edge.norm, why))
        else:
            edges.append(edge)
    modules = dict(probe.named_modules())
    others = [
        item for item in (*found.unrecognized, *found.not_seen) if _keeps_statistics(modules.get(item.where))
    ]
    report.refused += others
    if edges:
        report.notes += decides([flow])
    return edges


def _keeps_statistics(module: nn.Module | None) -> bool:
    """Whether it is a batch norm, or looks like one: what somebody may expect to be folded."""
    return isinstance(module, _BatchNorm) or isinstance(getattr(module, "running_var", None), Tensor)


def _prove_layers(
    probe: nn.Module,
    example: object,
    run: Pass,
    edges: list[Edge],
    report: FoldReport,
) -> dict[Edge, Gap]:
    """Prove each edge where it runs: the layer's input against the norm's output, and fresh inputs."""
    proved: dict[Edge, list[Gap]] = {edge: [] for edge in edges}
    handles = []
    for edge in edges:
        check = _Check(*pair(probe, edge), proved[edge])
        handles.append(check.layer.register_forward_pre_hook(check.take, with_kwargs=True))
        handles.append(check.norm.register_forward_hook(check.compare))
    if edges:
        with undisturbed():
            run(probe, example)
    for handle in handles:
        handle.remove()
    kept = {}
    for edge, gaps in proved.items():
        largest = worst(gaps)
        unproved = f"could not be proved equal at {edge.layer}:"
        if not gaps:
            report.refused.append(Item(edge.norm, f"{unproved} no value of the example ran through it"))
        elif largest.holds:
            kept[edge] = largest
        else:
            over = f"error {largest.error:.3g} exceeds the bound {largest.bound:.3g}"
            report.fail(edge.norm, f"{unproved} {over}")
    return kept


class _Check:
    """Hooks on a copy: keep the layer's input until the norm has answered, then compare."""

    def __init__(self, layer: Affine, norm: _BatchNorm, gaps: list[Gap]) -> None:
        self.layer, self.norm, self.gaps = layer, norm, gaps
        self.x: Tensor | None = None

    def take(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = args[0] if args else kwargs.get("input")
        self.x = given.clone() if isinstance(given, Tensor) else None

    def compare(self, _: nn.Module, __: object, y: Tensor) -> None:
        x, self.x = self.x, None
        if x is None or x.numel() == 0:
            return
        layer, norm = bare(self.layer), bare(self.norm)
        after = copy.deepcopy(layer)
        install(after, folded(layer, norm))
        self.gaps.append(prove_layer(layer, norm, after, x, y))
        for seed, offset in ((1, 0.0), (2, 8.0)):
            other = fresh(x, seed, offset)
            self.gaps.append(prove_layer(layer, norm, after, other))


def _prove_model(
    model: nn.Module,
    example: object,
    run: Pass,
    edges: list[Edge],
    report: FoldReport,
) -> list[Edge]:
    """The edges with which the model stays what it was; found one by one if they fail together."""
    if not edges:
        return []
    whole = Whole(copied(model), example, (run,))
    edges, failed, found = keep_what_holds(whole, edges, apply)
    for edge, miss in failed.items():
        report.fail(edge.norm, f"the model's output changes with it (by {miss.error:.3g})")
    report.notes += whole.notes
    if edges:
        report.model_error, report.model_bound = found.error, found.bound
    return edges
