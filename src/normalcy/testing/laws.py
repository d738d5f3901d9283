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
    exact = _run(_double(layer), moved.double() - shift)
    assert_close(_run(layer, moved), exact, ulps=ulps, what=f"{_name(layer)} of x + {shift:g}")


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
    exact = _run(_double(layer), moved.double() / scale)
    assert_close(_run(scaled, moved), exact, ulps=ulps, what=f"{_name(layer)} of {scale:g}·x")


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
    train, serve = _run(copy.deepcopy(layer).train(), x), _run(copy.deepcopy(layer).eval(), x)
    if not _equal(train, serve):
        gap = (train.double() - serve.double()).abs().max().item()
        raise AssertionError(
            f"{_name(layer)}: training and evaluation differ on the same input, by up to {gap:.4g}."
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
    together = _run(serving, x)
    for i in range(x.shape[0]):
        alone = _run(serving, x[i : i + 1])
        what = f"{_name(layer)} of example {i} alone"
        assert_close(alone, together[i : i + 1].double(), ulps=ulps, what=what)


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
    if _equal(_run(training, x)[0], _run(training, other)[0]):
        raise AssertionError(f"{_name(layer)}: the first example's output does not depend on its neighbours.")


def check_batch_order(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """f(x[order]) = f(x)[order]: the order of the examples does not matter; checked for the reversed one.

    Raises:
        AssertionError: it does, by more than `ulps` (by default `ULPS`).

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_batch_order(BatchNorm1d(3), torch.randn(4, 3))
    """
    exact = _run(_double(layer), x.double()).flip(0)
    assert_close(_run(layer, x.flip(0)), exact, ulps=ulps, what=f"{_name(layer)} of the batch reversed")


def check_layouts(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """The same values give the same answer however they lie in memory, and channels_last stays channels_last.

    Raises:
        AssertionError: an answer differs by more than `ulps` (by default `ULPS`), or the format is lost.

    Example:
        >>> from normalcy.nn import InstanceNorm2d
        >>> check_layouts(InstanceNorm2d(3), torch.randn(2, 3, 4, 5))
    """
    exact = _run(_double(layer), x.double().contiguous())
    for name, laid in layouts(x):
        y = _run(layer, laid)
        assert_close(y, exact, ulps=ulps, what=f"{_name(layer)} of a {name} input")
        if name.startswith("channels_last") and not y.is_contiguous(memory_format=getattr(torch, name)):
            raise AssertionError(f"{_name(layer)}: a {name} input gives an output with strides {y.stride()}.")


def check_constant_gives_bias(
    layer: nn.Module, shape: Sequence[int], value: float = 0.1, *, dtype: torch.dtype = torch.float32
) -> None:
    """A constant input gives exactly the bias, whatever the constant: f(c) = f(0), bit by bit.

    For norms that centre by statistics of their input, with eps > 0.

    Raises:
        AssertionError: it gives something else.

    Example:
        >>> from normalcy.nn import LayerNorm
        >>> check_constant_gives_bias(LayerNorm(1000), (2, 1000))
    """
    constant = torch.full(tuple(shape), value, dtype=dtype)
    got, bias = _run(layer, constant), _run(layer, torch.zeros_like(constant))
    if not _equal(got, bias):
        gap = (got.double() - bias.double()).abs().max().item()
        raise AssertionError(f"{_name(layer)}: the constant {value:g} misses the bias by up to {gap:.4g}.")


def check_gradient_sums_to_zero(layer: nn.Module, x: Tensor, *, ulps: float | None = None) -> None:
    """Σdx = 0 where the layer centres by statistics of its input, since a shift of the input changes nothing.

    Zero to the rounding of what cancels: `ulps` (by default `ULPS`) of Σ|dx|.

    Raises:
        AssertionError: the sum is larger.

    Example:
        >>> from normalcy.nn import BatchNorm1d
        >>> check_gradient_sums_to_zero(BatchNorm1d(3), torch.randn(4, 3))
    """
    leaf = x.detach().clone().requires_grad_()
    y = copy.deepcopy(layer)(leaf)
    y.backward(torch.linspace(-1, 2, y.numel(), dtype=torch.float64).cos().to(y.dtype).view(y.shape))
    dx = leaf.grad if leaf.grad is not None else torch.full_like(leaf, torch.nan)
    total, size = dx.double().sum(), dx.double().abs().sum()
    allowed = (ULPS[x.dtype] if ulps is None else ulps) * torch.finfo(x.dtype).eps * size
    if not bool(total.abs() <= allowed):
        raise AssertionError(
            f"{_name(layer)}: dx sums to {total.item():.4g}, its absolute values to {size.item():.4g}; "
            f"allowed: {allowed.item():.4g}."
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
    wide = _double(layer)
    names = [name for name, _ in wide.named_parameters()]

    def function(at: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(wide, dict(zip(names, parameters, strict=True)), (at,))

    points = [x.detach().double(), *(p.detach() for p in wide.parameters())]
    inputs = tuple(point.clone().requires_grad_() for point in points)
    for check in (gradcheck, gradgradcheck)[:order]:
        try:
            check(function, inputs)
        except GradcheckError as error:
            raise AssertionError(f"{_name(layer)}: {' '.join(str(error).split())}") from None


def _double(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).double()


def _run(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = copy.deepcopy(layer)(x)
    return y


def _name(layer: nn.Module) -> str:
    return type(layer).__name__


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
