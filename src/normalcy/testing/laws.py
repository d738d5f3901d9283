"""The laws of normalization as checks to run on a layer of your own.

Every check works on copies and raises AssertionError with one sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck

from normalcy.errors import ArgumentError
from normalcy.testing import subject
from normalcy.testing.tolerance import ULPS, assert_close


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The values of x in other places of memory: (name, tensor equal to x), the name saying how it lies.

    Example:
        >>> [name for name, _ in layouts(torch.rand(2, 3))]
        ['contiguous', 'transposed', 'sliced', 'offset']
    """
    yield "contiguous", x.contiguous()
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        yield "channels_last_3d", x.contiguous(memory_format=torch.channels_last_3d)
    if x.dim() >= 2:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 1::2] = x
    yield "sliced", wide[..., 1::2]
    longer = torch.full((x.numel() + 3,), torch.nan, dtype=x.dtype, device=x.device)
    longer[3:] = x.reshape(-1)
    yield "offset", longer[3:].view(x.shape)


def check_shift_invariance(
    layer: nn.Module, x: Tensor, shift: float = 100.0, *, ulps: float | None = None
) -> None:
    """f(x + c) = f(x), where the layer centres by statistics of its input (not for RMS norm or stored ones).

    Judged against the layer's own float64 copy, on the values that x + c was rounded to. Precision is part of
    the law: a layer that loses digits on offset data fails it.

    Raises:
        AssertionError: the output moves by more than `ulps` (by default `ULPS`).

    Example:
        >>> from normalcy.nn import LayerNorm
        >>> check_shift_invariance(LayerNorm(8), torch.randn(4, 8), shift=1e4)
    """
    moved = x + shift
    exact = subject.run(subject.double(layer, x.dtype), moved.double() - shift)
    what, scale = f"{subject.name(layer)} of x + {shift:g}", subject.scale(moved, exact)
    assert_close(subject.run(layer, moved), exact, ulps=ulps, scale=scale, what=what)


def check_scale_invariance(
    layer: nn.Module, x: Tensor, scale: float = 8.0, *, ulps: float | None = None
) -> None:
    """f(s·x) = f(x) for s > 0, with the layer's eps multiplied by s²: exact, and as eps → 0 the plain law.

    Raises:
        ArgumentError: the layer has no number as `eps`, or the scale is not positive.
        AssertionError: the output changes by more than `ulps` (by default `ULPS`).

    Example:
        >>> from normalcy.nn import GroupNorm
        >>> check_scale_invariance(GroupNorm(2, 4), torch.randn(3, 4, 5))
    """
    eps = getattr(layer, "eps", None)
    if not isinstance(eps, float) or scale <= 0:
        raise ArgumentError(
            f"eps={eps!r} and scale={scale:g}", "a layer with a number as `eps`, and scale > 0"
        )
    scaled: Any = copy.deepcopy(layer)
    scaled.eps = eps * scale**2
    moved = x * scale
    exact = subject.run(subject.double(layer, x.dtype), moved.double() / scale)
    what, size = f"{subject.name(layer)} of {scale:g}·x", subject.scale(moved, exact)
    assert_close(subject.run(scaled, moved), exact, ulps=ulps, scale=size, what=what)


def check_train_equals_eval(layer: nn.Module, x: Tensor) -> None:
    """Training and evaluation give the same bits: so for layer, group and RMS norm, not for batch norm.

    Raises:
        AssertionError: they differ.

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_train_equals_eval(BatchNorm1d(2), torch.tensor([[2.0, 1.0], [4.0, 7.0]]))
        Traceback (most recent call last):
        AssertionError: BatchNorm1d: training and evaluation differ on the same input, by up to 6.
    """
    train, serve = subject.run(copy.deepcopy(layer).train(), x), subject.run(copy.deepcopy(layer).eval(), x)
    if not torch.equal(train, serve):
        gap = (train.double() - serve.double()).abs().max().item()
        raise AssertionError(
            f"{subject.name(layer)}: training and evaluation differ on the same input, by up to {gap:.4g}."
        )


