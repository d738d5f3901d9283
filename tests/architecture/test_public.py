"""The public face is a list that is kept, and every name on it is explained."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import normalcy
from normalcy import errors

FIXED = {
    "normalcy": {"Case", "Moments", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"},
    "normalcy.nn": {
        "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "LayerNorm2d", "GroupNorm",
        "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "RMSNorm", "adopt", "release",
    },
    "normalcy.surgery": {"fold", "recalibrate", "debias", "strip_dead_bias"},
    "normalcy.doctor": {"examine"},
    "normalcy.conventions": {"TORCH", "KERAS", "FLAX", "ONNX"},
    "normalcy.case": {"Case", "load", "batches", "run"},
}  # fmt: skip
MODULES = [
    normalcy,
    *(importlib.import_module(m.name) for m in pkgutil.walk_packages(normalcy.__path__, "normalcy.")),
]
LISTED = [(module, name) for module in MODULES for name in getattr(module, "__all__", ())]


@pytest.mark.parametrize("module", FIXED)
def test_the_names_that_others_rely_on_are_there(module):
    found = importlib.import_module(module)
    missing = {name for name in FIXED[module] if not hasattr(found, name)}
    assert not missing
    assert set(getattr(found, "__all__", FIXED[module])) >= FIXED[module]


def test_what_the_package_shows_is_what_it_lists():
    visible = {
        n for n, value in vars(normalcy).items() if not n.startswith("_") and not inspect.ismodule(value)
    }
    assert visible - {"annotations", "TYPE_CHECKING", "Any"} <= set(normalcy.__all__)
    assert set(normalcy.__all__) <= set(dir(normalcy))
    assert list(normalcy.__all__) == sorted(normalcy.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        _ = normalcy.nowhere


@pytest.mark.parametrize(("module", "name"), LISTED, ids=[f"{m.__name__}.{n}" for m, n in LISTED])
def test_every_listed_name_exists_and_is_explained(module, name):
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        text = inspect.getdoc(thing)
        assert text, f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_module_says_what_it_is(module):
    assert module.__doc__, module.__name__
    assert len(module.__doc__.strip()) > 20


def test_every_error_is_one_of_ours_and_survives_pickling():
    import pickle

    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, errors.NormalcyError)
        made = kind("3 channels were given", "4", "check the layout.")
        again = pickle.loads(pickle.dumps(made))  # noqa: S301 - pickled on this line
        assert (type(again), str(again)) == (kind, "3 channels were given; needed: 4. Check the layout.")
