"""The one autograd boundary: apply forward; collect and apply backward; any order through the composition.

Statistics arrive here finished; where they come from and how running ones are kept is decided above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from normalcy.axes import Layout
from normalcy.kernels.activation import ACTIVATIONS, pack, positive, unpack
from normalcy.kernels.compose import compose
from normalcy.kernels.contract import Given, Needs, Stats, compute_dtype
from normalcy.kernels.pick import pick

Gradients = tuple[Tensor | None, ...]


class Form(NamedTuple):
    """What one call computes, apart from its tensors."""

    layout: Layout
    eps: float
    center: bool
    activation: str | None


def normalize(given: Given, stats: Stats, form: Form) -> Tensor:
    """Compute y = activation((x − mean)·rstd·weight + bias + residual), differentiable to any order.

    Where `stats.n` is set the statistics came from x, and the gradient flows through them too. The
    backward pass runs the composition when a graph of it is asked for.
    """
    if wants_gradient(given):
        y: Tensor = _Normalize.apply(*given, stats, form)  # type: ignore[no-untyped-call]
        return y
    return pick(given).apply(given, form.layout, stats, form.activation)


def through(run: Callable[[Given], Tensor], given: Given, stats: Stats | None, form: Form) -> Tensor:
    """The same by `run`, PyTorch's operators and their first derivative; `stats` where they are constants.

    Higher derivatives are the composition's, as everywhere.
    """
    if wants_gradient(given):
        y: Tensor = _Through.apply(*given, run, stats, form)  # type: ignore[no-untyped-call]
        return y
    return run(given)


def wants_gradient(given: Given) -> bool:
    """Whether a graph of this call is to be kept."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)


def tracing() -> bool:
    """Whether `torch.jit.trace` is recording."""
    return torch._C._get_tracing_state() is not None  # noqa: SLF001 - the public name is Python, and slower


