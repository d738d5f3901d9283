"""Which tensors of a checkpoint make a normalization layer, by their names and shapes alone.

Not for judging them. What the names cannot tell (momentum, eps, mode, which norm it is) is not guessed: the
defaults of the framework that uses such names are assumed, and said to be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from normalcy.checkpoint.entries import Entry, Weights
from normalcy.conventions import FLAX, KERAS, TORCH, Convention
from normalcy.report import Item

Ground = Literal["statistics", "name", "shape"]
"""On what ground tensors are taken for a norm: running statistics, the name, or γ and β of one shape."""

_ROLES = {
    "running_mean": "mean",
    "running_var": "var",
    "num_batches_tracked": "updates",
    "weight": "weight",
    "bias": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "moving_var": "var",
    "gamma": "weight",
    "beta": "bias",
    "scale": "weight",
    "running_std": "other",
    "running_rms": "other",
}
_KERAS_NAMES = ("moving_mean", "moving_variance", "moving_var")
# A letter before or after would make another word of it: "lnx" is no "ln", and "normal" is no "norm".
_NORM_NAME = re.compile(r"(?<![a-z])(?:ln|bn|gn|rms|lnorm)(?![a-z])|norm(?!al(?!iz))", re.IGNORECASE)
_KINDS = (
    ("rms", re.compile(r"rms", re.IGNORECASE)),
    ("instance", re.compile(r"instance_?norm", re.IGNORECASE)),
    ("group", re.compile(r"group_?norm|(?<![a-z])gn(?![a-z])", re.IGNORECASE)),
    ("batch", re.compile(r"batch_?norm|(?<![a-z])bn(?![a-z])", re.IGNORECASE)),
)


class Layer(nn.Module):
    """The tensors of one norm as a checkpoint holds them; it has no forward.

    Attributes:
        where: the path of the module, as the names of its tensors begin.
        kind: "batch" where there are running statistics (instance norm looks the same), else what its name
            says, or "unknown".
        ground: on what ground it is taken for a norm.
        convention: whose names its tensors have.
        momentum, eps: that convention's defaults: the weight of the new value, and eps; both are assumed.
        weight, bias, running_mean, running_var, num_batches_tracked: None where the file has none.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        where: str,
        kind: str,
        ground: Ground,
        convention: Convention,
        tensors: Mapping[str, Tensor | None],
    ) -> None:
        super().__init__()
        self.where, self.kind, self.ground, self.convention = where, kind, ground, convention
        self.momentum = convention.weight_of_new()
        self.eps = convention.default_eps("batch")
        for role, attribute in (
            ("mean", "running_mean"),
            ("var", "running_var"),
            ("updates", "num_batches_tracked"),
            ("weight", "weight"),
            ("bias", "bias"),
        ):
            self.register_buffer(attribute, tensors.get(role))

    @property
    def channels(self) -> int:
        """The number of values that γ, or the running mean, has."""
        held = self.running_mean if self.running_mean is not None else self.weight
        return held.numel() if held is not None else 0

    @property
    def as_built(self) -> bool | None:
        """Whether every γ is exactly 1 or 0 and every β 0, as before training; None without either.

        The last norm of a residual branch is often built with γ = 0.
        """
        if self.weight is None and self.bias is None:
            return None
        same = self.weight is None or bool(((self.weight == 1) | (self.weight == 0)).all())
        return same and (self.bias is None or bool((self.bias == 0).all()))


class Checkpoint(nn.Module):
    """The norms of a checkpoint.

    Attributes:
        layers: the norms, in the order of the file.
        unrecognized: what has some of a norm's names and is none that is known, each with the reason.
        unread: norms whose values the file does not hold.
        weights: what they were found in.
        trained: how many floating-point values the file holds that are no running statistics; values that
            several names share are counted once.
    """

    def __init__(
        self, weights: Weights, layers: Iterable[Layer], unrecognized: Iterable[Item], unread: Iterable[Item]
    ) -> None:
        super().__init__()
        self.weights = weights
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.unrecognized, self.unread = tuple(unrecognized), tuple(unread)
        counted: dict[object, int] = {}
        for name, entry in weights.entries.items():
            if entry.floating and _split(name)[1] not in ("mean", "var"):
                counted[entry.memory or name] = entry.size
        self.trained = sum(counted.values())


