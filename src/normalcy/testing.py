"""The tolerance rule, and the laws of normalization as checks to run on a layer of your own.

Not a test framework: every check raises AssertionError with one sentence, and any runner will do. Checks
work on copies: the layer's parameters, statistics and mode stay as they are.

**The rule.** A result may miss the float64 answer by what plain code of the same dtype misses, plus a few
ulps. One ulp is eps(dtype) times a scale: what the result was computed *from*, since a difference of large
numbers cannot be as exact as its own small value suggests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck

from normalcy.errors import ArgumentError

__all__ = [
    "ULPS",
    "assert_close",
    "assert_no_worse_than_plain",
    "check_batch_order",
    "check_constant_gives_bias",
    "check_depends_on_neighbours",
    "check_eval_independent_of_neighbours",
    "check_gradient_sums_to_zero",
    "check_gradients",
    "check_layouts",
    "check_scale_invariance",
    "check_shift_invariance",
    "check_train_equals_eval",
    "errors_in_ulps",
    "layouts",
]

ULPS: Mapping[torch.dtype, float] = {
    torch.float64: 4.0,
    torch.float32: 4.0,
    torch.bfloat16: 1.0,
    torch.float16: 1.0,
}
"""How many ulps a well-computed normalization may be off, by dtype.

| dtype | ulps | why |
|---|---|---|
| float64, float32 | 4 | x − s, − r, rounding of rstd, · rstd, · γ, + β: six halves, and one to spare |
| bfloat16, float16 | 1 | computed in float32, then one rounding of half an ulp; as much again for ties |
"""


def errors_in_ulps(actual: Tensor, exact: Tensor, scale: Tensor | None = None) -> Tensor:
    """|actual − exact| / (eps(dtype of actual) · scale), element by element, in float64.

    Args:
        actual: the result to judge, any floating dtype.
        exact: the float64 answer, of the same shape.
        scale: the size of what the result was computed from, which broadcasts to it; by default |exact|, and
            nowhere less than the mean of |exact|.

    Example:
        >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> errors_in_ulps(torch.tensor([1.0, 2.0 + 2**-22]), exact)
        tensor([0., 1.], dtype=torch.float64)
    """
    info = torch.finfo(actual.dtype)
    exact = exact.detach().double()
    size = _scale(exact) if scale is None else scale.detach().double()
    error = (actual.detach().double() - exact).abs()
    agree = (actual.detach().double() == exact) | (actual.isnan() & exact.isnan())
    return torch.where(agree, 0.0, error / (info.eps * size.abs().clamp(min=info.tiny)))


def assert_close(
    actual: Tensor, exact: Tensor, *, ulps: float | None = None, scale: Tensor | None = None, what: str = ""
) -> None:
    """Raise unless `actual` lies within `ulps` ulps of the float64 answer; NaN only where the answer is NaN.

    Args:
        actual: the result to judge.
        exact: the float64 answer.
        ulps: how many; by default `ULPS` of the dtype of `actual`.
        scale: as in `errors_in_ulps`.
        what: names the result in the sentence.

    Raises:
        AssertionError: another shape, or an element too far off; the worst one is named.

    Example:
        >>> assert_close(torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64))
        >>> assert_close(torch.tensor([0.2]), torch.tensor([0.1], dtype=torch.float64), what="y")
        Traceback (most recent call last):
        AssertionError: y at (0,): 0.20000000298023224 is 8.389e+06 ulps from 0.1; allowed: 4.
    """
    _same_shape(actual, exact, what)
    allowed = ULPS[actual.dtype] if ulps is None else ulps
    error = errors_in_ulps(actual, exact, scale)
    worst = _worst(error - allowed)
    if worst is not None:
        raise AssertionError(
            f"{what or 'result'} at {worst}: {actual[worst].item()} is {error[worst].item():.4g} ulps "
            f"from {exact[worst].item()}; allowed: {allowed:g}."
        )


def assert_no_worse_than_plain(
    fast: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    slack_ulps: float | None = None,
    scale: Tensor | None = None,
    what: str = "",
) -> None:
    """Raise unless `fast` misses the float64 answer by no more than plain code does, plus `slack_ulps`.

    Args:
        fast: the result to judge.
        plain: the same by straightforward code in the same dtype.
        exact: the float64 answer.
        slack_ulps: by default `ULPS` of the dtype of `fast`.
        scale: as in `errors_in_ulps`.
        what: names the result in the sentence.

    Raises:
        AssertionError: another shape, or an element too far off; the worst is named with all three values.

    Example:
        >>> exact = torch.tensor([1 / 3], dtype=torch.float64)
        >>> assert_no_worse_than_plain(exact.float(), exact.bfloat16(), exact)
    """
    _same_shape(fast, exact, what)
    _same_shape(plain, exact, what)
    slack = ULPS[fast.dtype] if slack_ulps is None else slack_ulps
    unit = torch.finfo(fast.dtype).eps / torch.finfo(plain.dtype).eps
    error, allowed = errors_in_ulps(fast, exact, scale), errors_in_ulps(plain, exact, scale) / unit + slack
    alike = (fast == plain) | (fast.isnan() & plain.isnan() & exact.isnan())
    worst = _worst(torch.where(alike, 0.0, error - allowed))
    if worst is not None:
        raise AssertionError(
            f"{what or 'result'} at {worst}: fast {fast[worst].item()}, plain {plain[worst].item()}, exact "
            f"{exact[worst].item()}: {error[worst].item():.4g} ulps; allowed: {allowed[worst].item():.4g}."
        )


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


def _scale(exact: Tensor) -> Tensor:
    finite = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    return finite.clamp(min=finite.mean()) if finite.numel() else finite


def _same_shape(actual: Tensor, exact: Tensor, what: str) -> None:
    if actual.shape != exact.shape:
        raise AssertionError(f"{what or 'result'}: shape {tuple(actual.shape)} is not {tuple(exact.shape)}.")


def _worst(excess: Tensor) -> tuple[int, ...] | None:
    """Where the largest excess over the allowed error is, or None if there is none; NaN is an excess."""
    if excess.numel() == 0 or bool((excess <= 0).all()):
        return None
    at = int(excess.nan_to_num(nan=torch.inf).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), excess.shape))
