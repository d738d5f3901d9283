"""`import normalcy` loads what layers need and nothing of the examination, the command or the pages.

The time itself is measured by benchmarks/import_time.py: it depends on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import normalcy

LATER = {
    "typer",
    "rich",
    "jinja2",
    "altair",
    "vl_convert",
    "onnx",
    "transformers",
    "hypothesis",
    "pytest",
    "normalcy.case",
    "normalcy.checkpoint",
    "normalcy.neighbours",
    "normalcy.variants",
    "normalcy.checkup",
    "safetensors",
    "normalcy.cli",
    "normalcy.definition",
    "normalcy.doctor",
    "normalcy.example",
    "normalcy.flow",
    "normalcy.measure",
    "normalcy.pages",
    "normalcy.sites",
    "normalcy.surgery",
    "normalcy.testing",
    "normalcy.trace",
}


def loaded_by(*statements: str) -> set[str]:
    code = "; ".join(["import sys, json", *statements, "print(json.dumps(sorted(sys.modules)))"])
    env = os.environ | {"PYTHONPATH": str(Path(normalcy.__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return set(json.loads(said.stdout.splitlines()[-1]))


def test_importing_the_library_loads_nothing_that_layers_do_not_need():
    loaded = loaded_by("import normalcy", "normalcy.nn.BatchNorm2d(3)")
    assert {"torch", "normalcy.nn"} <= loaded
    assert not loaded & LATER


def test_what_is_loaded_later_is_there_when_it_is_asked_for():
    loaded = loaded_by("import normalcy", "normalcy.doctor.examine", "normalcy.surgery.fold", "normalcy.Case")
    assert {"normalcy.doctor", "normalcy.surgery", "normalcy.flow", "normalcy.case"} <= loaded
    assert not loaded & {"typer", "jinja2", "altair", "normalcy.pages"}


def test_tracing_numbers_loads_no_examination():
    loaded = loaded_by("from normalcy.cli import main", "main(['trace', '2', '4', '--json'])")
    assert "normalcy.trace" in loaded
    assert not loaded & {
        "normalcy.doctor",
        "normalcy.flow",
        "normalcy.checkup",
        "normalcy.pages",
        "altair",
        "typer",
    }