def transforming() -> bool:
    """Whether a functorch transform or forward-mode differentiation is active."""
    functorch: bool = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public name
    return functorch or forward_ad._current_level >= 0  # noqa: SLF001 - no public name


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        stats: Stats,
        form: Form,
    ) -> Tensor:
        given = Given(x, weight, bias, residual, mask)
        y = pick(given).apply(given, form.layout, stats, form.activation)
        kept = bits = None  # what the gradient of the activation needs besides x
        if residual is not None and form.activation is not None:
            by_sign = ACTIVATIONS[form.activation].below is not None
            kept, bits = (None, pack(positive(y))) if by_sign else (residual, None)
        masked = isinstance(stats.n, Tensor)
        ctx.n, n = (None, stats.n) if masked else (stats.n, None)
        ctx.save_for_backward(x, weight, bias, kept, mask, stats.mean, stats.rstd, n, bits)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, weight, bias, residual, mask, mean, rstd, n, bits = ctx.saved_tensors
        given = Given(x, weight, bias, residual, mask)
        stats = Stats(mean, rstd, ctx.n if n is None else n)
        needs = Needs(*ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():
            constants = None if stats.n is not None else stats
            return (*_differentiable(dy, given, bits, constants, ctx.form, needs), None, None, None)
        backend, layout = pick(given), ctx.form.layout
        dz = _before_activation(dy, given, bits, stats, ctx.form)
        sums = backend.collect_grad(dz, given, layout, stats, needs)
        dx = backend.apply_grad(dz, given, layout, stats, sums) if needs.x else None
        dresidual = _only_valid(dz, mask).to(x.dtype) if needs.residual else None
        return dx, _like(sums.dweight, weight), _like(sums.dbias, bias), dresidual, None, None, None


class _Through(torch.autograd.Function):
    """PyTorch's operators, whose own graph is kept inside and asked for first derivatives only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        run: Callable[[Given], Tensor],
        stats: Stats | None,
        form: Form,
    ) -> Tensor:
        outer = (x, weight, bias, residual)
        needed = ctx.needs_input_grad[:4]
        inner: Any = [
            t if t is None else t.detach().requires_grad_(n) for t, n in zip(outer, needed, strict=True)
        ]
        with torch.enable_grad():
            y = run(Given(inner[0], inner[1], inner[2], inner[3], mask))
        ctx.edge = get_gradient_edge(y)  # not y, which would live as long as this
        ctx.inner = [get_gradient_edge(t) for t, n in zip(inner, needed, strict=True) if n and t is not None]
        mean, rstd = (stats.mean, stats.rstd) if stats is not None else (None, None)
        ctx.save_for_backward(x, weight, bias, residual, mean, rstd)
        ctx.form = form
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        nothing = (None, None, None, None)
        if torch.is_grad_enabled():
            x, weight, bias, residual, mean, rstd = ctx.saved_tensors
            stats = None if rstd is None else Stats(mean, rstd, None)
            needs = Needs(*ctx.needs_input_grad[:4])
            found = _differentiable(dy, Given(x, weight, bias, residual), None, stats, ctx.form, needs)
            return (*found, *nothing)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no public name
        gradients = iter(torch.autograd.grad([ctx.edge], ctx.inner, [dy], retain_graph=keep))
        return (*(next(gradients) if need else None for need in ctx.needs_input_grad[:4]), *nothing)


def _differentiable(
    dy: Tensor, given: Given, bits: Tensor | None, constants: Stats | None, form: Form, needs: Needs
) -> Gradients:
    """The same gradients as differentiable functions of x, weight, bias, residual and dy."""
    # Views, so that one tensor in two places, or one that hangs on another, is only what it is here.
    own: list[Any] = [t.view_as(t) if t is not None and t.requires_grad else t for t in given[:4]]
    activation = form.activation
    if bits is not None:  # the sign of z is known, and with it a gradient that is linear in dy
        dy = _by_sign(dy, unpack(bits, dy.shape), activation)
        activation, own[3] = None, None
    y, _ = compose(
        Given(own[0], own[1], own[2], own[3], given.mask),
        form.layout,
        eps=form.eps,
        center=form.center,
        activation=activation,
        constants=constants,
    )
    asked = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, asked, dy, create_graph=True) if asked else ())
    dx, dweight, dbias, dresidual = (
        next(found) if need and t is not None else None for t, need in zip(own, needs, strict=True)
    )
    if needs.residual and dresidual is None:
        dresidual = _only_valid(dy, given.mask)
    return dx, dweight, dbias, dresidual


def _before_activation(dy: Tensor, given: Given, bits: Tensor | None, stats: Stats, form: Form) -> Tensor:
    """dz, the gradient before the activation. Without a residual z is computed once more, from x."""
    if form.activation is None:
        return dy
    wide = compute_dtype(dy)  # half precision would round what float32 parameters' gradients are summed from
    dy = dy.to(wide)
    if bits is not None:
        return _by_sign(dy, unpack(bits, dy.shape), form.activation)
    x, residual = given.x.to(wide), None if given.residual is None else given.residual.to(wide)
    wider = given._replace(x=x, residual=residual)
    z = pick(wider).apply(wider, form.layout, stats, None)
    chosen = ACTIVATIONS[form.activation]
    if chosen.derivative is None:
        return _by_sign(dy, positive(z), form.activation)
    return chosen.derivative(dy, z)


def _by_sign(dy: Tensor, passes: Tensor, activation: str | None) -> Tensor:
    below = ACTIVATIONS[activation].below if activation is not None else None
    return torch.where(passes, dy, dy * below if below else 0.0)


def _only_valid(gradient: Tensor, mask: Tensor | None) -> Tensor:
    return gradient if mask is None else gradient.clone().masked_fill_(~mask, 0.0)  # keeps the strides


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if gradient is None or parameter is None:
        return None
    return gradient.reshape(parameter.shape).to(parameter.dtype)
