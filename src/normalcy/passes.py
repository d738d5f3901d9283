"""One normalization from check to record: collect, choose the source, apply, keep the running statistics.

What functions and layers share; not for users, who have those.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normalcy import autograd, checks, masks
from normalcy.autograd import Form
from normalcy.axes import Layout
from normalcy.errors import ArgumentError, ShapeError
from normalcy.kernels import standard
from normalcy.kernels.compose import compose
from normalcy.kernels.contract import Given, Stats
from normalcy.kernels.pick import pick
from normalcy.moments import Moments
from normalcy.spec import Norm
from normalcy.statistics import Batch, Running, Source, Stored

# below this, 1/√(var + eps) may leave the range of float32
_TINY_EPS = 1e-75


class Extras(NamedTuple):
    """What a norm may take besides its own tensors: which places count, and what follows in the same pass.

    Attributes:
        mask: bool, broadcastable to the input, True = valid; or None.
        lengths: how many places of the last axis are valid, one integer for each example; or None.
        residual: added to the normalized values; the shape and dtype of the input; or None.
        activation: "relu", "leaky_relu", "gelu" or "silu", after that; or None.
    """

    mask: Tensor | None = None
    lengths: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None

    def unbatched(self, input: Tensor) -> Extras:
        """The same for one example that is given without its axis, once it has got one."""
        if self.lengths is not None:
            raise ShapeError(
                f"lengths for an input of shape {tuple(input.shape)}, one example without its axis",
                "(examples, channels, ..., time)",
            )
        mask = None if self.mask is None else masks.checked(self.mask, input).unsqueeze(0)
        residual = self.residual
        if isinstance(residual, Tensor):  # whatever else it is, the check that follows says so
            residual = residual.unsqueeze(0)
        return self._replace(mask=mask, residual=residual)


NOTHING = Extras()


def normalized(
    x: Tensor,
    norm: Norm,
    source: Source,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    who: str,
    extras: Extras = NOTHING,
    *,
    training: bool = True,
) -> Tensor:
    """Check everything, then normalize; running statistics change last, after everything that can fail.

    `who` names the caller in errors. `training=False` says that no training step is going on, so that a
    compiler or an exporter may be given PyTorch's own operators.
    """
    given, form, record = _checked(x, norm, source, weight, bias, eps, who, extras)
    traced = torch.compiler.is_compiling() or autograd.tracing()
    elsewhere = x.device.type != "cpu"
    transforming = autograd.transforming()
    through_stored = isinstance(source, Stored) and (source.mean.requires_grad or source.var.requires_grad)
    alone = given.mask is None and not transforming and not through_stored
    if alone and (elsewhere or (traced and not training)) and standard.knows(norm):
        return _by_pytorch(given, norm, source, record, form, traced=traced)
    if isinstance(source, Stored):
        if traced or transforming or through_stored:
            return _composed(given, form, _stored_stats(source, x, eps, copy=False))[0]
        return autograd.normalize(given, _stored_stats(source, x, eps, copy=True), form)
    if traced or transforming:
        y, moments = _composed(given, form, None)
        if given.mask is not None and norm.axes.outlives_example and torch.compiler.is_compiling():
            checks.assert_counts(moments.count, who)
    else:
        y, moments = _collected(given, form, norm, who)
    if record is not None and x.numel():
        record.update(_by_channel(moments, form.layout, outlives=norm.axes.outlives_example))
    return y


def _checked(
    x: Tensor,
    norm: Norm,
    source: Source,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    who: str,
    extras: Extras,
) -> tuple[Given, Form, Running | None]:
    checks.check_input(x, who)
    checks.check_eps(eps, who)
    layout = norm.axes.resolve(tuple(x.shape), remember=not torch.compiler.is_compiling())
    checks.check_parameters(x, layout, weight, bias, who)
    residual, activation = extras.residual, extras.activation
    if residual is not None or activation is not None:
        checks.check_after(x, residual, activation, who)
    mask = extras.mask
    if extras.lengths is not None:
        if mask is not None:
            raise ArgumentError(f"{who} got mask and lengths", "one of the two")
        mask = masks.of_lengths(extras.lengths, x.shape)
    if mask is not None:
        mask = masks.checked(mask, x)
    record = source.record if isinstance(source, Batch) else None
    kept = record if record is not None else source if isinstance(source, Stored) else None
    if kept is not None:
        checks.check_statistics((kept.mean, kept.var), x, who, written=record is not None)
    if isinstance(source, Batch):
        checks.check_values(x, norm, layout, eps, who)
    return Given(x, weight, bias, residual, mask), Form(layout, eps, norm.center, activation), record


def _collected(given: Given, form: Form, norm: Norm, who: str) -> tuple[Tensor, Moments]:
    """Collect and apply by the backend that serves this call."""
    x, layout, eps = given.x, form.layout, form.eps
    moments = pick(given).collect(x, layout, given.mask)
    if given.mask is not None and norm.axes.outlives_example and masks.has_values(given.mask):
        checks.check_counts(moments.count, who)
    stats = finish(moments, layout.values if given.mask is None else None, eps, center=form.center)
    if eps == 0 and x.numel() and bool((stats.rstd.isinf() & (moments.count > 0)).any()):
        raise ArgumentError(
            f"{who} got eps=0 and values whose variance is 0 in float64", "eps > 0, or values that vary"
        )
    if eps < _TINY_EPS and x.dtype != torch.float64:
        operands: Any = (t if t is None or not t.is_floating_point() else t.double() for t in given)
        wide = Given(*operands)
        return autograd.normalize(wide, stats, form).to(x.dtype), moments
    return autograd.normalize(given, stats, form), moments


def _composed(given: Given, form: Form, stats: Stats | None) -> tuple[Tensor, Moments]:
    return compose(
        given,
        form.layout,
        eps=form.eps,
        center=form.center,
        activation=form.activation,
        constants=stats,
    )


def _by_pytorch(
    given: Given, norm: Norm, source: Source, record: Running | None, form: Form, *, traced: bool
) -> Tensor:
    """PyTorch's operators: bare where a compiler sees them, inside our boundary on another device."""
    stored = running = stats = None
    if isinstance(source, Stored):
        stored = (source.mean, source.var)
        if not traced and autograd.wants_gradient(given):
            # Copies, so that a later update of the buffers cannot change a gradient.
            stored = (source.mean.clone(), source.var.clone())
            stats = _stored_stats(source, given.x, form.eps, copy=True)
    weight = record.weight_for_pytorch() if record is not None else None
    if record is not None and weight:
        running = (record.mean, record.var, weight)
    run = partial(
        standard.call, norm=norm, eps=form.eps, activation=form.activation, stored=stored, running=running
    )
    y = run(given) if traced else autograd.through(run, given, stats, form)
    if record is not None and given.x.numel():
        if weight is not None:
            record.count_one()
        else:
            moments = pick(given).collect(given.x.detach(), form.layout, None)
            record.update(_by_channel(moments, form.layout, outlives=norm.axes.outlives_example))
    return y


