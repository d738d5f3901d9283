"""The pages of ideas run and print what stands in them; every number in their prose was printed or put in."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

IDEAS = Path(__file__).parents[2] / "docs" / "ideas"
PAGES = sorted(IDEAS.glob("*.md"))
ALL = ("axes", "moments", "sources", "two-passes", "view")
PAPERS = {
    "axes": {"1502.03167", "1607.06450", "1607.08022", "1803.08494", "1910.07467"},
    "moments": set(),
    "sources": {"1502.03167", "1805.11604"},
    "two-passes": {"1502.03167", "1607.06450", "1803.08494", "1805.11604", "1910.07467"},
    "view": set(),
}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Block(NamedTuple):
    """Python, and what it prints."""

    code: str
    printed: str
    line: int


def blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n^```\n(.*?)^```$)?", text, re.DOTALL | re.MULTILINE)
    return [Block(m[1], m[2] or "", text[: m.start()].count("\n") + 2) for m in found]


def prose(text: str) -> str:
    """What a person reads between the blocks, without code, formulas on lines of their own, and links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$|^\|.*$|^#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\[arXiv:[^\]]*\]|\([^)\s]*\)|CS-79-773", "", text)


def test_every_idea_has_its_page() -> None:
    assert tuple(page.stem for page in PAGES) == ALL


@pages
def test_the_code_of_a_page_prints_what_stands_below_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    assert len(found) >= 3
    assert text.count("```python") == len(found)
    names = {"__name__": "page"}
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        for block in found:
            out = io.StringIO()
            code = "\n" * (block.line - 1) + block.code  # so that an error names the line of the page
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(page), "exec"), names)  # noqa: S102 - the page's own code
            assert out.getvalue() == block.printed, f"{page.name}, line {block.line}"
    assert torch.get_num_threads() == threads


@pages
def test_every_number_in_the_prose_stands_in_the_code_or_what_it_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = " ".join(f"{block.code} {block.printed}" for block in blocks(text))
    there = set(re.findall(r"\d+(?:\.\d+)?", shown))
    there |= {number.split(".")[0] for number in there}
    read = set(re.findall(r"(?<![\w.])(?:\d+\.\d+|\d\d+)(?![\d.]*\d)", prose(text)))
    years = {number for number in read if re.fullmatch(r"(?:19|20)\d\d", number)}
    assert read - years - there == set()


@pages
def test_a_page_cites_its_papers_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\(https://arxiv\.org/abs/([\d.]+)\)", text)) == PAPERS[page.stem]
    assert all(f"[arXiv:{number}](https://arxiv.org/abs/{number})" in text for number in PAPERS[page.stem])
    assert [link for link in re.findall(r"\]\((?!http)([^)#]+)", text) if not (IDEAS / link).exists()] == []


@pages
def test_a_page_is_a_screen_or_two_of_lines_that_fit(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert 60 < len(lines) < 220
    assert max(len(line) for line in lines if not line.startswith("|") and "](http" not in line) <= 125


def test_the_paper_of_the_merge_is_named() -> None:
    assert "Chan, Golub & LeVeque" in (IDEAS / "moments.md").read_text(encoding="utf-8")
