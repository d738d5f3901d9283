"""`examine`: gather the evidence, let every rule look at it, and return what they found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy import case, flow, neighbours
from normalcy.case import Call
from normalcy.doctor.both_modes import dead_biases
from normalcy.doctor.evidence import Evidence, Norm
from normalcy.doctor.findings import SEVERITIES, Examination, Examined, Finding, Loss
from normalcy.doctor.rules import RULES
from normalcy.errors import ArgumentError, TooFewValuesError
from normalcy.measure import Gap, Measurements, Progress, Sample, gap, mean_loss, measure, sample, tracking
from normalcy.measure import Loss as LossFunction
from normalcy.sites import Sites, find, kind_of
from normalcy.undisturbed import must_have_values, on_batch_statistics, random_states_kept


def examine(
    model: nn.Module,
    data: Any = None,
    *,
    loss: LossFunction | None = None,
    call: Call | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    judge_on: Any = None,
    channels: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Examination:
    """Examine a model's normalization: what is wrong, where, by which numbers, why, and what to do.

    The model is left as it was: modes, parameters, buffers and random state. Without `data` only what
    stands in the model is examined. With data a forward pass is recorded (who feeds whom), the actual
    statistics are pooled over all batches with only the norms on batch statistics, and each layer's
    train/eval gap is measured.

    Args:
        model: any module that runs.
        data: a tensor, dict or tuple is one batch; a loader, generator or list is batches.
        loss: `loss(output, batch)`, a mean over the batch; then the loss is measured with either source.
        call: `call(model, batch)`, where the model does not take the batch, or the first element of a tuple.
        optimizer: examined for weight decay on the norms' parameters.
        judge_on: other data to measure the loss on (held out); `data` if not given.
        channels: which channel of a norm to take sample values of; the one with the largest gap if not given.
        progress: `progress(what, done, of)`.

    Returns:
        An `Examination`: `.findings` (most severe first), `.sites`, `.unrecognized`, `.not_seen`, `.loss`.

    Raises:
        ArgumentError: the model is no module or has no values yet, or another argument is of a wrong kind.
        DataError: the data cannot be used.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        >>> [f.code for f in examine(model, torch.randn(64, 4) + 3).findings]
        ['initial-statistics', 'dead-bias']
    """
    must_have_values(model)
    _check(loss, call, optimizer)
    with random_states_kept():
        if data is None:
            # of a pass in which nothing ran: what the modules alone tell
            unrecognized = find(model, flow.record(model, lambda: None)).unrecognized
            return _judge(
                Evidence(model, _norms(model, None), None, unrecognized, optimizer=optimizer), (), {}, ()
            )
        return _with_data(model, data, loss, call, optimizer, judge_on, channels or {}, progress)


def _with_data(
    model: nn.Module,
    data: Any,
    loss: LossFunction | None,
    call: Call | None,
    optimizer: torch.optim.Optimizer | None,
    judge_on: Any,
    channels: Mapping[str, int],
    progress: Progress | None,
) -> Examination:
    data, judge_on = case.replayable(data), case.replayable(judge_on)
    first = next(iter(case.batches(data)))
    with on_batch_statistics(model, {}):
        recorded = flow.record(model, lambda: case.run(model, first, call))
    sites = find(model, recorded)
    norms = _norms(model, sites)
    tracked = tracking(
        model, [norm.where for norm in norms if norm.site is not None and norm.site.module is not None]
    )
    measured, refusal = _measure(model, tracked, data, call, progress)
    gaps, notes = _gaps(tracked, measured)
    if refusal:
        notes.append(f"No statistics were measured: {refusal}")
    losses = None
    if loss is not None:
        judged = data if judge_on is None else judge_on
        losses = _losses(model, judged, loss, tracked if measured else {}, call, notes)
    norms = tuple(
        replace(norm, measured=measured.get(norm.where), gap=gaps.get(norm.where)) for norm in norms
    )
    for path, channel in channels.items():
        if path in measured and not 0 <= channel < measured[path].actual.count.numel():
            raise ArgumentError(
                f"channel {channel} of {path}", f"0 to {measured[path].actual.count.numel() - 1}"
            )
    shown = {path: channels.get(path, found.channel) for path, found in gaps.items()}
    samples = sample(model, tracked, shown, first, call=call) if shown else {}
    evidence = Evidence(
        model,
        norms,
        sites,
        sites.unrecognized,
        dead=dead_biases(model, recorded, sites, lambda examined: case.run(examined, first, call)),
        idle=sites.idle,
        left_out=measured if measured.skipped else None,
        refusal=refusal,
        optimizer=optimizer,
        loss=losses,
    )
    found = _judge(evidence, sites.not_seen, samples, tuple(notes))
    heard = {path: tracked[path] for path in measured}
    noise = neighbours.of_model(model, heard, case.batches(data), call=call) if heard else {}
    return replace(found, sites=tuple(replace(s, neighbours=noise.get(s.where)) for s in found.sites))


def _check(loss: object, call: object, optimizer: object) -> None:
    for name, given in (("loss", loss), ("call", call)):
        if given is not None and not callable(given):
            raise ArgumentError(f"{name} is of type {type(given).__name__}", "a function")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"the optimizer is of type {type(optimizer).__name__}", "a torch.optim.Optimizer")


def _norms(model: nn.Module, sites: Sites | None) -> tuple[Norm, ...]:
    """Every known norm: those that ran, in the order of the pass, then those that did not.

    A functional one that is given the running statistics of a known layer goes under that layer's name.
    """
    modules, ran = dict(model.named_modules()), list[Norm]()
    seen = {id(site.module) for site in sites or () if site.module is not None}
    for site in sites or ():
        where, module = site.where, site.module
        lender = modules.get(site.holder) if site.holder is not None else None
        if lender is not None and kind_of(lender) is not None and id(lender) not in seen:
            where, module = site.holder or "", lender
        seen.add(id(module))
        ran.append(Norm(where, module, site.kind, site))
    rest = [
        Norm(path, module, kind)
        for path, module in model.named_modules()
        if (kind := kind_of(module)) is not None and id(module) not in seen
    ]
    return (*ran, *rest)


def _measure(
    model: nn.Module,
    tracked: dict[str, _BatchNorm],
    data: Any,
    call: Call | None,
    progress: Progress | None,
) -> tuple[Measurements, str]:
    """Measurements, or none and a sentence why where batch statistics cannot be had."""
    if not tracked:
        return Measurements({}, (), 0), ""
    try:
        return measure(model, tracked, case.batches(data), call=call, progress=progress), ""
    except TooFewValuesError as error:
        return Measurements({}, (), 0), str(error)


def _gaps(tracked: Mapping[str, _BatchNorm], measured: Measurements) -> tuple[dict[str, Gap], list[str]]:
    """The gap of each norm that was measured, and a sentence where masks leave a channel empty."""
    gaps, notes = dict[str, Gap](), list[str]()
    for path, found in measured.items():
        norm, empty = tracked[path], int((found.actual.count == 0).sum())
        if norm.running_mean is None or norm.running_var is None:
            continue
        if empty:
            notes.append(f"{empty} channels of {path} have no valid value, so that its gap was not measured.")
            continue
        gaps[path] = gap(found.actual, norm.running_mean, norm.running_var, norm.eps)
    return gaps, notes


def _losses(
    model: nn.Module,
    data: Any,
    loss: LossFunction,
    tracked: dict[str, _BatchNorm],
    call: Call | None,
    notes: list[str],
) -> Loss:
    """The loss with either source over the same batches; where the second cannot be had, the first twice."""
    try:
        return Loss(
            eval=mean_loss(model, case.batches(data), loss, norms={}, among=tracked, call=call),
            batch=mean_loss(model, case.batches(data), loss, norms=tracked, call=call),
        )
    except TooFewValuesError as error:
        notes.append(f"The loss with each batch's own statistics was not measured: {error}")
        only = mean_loss(model, case.batches(data), loss, norms={}, call=call)
        return Loss(eval=only, batch=only)


def _judge(
    evidence: Evidence, not_seen: tuple[Any, ...], samples: dict[str, Sample], notes: tuple[str, ...]
) -> Examination:
    findings: list[Finding] = [finding for rule in RULES for finding in rule.check(evidence)]
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))  # stable: rules keep their order
    return Examination(
        findings=tuple(findings),
        sites=tuple(_examined(norm, samples.get(norm.where)) for norm in evidence.norms),
        unrecognized=evidence.unrecognized,
        not_seen=not_seen,
        loss=evidence.loss,
        notes=notes,
    )


def _examined(norm: Norm, taken: Sample | None) -> Examined:
    module = norm.module
    channels = norm.site.channels if norm.site else None
    if channels is None and norm.stored is not None:
        channels = norm.stored[0].numel()
    return Examined(
        where=norm.where,
        kind=norm.kind,
        cls=norm.site.cls if norm.site else type(module).__name__,
        channels=channels,
        mode=None if module is None else ("train" if module.training else "eval"),
        momentum=norm.momentum,
        eps=getattr(module, "eps", None),
        updates=norm.updates,
        weight_left=norm.weight_left,
        calls=norm.site.calls if norm.site else None,
        values=norm.values,
        gap=norm.gap,
        sample=taken,
    )
