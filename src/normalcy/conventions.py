"""What frameworks mean by momentum, eps and a stored variance: data only, no torch.

Rows come from each framework's own documentation or source, named in `source`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from normalcy.errors import ArgumentError

__all__ = ["DEFAULT", "FLAX", "KERAS", "ONNX", "TORCH", "Convention", "Default", "Eps", "replace"]


class Default(Enum):
    """The type of `DEFAULT`."""

    DEFAULT = "as the convention says"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = Default.DEFAULT
"""Stands for eps or momentum not given (None means something: cumulative, or the dtype's own eps)."""


@dataclass(frozen=True, slots=True)
class Eps:
    """Default eps of each norm; None: the machine epsilon of the dtype that is computed in."""

    batch: float | None
    layer: float | None
    group: float | None
    instance: float | None
    rms: float | None


@dataclass(frozen=True, slots=True)
class Convention:
    """How a framework keeps running statistics, and its defaults.

    Attributes:
        name: the framework.
        weighs: what its momentum is the weight of: the "new" batch value or the "old" running one.
        momentum: its default, in its own meaning.
        correction: degrees of freedom taken off the variance that is *stored*: 1 = unbiased, 0 = biased.
            The variance that normalizes is always biased.
        cumulative: what momentum=None averages: "batches" with equal weight (the mean of their variances),
            or the "values" of all batches pooled (weighted by count, the spread between batches added).
        debias: divide the weight of the initial state out, so that after k updates the stored value is
            the weighted average of what was seen: the k-th new value weighs m/(1 − (1−m)ᵏ).
        eps: the defaults, inside the root.
        source: where this is documented.

    Example:
        >>> KERAS.weight_of_new(0.99), TORCH.weight_of_new(0.1), TORCH.weight_of_new(None)
        (0.01, 0.1, None)
        >>> replace(TORCH, debias=True).debias
        True
    """

    name: str
    weighs: Literal["new", "old"]
    momentum: float | None
    correction: Literal[0, 1]
    eps: Eps
    cumulative: Literal["batches", "values"] = "batches"
    debias: bool = False
    source: str = ""

    def weight_of_new(self, momentum: float | Default | None = DEFAULT) -> float | None:
        """`momentum` in this convention's meaning, as the weight of the new value; None stays None.

        Raises:
            ArgumentError: momentum is outside [0, 1].
        """
        given = self.momentum if isinstance(momentum, Default) else momentum
        if given is None:
            return None
        if not 0 <= given <= 1:
            raise ArgumentError(
                f"momentum={given}",
                f"a number from 0 to 1, or None ({self.name}: the weight of the {self.weighs} value)",
            )
        # 1 − 0.99 is 0.010000000000000009: round to the digits that were meant
        return given if self.weighs == "new" else round(1 - given, 15)

    def default_eps(self, norm: str, eps: float | Default | None = DEFAULT) -> float | None:
        """`eps` if it is given, else this convention's default for `norm` ("batch", "layer", ...)."""
        if isinstance(eps, Default):
            default: float | None = getattr(self.eps, norm)
            return default
        return eps


TORCH = Convention(
    name="PyTorch",
    weighs="new",
    momentum=0.1,
    correction=1,
    eps=Eps(batch=1e-5, layer=1e-5, group=1e-5, instance=1e-5, rms=None),
    source="docs.pytorch.org: torch.nn.BatchNorm2d",
)
KERAS = Convention(
    name="Keras 3",
    weighs="old",
    momentum=0.99,
    correction=0,
    eps=Eps(batch=1e-3, layer=1e-3, group=1e-3, instance=1e-3, rms=1e-6),
    source="keras/src/layers/normalization/batch_normalization.py",
)
FLAX = Convention(
    name="Flax",
    weighs="old",
    momentum=0.99,
    correction=0,
    eps=Eps(batch=1e-5, layer=1e-6, group=1e-6, instance=1e-6, rms=1e-6),
    source="flax/linen/normalization.py",
)
ONNX = Convention(
    name="ONNX",
    weighs="old",
    momentum=0.9,
    correction=0,
    eps=Eps(batch=1e-5, layer=1e-5, group=1e-5, instance=1e-5, rms=1e-5),
    source="onnx/docs/Operators.md: BatchNormalization-15",
)
