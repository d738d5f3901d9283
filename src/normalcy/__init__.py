"""Normalization for neural networks that is exact, and honest about its statistics.

Layers are in `normalcy.nn`, functions here and in `normalcy.functional`. What examines or changes a model
(`normalcy.doctor`, `normalcy.surgery`) is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from normalcy import conventions, errors, functional, nn
from normalcy.functional import batch_norm, group_norm, instance_norm, layer_norm, normalize, rms_norm
from normalcy.moments import Moments

if TYPE_CHECKING:
    from normalcy import doctor, surgery
    from normalcy.case import Case

__version__ = "0.1.0"

__all__ = [
    "Case",
    "Moments",
    "batch_norm",
    "conventions",
    "doctor",
    "errors",
    "functional",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "nn",
    "normalize",
    "rms_norm",
    "surgery",
]

_LATER = {"Case": "case", "doctor": None, "surgery": None}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'normalcy' has no attribute {name!r}")
    module = importlib.import_module(f"normalcy.{_LATER[name] or name}")
    return getattr(module, name) if _LATER[name] else module


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
