"""The wheel, built from this tree and installed where only its dependencies are, works from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE", "setup.py")


def ran(*words: str | Path, cwd: Path, **env: str) -> str:
    without = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    said = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=without | env, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, f"{words}\n{said.stdout[-3000:]}\n{said.stderr[-3000:]}"
    return said.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # Built from a copy: a build leaves folders of its own beside what it builds.
    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        elif (ROOT / part).exists():
            shutil.copy2(ROOT / part, tree / part)
    ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "dist", cwd=tree)
    (made,) = (tree / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel and, through a .pth file, what it needs."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    words = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        site,
    ]
    ran(*words, wheel, cwd=home)
    # A .pth file only lengthens sys.path: an editable installation found there stays unprocessed.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_has_the_data_the_templates_and_the_mark_of_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"normalcy/py.typed", "normalcy/data/census-first-names.txt", "normalcy/cli/__init__.py"} <= names
    packaged = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "normalcy").rglob("*")
                if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"}  # fmt: skip
    assert packaged <= names, packaged - names
    assert not any(name.startswith(("tests/", "src/")) for name in names)


def test_the_installed_command_traces_numbers_from_another_folder(clean, tmp_path):
    script = "import sys; from normalcy.cli import main; sys.exit(main())"
    said = ran(clean / "python", "-c", script, "trace", "2", "4", "6", "8", "--json", cwd=tmp_path)
    made = json.loads(said)
    assert (made["mean"], made["var"]) == (5.0, 5.0)
    where = ran(clean / "python", "-c", "import normalcy; print(normalcy.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean.parent)


def test_the_entry_point_is_the_commands_main(clean, tmp_path):
    code = (
        "from importlib.metadata import entry_points; "
        "print(*[p.value for p in entry_points(name='normalcy', group='console_scripts')])"
    )
    assert ran(clean / "python", "-c", code, cwd=tmp_path).split()[0] == "normalcy.cli:main"


def test_the_installed_library_computes(clean, tmp_path):
    code = (
        "import torch, normalcy; x = torch.arange(12.).reshape(4, 3) + 100; "
        "y = normalcy.nn.BatchNorm1d(3)(x); "
        "print(float(y.mean().abs()) < 1e-5, float(y.var(0, correction=0).mean()))"
    )
    centred, var = ran(clean / "python", "-c", code, cwd=tmp_path).split()
    assert centred == "True"
    assert float(var) == pytest.approx(11.25 / (11.25 + 1e-5), abs=1e-5)
