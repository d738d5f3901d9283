"""What every layer here shares: `forward` with a mask, and how a scripted layer becomes PyTorch's operator.

Not a layer itself, and no place for statistics or parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normalcy.conventions import TORCH
from normalcy.errors import TypeMismatchError
from normalcy.passes import Extras


class Layer(nn.Module):
    """One body for each family: `normalize` computes, `forward` and `Fused` call it."""

    convention = TORCH  # no annotation: scripts would read it

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `input`; see the class.

        Args:
            input: of the shape the class says.
            mask: bool, broadcastable to the input, True = valid. Other places count nowhere, whatever they
                hold (NaN too); their output and gradient are 0.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            assert mask is None, "a scripted layer takes no mask"  # noqa: S101 - what a script can raise
            return self._scripted(input)
        else:  # noqa: RET505 - a script compiles what follows a return, but not an `else` like this one
            return self.normalize(input, Extras(mask))

    def normalize(self, input: Tensor, extras: Extras) -> Tensor:
        """Normalize with what may stand around a norm in the same pass: mask, residual, activation."""
        raise NotImplementedError

    def _scripted(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    def why_not_torch(self) -> str | None:
        """A sentence why PyTorch's own layer cannot be what this one is, or None if it can."""
        return None

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` asks first."""
        why = self.why_not_torch()
        if why:
            raise TypeMismatchError(
                f"{type(self).__name__} is being scripted, but {why}",
                "a layer that PyTorch's own could be",
                "use torch.export, or convention=normalcy.conventions.TORCH",
            )
        return self


class TimeLayer(Layer):
    """A layer over channels and space, whose last axis may be time."""

    def forward(self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Normalize `input`; see the class.

        Args:
            input: of the shape the class says.
            mask: bool, broadcastable to the input, True = valid. Other places count nowhere, whatever they
                hold (NaN too); their output and gradient are 0.
            lengths: instead of a mask, where the last axis is time: example i is valid up to lengths[i].
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            assert mask is None and lengths is None, "a scripted layer takes no mask"  # noqa: PT018, S101
            return self._scripted(input)
        else:  # noqa: RET505 - as above
            return self.normalize(input, Extras(mask, lengths))