def found_in(weights: Weights) -> Checkpoint:
    """The norms among the tensors of a checkpoint; only their values are read.

    Running mean and variance of one shape make a norm whatever it is called (`running_mean`, `running_var`;
    `moving_mean`, `moving_variance`; `batch_stats/…/mean`, `…/var`). Without statistics, γ and β of one shape
    make one, or γ alone where the name says norm, ln, bn, gn or rms: a vector `weight` alone is as well a
    PReLU's slope or a scale.

    Example:
        >>> from normalcy.checkpoint.entries import of_object
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.PReLU(4), nn.LayerNorm(4))
        >>> entries, notes = of_object(model.state_dict())
        >>> [(layer.where, layer.kind, layer.ground) for layer in found_in(Weights(entries, "torch")).layers]
        [('1', 'batch', 'statistics'), ('3', 'unknown', 'shape')]
    """
    layers: list[Layer] = []
    unrecognized: list[Item] = []
    unread: list[Item] = []
    for where, (roles, convention) in _gathered(weights.entries).items():
        made = _layer(where, roles, convention)
        if isinstance(made, Layer):
            layers.append(made)
        elif made is not None:
            (unrecognized if all(entry.held for entry in roles.values()) else unread).append(
                Item(where, made)
            )
    return Checkpoint(weights, layers, unrecognized, unread)


def _gathered(entries: Mapping[str, Entry]) -> dict[str, tuple[dict[str, Entry], Convention]]:
    """The tensors with a known role by their module's path."""
    flax = any(re.match(r"batch_stats[./]", name) for name in entries)
    places: dict[str, dict[str, Entry]] = {}
    keras: set[str] = set()
    for name, entry in entries.items():
        where, role, last = _split(name, flax=flax)
        if role is None:
            continue
        held = places.setdefault(where, {})
        if role not in held or last != "scale":
            held[role] = entry
        if last in _KERAS_NAMES:
            keras.add(where)
    return {
        where: (roles, FLAX if flax else KERAS if where in keras else TORCH)
        for where, roles in places.items()
    }


def _split(name: str, *, flax: bool = True) -> tuple[str, str | None, str]:
    """The module's path, the tensor's role in a norm if it has one, and its own name."""
    parts = re.split(r"[./]", name.removesuffix(":0"))
    last, collection = parts[-1], parts[0] if flax else ""
    if collection == "batch_stats":
        return ".".join(parts[1:-1]), {"mean": "mean", "var": "var"}.get(last), last
    inside = parts[1:-1] if collection == "params" else parts[:-1]
    return ".".join(inside), _ROLES.get(last), last


def _layer(where: str, roles: dict[str, Entry], convention: Convention) -> Layer | str | None:
    """The norm that these tensors make, a sentence why they make none although they look so, or None."""
    weight, bias = roles.get("weight"), roles.get("bias")
    if "other" in roles:
        return "it keeps running statistics that are no mean and variance"
    if "mean" in roles or "var" in roles:
        mean, var = roles.get("mean"), roles.get("var")
        why = _no_statistics(mean, var)
        if why or mean is None:
            return why
        taken = {
            role: entry
            for role, entry in roles.items()
            if role in ("mean", "var")
            or (role == "updates" and entry.size == 1)
            or (role in ("weight", "bias") and entry.shape == mean.shape and entry.floating)
        }
        kind: str = "instance" if _kind(where) == "instance" else "batch"
        ground: Ground = "statistics"
    else:
        if weight is None or not weight.floating or not weight.shape or not weight.size:
            return None
        paired = bias is not None and bias.shape == weight.shape and bias.floating
        by_name = _says_norm(where)
        if (bias is not None and not paired) or not (paired or (by_name and len(weight.shape) == 1)):
            return None
        taken = {role: roles[role] for role in ("weight", "bias") if role in roles}
        kind, ground = _kind(where), "name" if by_name else "shape"
    if not all(entry.held for entry in taken.values()):
        return "its tensors are on the meta device: the file has their shapes and no values"
    return Layer(
        where, kind, ground, convention, {role: _value(role, entry) for role, entry in taken.items()}
    )


def _no_statistics(mean: Entry | None, var: Entry | None) -> str:
    if mean is None or var is None:
        had, lacks = ("variance", "mean") if mean is None else ("mean", "variance")
        return f"it keeps a running {had} and no running {lacks}"
    if mean.shape != var.shape:
        return f"its running mean has shape {mean.shape} and its running variance {var.shape}"
    if len(mean.shape) != 1 or not mean.size:
        return f"its running mean has shape {mean.shape}, which is not one value for each channel"
    if not (mean.floating and var.floating):
        return f"its running mean and variance are of dtype {mean.dtype} and {var.dtype}, not floating point"
    return ""


def _value(role: str, entry: Entry) -> Tensor | None:
    """The tensor; one-byte floats, with which PyTorch cannot compute, as float32; a counter as an integer."""
    tensor = entry.read()
    if role == "updates":  # an average over models may have made it a fraction
        if tensor.is_complex():
            return None
        counted = float(tensor)
        return torch.tensor(round(counted)) if math.isfinite(counted) and counted >= 0 else None
    return tensor.to(torch.float32) if tensor.element_size() == 1 else tensor


def _own_name(where: str) -> str:
    """The last name of a path that is more than a number: that of a list names its parts."""
    return next((part for part in reversed(where.split(".")) if part and not part.isdecimal()), "")


def _says_norm(where: str) -> bool:
    return _NORM_NAME.search(_own_name(where)) is not None


def _kind(where: str) -> str:
    name = _own_name(where)
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "unknown")