def check_eval_independent_of_neighbours(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """In evaluation f(x)[i] = f(x[i:i+1]): an example's output does not depend on what else is in the batch.

    Raises:
        AssertionError: it does, by more than `ulps` (by default `ULPS`).

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_eval_independent_of_neighbours(BatchNorm1d(3), torch.randn(4, 3))
    """
    serving = copy.deepcopy(layer).eval()
    together = subject.run(serving, x)
    for i in range(x.shape[0]):
        alone = subject.run(serving, x[i : i + 1])
        what, exact = f"{subject.name(layer)} of example {i} alone", together[i : i + 1].double()
        assert_close(alone, exact, ulps=ulps, scale=subject.scale(x, exact), what=what)


def check_depends_on_neighbours(layer: nn.Module, x: Tensor) -> None:
    """In training the first example's output changes with its neighbours: so for batch norm, and only there.

    Raises:
        AssertionError: it stays the same when the other examples are scaled by 3 and moved by 1.

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_depends_on_neighbours(BatchNorm1d(3), torch.randn(4, 3))
    """
    training = copy.deepcopy(layer).train()
    other = torch.cat([x[:1], 3 * x[1:] + 1])
    if torch.equal(subject.run(training, x)[0], subject.run(training, other)[0]):
        raise AssertionError(
            f"{subject.name(layer)}: the first example's output does not depend on its neighbours."
        )


def check_batch_order(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """f(x[order]) = f(x)[order]: the order of the examples does not matter; checked for the reversed one.

    Raises:
        AssertionError: it does, by more than `ulps` (by default `ULPS`).

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_batch_order(BatchNorm1d(3), torch.randn(4, 3))
    """
    exact = subject.run(subject.double(layer, x.dtype), x.double()).flip(0)
    what, scale = f"{subject.name(layer)} of the batch reversed", subject.scale(x, exact)
    assert_close(subject.run(layer, x.flip(0)), exact, ulps=ulps, scale=scale, what=what)


def check_layouts(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """The same values give the same answer however they lie in memory, and channels_last stays channels_last.

    Raises:
        AssertionError: an answer differs by more than `ulps` (by default `ULPS`), or the format is lost.

    Example:
        >>> from normalcy.nn import InstanceNorm2d
        >>> check_layouts(InstanceNorm2d(3), torch.randn(2, 3, 4, 5))
    """
    exact = subject.run(subject.double(layer, x.dtype), x.double().contiguous())
    for name, laid in layouts(x):
        y = subject.run(layer, laid)
        what, scale = f"{subject.name(layer)} of a {name} input", subject.scale(x, exact)
        assert_close(y, exact, ulps=ulps, scale=scale, what=what)
        if name.startswith("channels_last") and not y.is_contiguous(memory_format=getattr(torch, name)):
            raise AssertionError(
                f"{subject.name(layer)}: a {name} input gives an output with strides {y.stride()}."
            )


def check_constant_gives_bias(
    layer: nn.Module, shape: Sequence[int], value: float = 0.1, *, dtype: torch.dtype = torch.float32
) -> None:
    """A constant input gives exactly the bias, whatever the constant, and whatever the bias.

    For norms that centre by statistics of their input, with eps > 0. The bias is the layer's parameter of
    that name (or `beta`), which is given other values here; without one the output must be 0.

    Raises:
        AssertionError: it gives something else.

    Example:
        >>> from normalcy.nn import LayerNorm
        >>> check_constant_gives_bias(LayerNorm(1000), (2, 1000))
    """
    probe = copy.deepcopy(layer)
    constant = torch.full(tuple(shape), value, dtype=dtype)
    owned = subject.parameter(probe, subject.BIASES)
    if owned is not None:
        with torch.no_grad():
            owned[1].copy_(torch.linspace(-0.7, 1.9, owned[1].numel()).view_as(owned[1]))
    got, at_zero = subject.run(probe, constant), subject.run(probe, torch.zeros_like(constant))
    if not torch.equal(got, at_zero):
        gap = (got.double() - at_zero.double()).abs().max().item()
        raise AssertionError(
            f"{subject.name(layer)}: the constant {value:g} misses the bias by up to {gap:.4g}."
        )
    bias: Tensor | None = torch.zeros(())
    if owned is not None:
        bias = subject.spread_out(*owned, shape)
    if bias is not None and not torch.equal(got, bias.to(got.dtype).expand(got.shape)):
        gap = (got.double() - bias.double()).abs().max().item()
        raise AssertionError(
            f"{subject.name(layer)}: a constant gives something else than the bias, by up to {gap:.4g}."
        )


def check_gradient_sums_to_zero(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """Σdx = 0 over the values of each statistic, where the layer centres by statistics of its input.

    A shift of those values changes nothing. Which share a statistic is found by trying. Zero to the rounding
    of what cancels: `ulps` (by default `ULPS`) of Σ rstd·(|g| + mean|g| + |x̂|·mean|g·x̂|), g = dy·weight.

    Raises:
        AssertionError: a sum is larger.

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_gradient_sums_to_zero(BatchNorm1d(3), torch.randn(4, 3))
    """
    leaf = x.detach().clone().requires_grad_()
    y = copy.deepcopy(layer)(leaf)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).cos().to(y.dtype).view(y.shape)
    (dx,) = torch.autograd.grad(y, leaf, dy, allow_unused=True) if y.requires_grad else (None,)
    if dx is None:
        raise AssertionError(f"{subject.name(layer)}: no gradient reaches x.")
    shared = subject.shared(layer, x, dx, dy)
    totals = shared.dx.sum(1).abs()
    allowed = (ULPS[x.dtype] if ulps is None else ulps) * torch.finfo(x.dtype).eps * shared.scale.sum(1)
    if not bool((totals <= allowed).all()):
        worst = int((totals - allowed).nan_to_num(nan=torch.inf).argmax())
        raise AssertionError(
            f"{subject.name(layer)}: over the {shared.dx.shape[1]} values of a statistic dx sums to "
            f"{totals[worst].item():.4g}; allowed: {allowed[worst].item():.4g}."
        )


def check_gradients(layer: nn.Module, x: Tensor, *, order: int = 2) -> None:
    """First and second derivatives in x and every parameter agree with finite differences, in float64.

    Keep x small: each derivative of each value is taken by differences.

    Args:
        layer: in the mode that is to be checked.
        x: a small input; used in float64.
        order: 1 or 2.

    Raises:
        AssertionError: they do not agree.

    Example:
        >>> from normalcy.nn import RMSNorm
        >>> check_gradients(RMSNorm(3), torch.tensor([[1.0, -2.0, 4.0], [5.0, 3.0, -1.0]]))
    """
    wide = subject.double(layer, torch.float64)
    names = [name for name, _ in wide.named_parameters()]

    def function(at: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(wide, dict(zip(names, parameters, strict=True)), (at,))

    points = [x.detach().double(), *(p.detach() for p in wide.parameters())]
    inputs = tuple(point.clone().requires_grad_() for point in points)
    for check in (gradcheck, gradgradcheck)[:order]:
        try:
            check(function, inputs)
        except GradcheckError as error:
            raise AssertionError(f"{subject.name(layer)}: {' '.join(str(error).split())}") from None
