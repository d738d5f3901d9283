"""Normalization for neural networks that is exact, and honest about its statistics.

Layers are in `normalcy.nn`, functions here and in `normalcy.functional`; what examines or changes a model is
in `normalcy.doctor` and `normalcy.surgery`. Each is imported when it is first asked for, and PyTorch with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normalcy import conventions, doctor, errors, functional, nn, surgery
    from normalcy.case import Case
    from normalcy.functional import batch_norm, group_norm, instance_norm, layer_norm, normalize, rms_norm
    from normalcy.moments import Moments

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

_HOME = {"Case": "case", "Moments": "moments"} | dict.fromkeys(
    ("batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize", "rms_norm"), "functional"
)
"""In which module a name lives; every other name of `__all__` is a module itself."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'normalcy' has no attribute {name!r}")
    module = importlib.import_module(f"normalcy.{_HOME.get(name, name)}")
    found = getattr(module, name) if name in _HOME else module
    globals()[name] = found  # so that the next look-up finds it at once
    return found


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
