"""A real browser for the pages, started once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright


def chromium() -> str:
    """Give the browser's path; without one the tests fail, for a page nobody opened is not tested."""
    named = os.environ.get("NORMALCY_CHROMIUM")
    if named is not None:
        if shutil.which(named) is None:
            pytest.fail(f"NORMALCY_CHROMIUM names {named}, which cannot be run; name a Chromium or unset it.")
        return named
    for candidate in (
        "/usr/bin/chromium",
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
    ):
        found = shutil.which(candidate)
        if found is not None:
            return found
    pytest.fail("No Chromium was found; install one, or name it in NORMALCY_CHROMIUM.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = chromium()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")
