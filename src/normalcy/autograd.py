"""The one autograd boundary: apply forward; collect and apply backward; any order through the composition.

Statistics arrive here finished; where they come from and how running ones are kept is decided above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from normalcy.axes import Layout
from normalcy.kernels import eager
from normalcy.kernels.contract import Needs, Stats
from normalcy.kernels.pick import pick


def normalize(
    x: Tensor,
    layout: Layout,
    stats: Stats,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    center: bool,
) -> Tensor:
    """Compute y = (x − mean)·rstd·weight + bias, differentiable to any order in x, weight and bias.

    Where `stats.values` is set the statistics came from x, and the gradient flows through them too.

    Three ways lead through here. Nothing needs a gradient: the kernel alone. A functorch transform or
    forward-mode differentiation is active: the differentiable composition. Otherwise the autograd
    function below, whose backward runs the composition when a graph of it is asked for.
    """
    if transforming():
        constants = None if stats.values is not None else stats
        return eager.compose(x, layout, weight, bias, eps=eps, center=center, constants=constants)
    tensors = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        y: Tensor = _Normalize.apply(x, weight, bias, stats, layout, eps, center)  # type: ignore[no-untyped-call]
        return y
    return pick(x).apply(x, layout, stats, weight, bias)


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
        stats: Stats,
        layout: Layout,
        eps: float,
        center: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, stats.mean, stats.rstd)
        ctx.values, ctx.layout, ctx.eps, ctx.center = stats.values, layout, eps, center
        return pick(x).apply(x, layout, stats, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        stats = Stats(mean, rstd, ctx.values)
        needs = Needs(*ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, dy, x, weight, bias, stats, needs), None, None, None, None)
        backend, layout = pick(x), ctx.layout
        sums = backend.collect_grad(dy, x, layout, stats, weight, needs)
        dx = backend.apply_grad(dy, x, layout, stats, weight, sums) if needs.x else None
        return dx, _like(sums.dweight, weight), _like(sums.dbias, bias), None, None, None, None


def _differentiable(
    ctx: FunctionCtx,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Stats,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The same gradients as differentiable functions of x, weight, bias and dy."""
    constants = None if stats.values is not None else stats
    y = eager.compose(
        x,
        ctx.layout,  # type: ignore[attr-defined]
        weight,
        bias,
        eps=ctx.eps,  # type: ignore[attr-defined]
        center=ctx.center,  # type: ignore[attr-defined]
        constants=constants,
    )
    wanted = [t for t, need in zip((x, weight, bias), needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if gradient is None or parameter is None:
        return None
    return gradient.reshape(parameter.shape).to(parameter.dtype)
