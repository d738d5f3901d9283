"""`Fused`: a norm with the residual and the activation that follow it, in one pass.

Not a norm of its own: its child is, and everything that reads or changes norms finds it there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from normalcy.checks import check_activation, check_after, check_input
from normalcy.errors import ArgumentError, TypeMismatchError
from normalcy.kernels.activation import activated
from normalcy.masks import of_lengths
from normalcy.nn.base import Layer, TimeLayer
from normalcy.passes import Extras

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOOKS_OF_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class Fused(nn.Module):
    """Compute activation(norm(x) + residual), in one pass forward and backward.

    Saved for the backward pass is what the norm saves; with a residual also one bit per element for "relu"
    and "leaky_relu", or the residual itself for "gelu" and "silu".

    In sequence, with the same result, where one pass would hide something: the child is not one of these
    layers (converted, folded, parametrized), it has hooks, or a torch-function mode looks on. A mask that
    such a child cannot take is refused.

    Args:
        norm: one of `normalcy.nn`'s layers; a tool may replace it later by any module.
        activation: "relu", "leaky_relu" (slope 0.01), "gelu" or "silu"; None for none.

    Raises:
        ArgumentError: an activation that there is not, or a norm that is no module.
        TypeMismatchError (in forward): a mask, and a child that takes none.

    Example:
        >>> from normalcy.nn import BatchNorm2d
        >>> block = Fused(BatchNorm2d(3), "relu")
        >>> x = torch.randn(4, 3, 5, 5)
        >>> y = block(x, residual=x)
        >>> bool((y >= 0).all()), list(block.state_dict())[:2]
        (True, ['norm.weight', 'norm.bias'])
    """

    def __init__(self, norm: nn.Module, activation: str | None = None) -> None:
        super().__init__()
        if not isinstance(norm, nn.Module):
            raise ArgumentError(f"Fused got a {type(norm).__name__} as norm", "a torch.nn.Module")
        check_activation(activation, "Fused")
        self.norm = norm
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Compute activation(norm(x) + residual); masked places are 0.

        Args:
            x: what the child takes.
            residual: the shape and dtype of x.
            mask: bool, broadcastable to x, True = valid.
            lengths: instead of a mask, where the child takes them: example i is valid up to lengths[i].
        """
        if lengths is not None:
            mask = self._mask_of(lengths, mask, x)
        if _in_one_pass(self.norm):
            return self.norm.normalize(x, Extras(mask, None, residual, self.activation))  # type: ignore[operator,no-any-return]
        return self._in_sequence(x, residual, mask)

    def _mask_of(self, lengths: Tensor, mask: Tensor | None, x: Tensor) -> Tensor:
        check_input(x, "Fused")  # a tracer gives every argument, and is told what it can do
        if mask is not None:
            raise ArgumentError("Fused got mask and lengths", "one of the two")
        if not isinstance(self.norm, TimeLayer):
            raise TypeMismatchError(
                f"Fused got lengths, and its norm is a {type(self.norm).__name__}, which takes none",
                "a mask, or a norm of normalcy.nn whose last axis may be time",
            )
        return of_lengths(lengths, x.shape)

    def _in_sequence(self, x: Tensor, residual: Tensor | None, mask: Tensor | None) -> Tensor:
        if mask is not None and not _takes_mask(self.norm):
            raise TypeMismatchError(
                f"Fused got a mask, and its norm is a {type(self.norm).__name__}, which takes none",
                "one of normalcy.nn's layers",
                "call normalcy.nn.adopt(model), or leave the mask out",
            )
        if residual is not None:
            check_after(x, residual, None, "Fused")
        y: Tensor = self.norm(x) if mask is None else self.norm(x, mask=mask)
        if residual is not None:
            y = y + residual
        if mask is not None:  # before the activation, which takes 0 to 0, and NaN's gradient to NaN
            y = torch.where(mask, y, 0.0)
        return activated(y, self.activation)

    def why_not_torch(self) -> str:
        """A sentence why PyTorch's own layer cannot be what this one is."""
        return "PyTorch has no layer of this kind; with PyTorch's own norm in it, it runs in sequence"

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` asks first."""
        raise TypeMismatchError(
            "Fused is being scripted", "a norm and what follows it as layers of their own", "use torch.export"
        )

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"


def _in_one_pass(norm: nn.Module) -> bool:
    """One of our layers, exactly, and nothing that would miss its call."""
    if (
        not isinstance(norm, Layer)
        or type(norm).__module__.partition(".")[0] != __package__.partition(".")[0]
    ):
        return False
    if "forward" in norm.__dict__:  # replaced on the object, as tools that move weights do
        return False
    if any(getattr(norm, name) for name in _HOOKS) or any(getattr(hooks_of_all, n) for n in _HOOKS_OF_ALL):
        return False
    return torch._C._len_torch_function_stack() == 0  # noqa: SLF001 - no public name


def _takes_mask(norm: Any) -> bool:
    try:
        return "mask" in inspect.signature(norm.forward).parameters
    except (TypeError, ValueError):
        return False
