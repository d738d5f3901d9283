"""Which modules and functions are normalizers that are known, and which merely look like one.

Not for wiring: nothing here looks at what feeds what.

Known are PyTorch's layers, this library's, and subclasses of either that keep the forward. Two things carry
"norm" in their name and are not meant: a reparametrized weight (weight norm, spectral norm) normalizes
no activation, and `F.normalize` scales vectors to length 1 without statistics. A module that merely holds a
known norm ("PreNorm") is looked into, not listed. Local response normalization does normalize activations,
so it is listed.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from normalcy.flow import Flow, Step, Value, base_kind
from normalcy.nn import LayerNorm2d
from normalcy.report import Item

PRODUCERS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv1d": (nn.Conv1d,),
    "conv2d": (nn.Conv2d,),
    "conv3d": (nn.Conv3d,),
    "conv_transpose1d": (nn.ConvTranspose1d,),
    "conv_transpose2d": (nn.ConvTranspose2d,),
    "conv_transpose3d": (nn.ConvTranspose3d,),
}
"""Operations that add a bias along their output's channel axis, and the layers that are exactly that."""

FUNCTIONAL = {
    "batch_norm": "batch",
    "layer_norm": "layer",
    "group_norm": "group",
    "instance_norm": "instance",
    "rms_norm": "rms",
}

_NOT_ACTIVATIONS = {"normalize", "renorm", "norm", "weight_norm", "spectral_norm", "clip_grad_norm"}


def kind_of(module: nn.Module) -> str | None:
    """The kind of a known norm ("batch", "layer", "group", "instance", "rms"), or None.

    Example:
        >>> kind_of(nn.SyncBatchNorm(3)), kind_of(nn.ReLU())
        ('batch', None)
    """
    return base_kind(module) if not overrides(module) else None


def overrides(module: nn.Module) -> bool:
    """Whether a forward other than PyTorch's or this library's runs in `module`."""
    owner = _owner(module)
    if owner is None or "forward" in vars(module):
        return True
    return not (owner.__module__.startswith("torch.nn.modules.") or _from_here(owner))


def is_ours(module: nn.Module) -> bool:
    """Whether a forward of this library's runs in `module`."""
    owner = _owner(module)
    return owner is not None and "forward" not in vars(module) and _from_here(owner)


def channels_of(module: nn.Module) -> int | None:
    """The number of values that γ and β have."""
    for name in ("num_features", "num_channels"):
        if isinstance(size := getattr(module, name, None), int):
            return size
    shape = getattr(module, "normalized_shape", None)
    return math.prod(shape) if isinstance(shape, (tuple, torch.Size)) else None


def values_per_statistic(kind: str, step: Step, module: nn.Module | None) -> int:
    """How many values share one statistic in this call, from the input's shape alone."""
    shape = step.inputs[0].shape
    if kind == "batch":
        return math.prod(shape) // max(shape[1], 1) if len(shape) > 1 else 1
    if kind == "instance":
        return math.prod(shape[channel_axis(kind, len(shape), module) + 1 :])
    if kind == "group":
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else argument(step, 1, "num_groups")
        return math.prod(shape[1:]) // max(int(groups), 1) if isinstance(groups, int) else 0
    if isinstance(module, LayerNorm2d):
        return shape[1]
    given = (
        getattr(module, "normalized_shape", None)
        if module is not None
        else argument(step, 1, "normalized_shape")
    )
    return math.prod(given) if isinstance(given, (tuple, list, torch.Size)) else 0


def channel_axis(kind: str, ndim: int, module: nn.Module | None) -> int:
    """The axis that has one statistic for each of its places, in batch, group and instance norm."""
    if kind != "instance" or module is None:
        return 1
    space = next((d for d in (1, 2, 3) if f"{d}d" in _named_base(module)), ndim - 2)
    return 0 if ndim == space + 1 else 1


def argument(step: Step, position: int, name: str) -> object:
    """An argument of a functional call, given by position or by name; None where it was left out."""
    return step.args[position] if len(step.args) > position else step.kwargs.get(name)


def functional_uses_own_statistics(step: Step) -> bool:
    """Whether a functional batch or instance norm can only have used the statistics of its own input."""
    native = len(step.args) == 9  # torch.batch_norm and torch.instance_norm take weight and bias first
    first = 3 if native else 1
    stored = (argument(step, first, "running_mean"), argument(step, first + 1, "running_var"))
    return not any(isinstance(value, Value) for value in stored)


def masked(step: Step) -> str | None:
    """The name of the argument with which a norm layer is told what is valid, or None where it is not."""
    if step.leaf is None:
        return None
    if argument(step, 1, "mask") is not None:
        return "mask"
    return "lengths" if argument(step, 2, "lengths") is not None else None


def holder_of(step: Step) -> str | None:
    """The path of the module whose running statistics a functional norm is given, or None."""
    if step.leaf is not None:
        return None
    buffers = [v.name for v in step.inputs if v.origin == "buffer" and v.name is not None]
    paths = {name.rpartition(".")[0] for name in buffers if name.endswith(("running_mean", "running_var"))}
    return paths.pop() if len(paths) == 1 else None


def unrecognized(model: nn.Module, flow: Flow) -> tuple[Item, ...]:
    """Everything that normalizes by its look and is not known, each with the reason."""
    found = [
        Item(path or "(the model itself)", why)
        for path, module in model.named_modules()
        if ".parametrizations." not in f".{path}." and (why := _looks_like_a_norm(module))
    ]
    places = {item.where for item in found}
    for step in flow.steps:
        why = _looks_like_a_norm_function(step)
        where = f"{step.module}: {step.op}" if step.module else step.op
        if why and step.module not in places and where not in places:
            found.append(Item(where, why))
            places.add(where)
    return tuple(found)


def _looks_like_a_norm(module: nn.Module) -> str | None:
    name = type(module).__name__
    kind = base_kind(module)
    if kind is not None:
        if not overrides(module):
            return None
        return (
            f"{name} is a {kind} norm by its base class, with a forward of its own that may do something else"
        )
    if any(base_kind(child) for child in module.modules() if child is not module):
        return None
    buffers = dict(module.named_buffers(recurse=False))
    if "running_mean" in buffers or "running_var" in buffers:
        return f"{name} keeps running statistics and is no class that is known"
    if isinstance(module, (nn.LocalResponseNorm, nn.CrossMapLRN2d)):
        return (
            f"{name} divides by its neighbours' energy; it has neither statistics nor parameters to examine"
        )
    if "norm" in name.lower():
        return f"{name} is a normalizer by its name and no class that is known"
    return None


def _looks_like_a_norm_function(step: Step) -> str | None:
    op = step.op.strip("_")
    if step.leaf is not None or op in FUNCTIONAL or "norm" not in op or op in _NOT_ACTIVATIONS:
        return None
    if "weight_norm" in op or not step.inputs or not step.outputs:
        return None
    if step.inputs[0].origin == "parameter" or step.outputs[0].shape != step.inputs[0].shape:
        return None
    return f"{step.op} is a normalizer by its name and no function that is known"


def _owner(module: nn.Module) -> type | None:
    return next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)


def _from_here(cls: type) -> bool:
    return cls.__module__ == "normalcy.nn" or cls.__module__.startswith("normalcy.nn.")


def _named_base(module: nn.Module) -> str:
    return next((c.__name__ for c in type(module).__mro__ if c.__name__.startswith("InstanceNorm")), "")
