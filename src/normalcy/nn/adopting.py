"""`adopt` and `release`: a model's layers made these, or PyTorch's own again, in place."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from normalcy.errors import ArgumentError
from normalcy.nn.base import Layer
from normalcy.nn.features import GroupNorm, LayerNorm, LayerNorm2d, RMSNorm
from normalcy.nn.fused import Fused
from normalcy.nn.tracking import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)
from normalcy.report import Item, Report

_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
    nn.InstanceNorm3d: InstanceNorm3d,
    nn.LayerNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
    nn.RMSNorm: RMSNorm,
}
_TORCHS = {ours: torchs for torchs, ours in _OURS.items()}


def adopt(model: nn.Module) -> Report:
    """Make PyTorch's norm layers in `model` these, in place.

    Only where the type is exactly PyTorch's: then the object stays the same, and with it parameters, hooks,
    references and the optimizer. Subclasses, SyncBatchNorm and parametrized layers are left and reported.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        >>> [item.where for item in adopt(model).done], type(model[1]).__module__
        (['1'], 'normalcy.nn.tracking')
    """
    report = Report(model)
    for path, module in _modules(model):
        kind = type(module)
        if kind in _OURS and not _momentum_fits(module):
            why = f"momentum={module.momentum}, where the weight of the new value is a number from 0 to 1"
            report.refused.append(Item(path, why))
        elif kind in _OURS:
            module.__class__ = _OURS[kind]
            report.done.append(Item(path, f"torch.nn.{kind.__name__} → normalcy.nn.{kind.__name__}"))
        elif isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) and kind not in _TORCHS:
            report.refused.append(Item(path, _why_not_exact(module)))
    return report


def release(model: nn.Module) -> Report:
    """Make these layers in `model` PyTorch's own again, in place: the inverse of `adopt`.

    A layer that PyTorch's cannot express (a `LayerNorm2d`, another stored variance, debiased or pooled
    statistics) is refused by name and left as it is.

    Example:
        >>> model = nn.Sequential(BatchNorm1d(8), LayerNorm2d(4))
        >>> report = release(model)
        >>> type(model[0]).__module__, [item.where for item in report.refused]
        ('torch.nn.modules.batchnorm', ['1'])
    """
    report = Report(model)
    for path, module in _modules(model):
        kind = type(module)
        if kind in _TORCHS:
            why = module.why_not_torch() if isinstance(module, Layer) else None
            if why:
                report.refused.append(Item(path, why))
                continue
            module.__dict__.pop("convention", None)
            module.__class__ = _TORCHS[kind]
            report.done.append(Item(path, f"normalcy.nn.{kind.__name__} → torch.nn.{kind.__name__}"))
        elif isinstance(module, (LayerNorm2d, Fused)):
            report.refused.append(Item(path, str(module.why_not_torch())))
        elif isinstance(module, tuple(_TORCHS)):
            report.refused.append(Item(path, _why_not_exact(module)))
    return report


def _momentum_fits(module: nn.Module) -> bool:
    momentum = getattr(module, "momentum", None)
    return momentum is None or (isinstance(momentum, (int, float)) and 0 <= momentum <= 1)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, under its first path."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a {type(model).__name__}", "a torch.nn.Module")
    return list(model.named_modules())


def _why_not_exact(module: nn.Module) -> str:
    if isinstance(module, LazyModuleMixin):
        return "it is lazy, and has no class of its own before its first input"
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm reduces over ranks, which a plain layer does not"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized, which makes it a class of its own"
    return f"{type(module).__name__} is a subclass, and may compute something else"
