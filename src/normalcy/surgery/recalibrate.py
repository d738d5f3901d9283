"""Recalibration: running statistics replaced by the pooled statistics of given data.

Needs data. Where there are none, but the statistics are an average that has not warmed up, see `debias`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normalcy import case
from normalcy.case import Call
from normalcy.conventions import TORCH
from normalcy.errors import ArgumentError
from normalcy.measure import Measured, Progress, measure, shared_statistics, tracking
from normalcy.report import Item, Report
from normalcy.sites import kind_of
from normalcy.statistics import warm_count
from normalcy.undisturbed import must_have_values


def recalibrate(
    model: nn.Module,
    batches: Any,
    *,
    correction: int | None = None,
    call: Call | None = None,
    progress: Progress | None = None,
) -> Report:
    """Give each batch norm the statistics of `batches`, pooled over all of them, in place.

        running_mean ← mean,   running_var ← M2/(n − correction)

    n, mean and M2 are of all values of a channel in all batches: weighted by count, the spread between
    batches included. Only norm layers switch mode for the pass (dropout stays off); modes, random state and
    everything else are restored, also when the pass fails, and then no statistic has changed. Of a norm that
    is called with a mask or lengths, valid places alone count.
    `num_batches_tracked` becomes the number of batches where the average is cumulative; otherwise a count at
    which the initial state weighs nothing, since it does weigh nothing now.

    Args:
        model: changed in place. A norm in evaluation mode in a model that trains is frozen, and left.
        batches: as `doctor.examine` takes data: one batch (tensor, dict or tuple) or an iterable of batches;
            a list of tensors of one shape, except for the first axis, is taken for batches, too.
        correction: 1 stores the unbiased variance, 0 the biased one; None: what the layer's convention
            stores, and that is 1 for every layer of PyTorch's.
        call: `call(model, batch)`, where the model does not take the batch or its first element.
        progress: `progress(what, done, of)` after each batch.

    Returns:
        A report; `refused` has the norms that the data do not reach, that got values that are not finite,
        or whose buffers cannot hold the result. `notes` names batches that were left out, because a norm
        would get one value per channel in them, as in the last one of a loader.

    Raises:
        ArgumentError: the model is no module or has no values yet, or `correction` is neither 0 nor 1.
        DataError: there is no batch, or the model fails on one.
        TooFewValuesError: a norm gets one value per channel in every batch.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> report = recalibrate(norm, iter([torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])]))
        >>> norm.running_mean, norm.running_var
        (tensor([3.]), tensor([6.6667]))
    """
    if correction not in (None, 0, 1):
        raise ArgumentError(f"correction={correction}", "0 (biased), 1 (unbiased) or None (the layer's own)")
    must_have_values(model)
    report = Report(model)
    shared = shared_statistics(model)
    batch_norms = [path for path, module in model.named_modules() if kind_of(module) == "batch"]
    norms = tracking(model, [path for path in batch_norms if path not in shared])
    _refuse_the_rest(model, norms, shared, report)
    if not norms:
        report.notes.append("no batch norm with running statistics to recalibrate")
        return report
    measured = measure(model, norms, _stream(batches), call=call, progress=progress)
    if measured.skipped:
        report.notes.append(measured.left_out())
    ready = []
    for path, norm in norms.items():
        found = measured.get(path)
        why, new = _finished(norm, found, correction)
        if found is None and measured.skipped:
            why += " in a batch that was not left out"
        if why:
            report.refused.append(Item(path, why))
        elif found and new:
            ready.append((path, norm, found, new))
    with torch.no_grad():
        for path, norm, found, (mean, var) in ready:
            _write(norm, mean, var, found)
            n = int(found.actual.count.max())
            report.done.append(Item(path, f"pooled over {n} values per channel, {_calls(found.calls)}"))
    return report


def _stream(batches: Any) -> Iterable[Any]:
    """Here a list is meant as batches; it is one batch after all if its tensors are of different kinds."""
    if isinstance(batches, list) and all(isinstance(batch, Tensor) and batch.dim() for batch in batches):
        kinds = {(batch.dtype, batch.shape[1:]) for batch in batches}
        if len(kinds) == 1:
            return case.batches(iter(batches))
    return case.batches(batches)


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


def _refuse_the_rest(
    model: nn.Module, norms: dict[str, _BatchNorm], shared: dict[str, str], report: Report
) -> None:
    for path, module in model.named_modules():
        if path in norms or getattr(module, "running_mean", None) is None:
            continue
        if path in shared:
            why = f"its running statistics are the same tensors as those of {shared[path]}"
        elif isinstance(module, _InstanceNorm):
            why = "an instance norm stores the average of its instances' variances, which pooling is not"
        elif kind_of(module) == "batch":
            why = "frozen: in evaluation mode while the model trains"
        else:
            why = f"{type(module).__name__} keeps running statistics, but is no batch norm that is known"
        report.refused.append(Item(path, why))


def _finished(
    norm: _BatchNorm, found: Measured | None, correction: int | None
) -> tuple[str, tuple[Tensor, Tensor] | None]:
    if found is None:
        return "the data never reach it", None
    own = getattr(norm, "convention", TORCH).correction
    if correction is None:
        correction = own
    if hasattr(norm, "num_values_tracked") and correction != own:
        return f"it pools on from its stored variance, which has correction {own}, not {correction}", None
    mean, var = found.actual.mean, found.actual.var(correction)
    empty = int((found.actual.count == 0).sum())
    if empty:
        return f"{empty} of {mean.numel()} channels have no valid value", None
    if not bool(mean.isfinite().all() and var.isfinite().all()):
        bad = int((~(mean.isfinite() & var.isfinite())).sum())
        return f"its input is not finite in {bad} of {mean.numel()} channels", None
    for name, value in (("running_mean", mean), ("running_var", var)):
        buffer = getattr(norm, name)
        top = torch.finfo(buffer.dtype).max
        if float(value.abs().max()) > top:
            return f"{name} of {buffer.dtype} cannot hold {float(value.abs().max()):.4g}", None
    return "", (mean, var)


def _write(norm: Any, mean: Tensor, var: Tensor, found: Measured) -> None:
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    if hasattr(norm, "num_values_tracked"):
        norm.num_values_tracked.copy_(found.actual.count.max())
    if norm.num_batches_tracked is None:
        return
    if norm.momentum is None:
        norm.num_batches_tracked.fill_(found.calls)
    else:
        norm.num_batches_tracked.clamp_(min=warm_count(norm.momentum))
