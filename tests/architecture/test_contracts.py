"""Who may import whom: the contracts of pyproject.toml, and what they cannot say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import normalcy

ROOT = Path(__file__).parents[2]
SOURCE = Path(normalcy.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def lint(folder: Path, source: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    words = [sys.executable, "-c", code, "--config", str(folder / "pyproject.toml"), "--no-cache"]
    env = os.environ | {"PYTHONPATH": str(source), "NO_COLOR": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_every_import_contract_is_kept():
    said = lint(ROOT, SOURCE.parent)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "0 broken" in said.stdout
    assert "4 kept" in said.stdout


BREACHES = [
    ("axes.py", "import torch\n", "know no tensor"),
    ("surgery/broken.py", "from normalcy import doctor\n", "siblings leave each other alone"),
    ("moments.py", "from normalcy import nn\n", "only from those below it"),
    ("definition.py", "from normalcy import axes\n", "independent of what it judges"),
    ("kernels/eager.py", "from normalcy import definition\n", "never calls its judge"),
    ("a_new_module.py", "", "must be declared as a layer"),
]


@pytest.mark.parametrize(("file", "line", "contract"), BREACHES, ids=[row[0] for row in BREACHES])
def test_a_breach_is_seen(tmp_path, file, line, contract):
    for path in [*FILES, ROOT / "pyproject.toml"]:
        at = tmp_path / (path.relative_to(SOURCE.parent) if path.is_relative_to(SOURCE) else path.name)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    broken = tmp_path / "normalcy" / file
    broken.write_text(
        (broken.read_text(encoding="utf-8") if broken.exists() else "") + "\n" + line, encoding="utf-8"
    )
    said = lint(tmp_path, tmp_path)
    assert said.returncode == 1, said.stdout + said.stderr
    assert contract in " ".join(said.stdout.split())


def names_in(tree: ast.AST) -> set[str]:
    """Dotted names that a file imports or reads."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_one_module_may_know_of_process_groups(path):
    names = names_in(ast.parse(path.read_text(encoding="utf-8")))
    reached = {name for name in names if name == "torch.distributed" or name.startswith("torch.distributed.")}
    assert path.name == "distributed.py" or not reached, reached


def test_the_search_for_names_finds_every_way_of_writing_one():
    for text in (
        "import torch.distributed as d",
        "from torch import distributed",
        "import torch\ntorch.distributed.x()",
    ):
        assert "torch.distributed" in names_in(ast.parse(text)), text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_saved_is_ever_unpickled(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    dangerous = {"pickle", "pickle.load", "pickle.loads", "dill", "joblib", "marshal"}
    assert not names_in(tree) & dangerous
    loads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in loads]
    assert len(loads) == len(calls)
    assert bool(loads) == ("torch.load" in names_in(tree)), "it is called under its full name"
    assert not loads or path.relative_to(SOURCE) == Path("checkpoint/files.py")
    for call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given["weights_only"] == "True", "only tensors and plain containers are read from a file"