def finish(moments: Moments, values: int | None, eps: float, *, center: bool) -> Stats:
    """Mean and rstd = 1/√(var + eps); without centring 1/√(E[x²] + eps), E[x²] = var + mean².

    `values` is the count where it is one number for all. A variance beyond float64 makes rstd NaN, not 0.
    """
    count: Any = moments.count if values is None else max(values, 1)
    var = moments.m2 / (count.clamp(min=1) if values is None else count)
    if not center:
        var = var + moments.mean.square()
    rstd = (var + eps).rsqrt()
    rstd = torch.where(rstd == 0, torch.nan, rstd)
    return Stats(moments.mean if center else None, rstd, count)


def _stored_stats(source: Stored, x: Tensor, eps: float, *, copy: bool) -> Stats:
    """As constants. A copy, unless the gradient is to reach the statistics themselves."""
    shape = (1, -1, *([1] * (x.dim() - 2)))
    mean = source.mean.detach().to(torch.float64, copy=True) if copy else source.mean.double()
    var = source.var.detach() if copy else source.var
    return Stats(mean.reshape(shape), (var.double().reshape(shape) + eps).rsqrt(), None)


def _by_channel(moments: Moments, layout: Layout, *, outlives: bool) -> Moments:
    """Of shape (channels,), or (examples, channels) where each example has statistics of its own."""
    shape = (-1,) if outlives else (layout.statistic[0], layout.statistic[1])
    return Moments(moments.count.reshape(shape), moments.mean.reshape(shape), moments.m2.reshape(shape))
