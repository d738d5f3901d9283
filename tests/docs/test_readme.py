"""The README's code runs and prints what stands beside it; doctests of the whole package run."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest

import normalcy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL)


def test_every_python_example_says_what_it_prints():
    assert len(EXAMPLES) == README.count("```python") == 2


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_the_python_example_prints_what_stands_below_it(code, printed):
    assert len(code.splitlines()) <= 22
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102 - the README's own code
    assert out.getvalue() == printed


def test_the_trace_prints_what_stands_in_the_readme(capsys, monkeypatch):
    from normalcy.cli import main

    monkeypatch.setenv("COLUMNS", "80")
    block = re.search(r"```\n\$ normalcy (trace[^\n]*)\n(.*?)```", README, re.DOTALL)
    assert block
    assert main(block[1].split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert printed == [line.rstrip() for line in block[2].strip().splitlines()]


def modules():
    found = pkgutil.walk_packages(normalcy.__path__, "normalcy.")
    return sorted(m.name for m in found if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_doctests_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_some_doctest_ran():
    finder = doctest.DocTestFinder()
    examples = sum(len(t.examples) for n in modules() for t in finder.find(importlib.import_module(n)))
    assert examples > 100


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
