"""Debiasing: the initial state's weight divided out of running statistics, without data.

Only an exponential average that started at mean 0 and variance 1 can be debiased. With data, `recalibrate`
is better; never do both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from normalcy.conventions import TORCH
from normalcy.errors import ArgumentError
from normalcy.measure import shared_statistics
from normalcy.report import Item, Report
from normalcy.statistics import debiased, warm_count, weight_left
from normalcy.undisturbed import must_have_values

_NOTHING_LEFT = 2.0**-24
_COARSE = 0.05


def debias(model: nn.Module, momentum: float | None = None) -> Report:
    """Divide the initial state out of each layer's running statistics, in place.

        left = (1 − m)ᵏ,   mean ← running_mean/(1 − left),   var ← (running_var − left)/(1 − left)

    m is the layer's momentum (the weight of the new value) and k its `num_batches_tracked`. What remains is
    the weighted average of what was seen. The counter then becomes a number at which the initial state weighs
    nothing, so that a second call, also on the saved and loaded model, changes nothing.

    Args:
        model: changed in place.
        momentum: the momentum the statistics were kept with, where the layers' own has been changed since.

    Returns:
        A report; `refused` has the layers without a count or a fixed momentum, those that saw nothing, and
        those whose numbers show that they are no such average.

    Raises:
        ArgumentError: momentum is not in (0, 1], or the model is no module or has no values yet.

    Source: Kingma & Ba, Adam, arXiv:1412.6980, section 3, for the correction.

    Example:
        >>> norm = nn.BatchNorm1d(1, momentum=0.1)
        >>> _ = norm(torch.tensor([[9.0], [11.0]]))
        >>> report = debias(norm)
        >>> norm.running_mean, norm.running_var
        (tensor([10.]), tensor([2.0000]))
    """
    if momentum is not None and not 0 < momentum <= 1:
        raise ArgumentError(f"momentum={momentum}", "the weight of the new value, above 0 and up to 1")
    must_have_values(model)
    report, shared = Report(model), shared_statistics(model)
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase) or module.running_mean is None or module.running_var is None:
            continue
        why, new = _finished(module, momentum)
        if path in shared:  # a second division of the same numbers would spoil them
            why, new = f"its running statistics are the same tensors as those of {shared[path]}", None
        if new is None:
            report.refused.append(Item(path, why))
            continue
        with torch.no_grad():
            module.running_mean.copy_(new[0])
            module.running_var.copy_(new[1])
            module.num_batches_tracked.fill_(warm_count(momentum or module.momentum))  # type: ignore[union-attr,arg-type]
        report.done.append(Item(path, why))
    if not report.done and not report.refused:
        report.notes.append("no layer with running statistics to debias")
    return report


def _finished(norm: _NormBase, momentum: float | None) -> tuple[str, tuple[Tensor, Tensor] | None]:
    """A sentence on what is done or why not, and the debiased mean and variance."""
    m = norm.momentum if momentum is None else momentum
    mean, var = norm.running_mean, norm.running_var
    why = _no_count(norm) or _nothing_to_divide_out(norm, m)
    if why or m is None or mean is None or var is None or norm.num_batches_tracked is None:
        return why, None
    k = int(norm.num_batches_tracked)
    left = weight_left(m, k)
    if left < _NOTHING_LEFT:
        return f"after {k} updates with momentum {m} nothing is left of the initial state", None
    if not bool(mean.isfinite().all() and var.isfinite().all()):
        return "its statistics are not finite", None
    new = debiased(mean, 0.0, left), debiased(var, 1.0, left)
    # one rounding in each update, of which the share of the initial state remains; the division magnifies it
    slack = k * torch.finfo(var.dtype).eps * left / (1 - left)
    if slack > _COARSE:
        kind = str(var.dtype).removeprefix("torch.")
        return f"{kind} rounded the {k} updates too coarsely: the variance is known to {slack:.2g} only", None
    if bool((new[1] < -slack).any()):
        no_average = f"no average with momentum {m} over {k} updates from 1"
        return f"a variance below the initial state's share of {left:.3g} shows that it is {no_average}", None
    return f"the initial state weighed {left:.3g} after {k} updates with momentum {m}", (
        new[0],
        new[1].clamp(min=0),
    )


def _no_count(norm: _NormBase) -> str:
    """Why the number of updates is not known; empty where it is."""
    if isinstance(norm, _InstanceNorm):
        return "PyTorch's instance norm does not count its updates, so that its counter tells nothing"
    if norm.num_batches_tracked is None:
        return "it does not count its updates, so that the weight of the initial state is unknown"
    moved = bool((norm.running_mean != 0).any() or (norm.running_var != 1).any())  # type: ignore[union-attr]
    if moved and int(norm.num_batches_tracked) == 0:
        return "its statistics have moved and its counter says 0 updates: it was not counted"
    return ""


def _nothing_to_divide_out(norm: _NormBase, m: float | None) -> str:
    """Why the average holds no initial state, or nothing but that; empty where debiasing can go on."""
    if getattr(norm, "convention", TORCH).debias:
        return "its statistics are debiased already, at every update"
    if m is None:
        return "a cumulative average (momentum=None) holds nothing of the initial state"
    k = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    if k == 0 or m == 0:
        return f"nothing was taken in ({k} updates with momentum {m}), so that nothing is left to recover"
    return ""
