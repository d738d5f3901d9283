"""The command as a person runs it: a process of its own, with its own streams, folder and exit code.

The processes are forked from one that has imported the library, because importing PyTorch anew takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["normalcy.cli.commands", "normalcy.cli.trace", "normalcy.checkup", "normalcy.pages"]
)
_LIMIT = 120


@dataclass(frozen=True)
class Said:
    """What a run left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line of the standard error: the one that says what went wrong."""
        return self.err.splitlines()[-1]


def normalcy(
    *argv: str,
    folder: Path,
    out: Path | None = None,
    largest: int | None = None,
    env: dict[str, str] | None = None,
) -> Said:
    """Run `normalcy argv…` in `folder`; `out` takes the standard output, `largest` limits files."""
    streams = (out or folder / ".out", folder / ".err")
    process = _FORKS.Process(target=_child, args=(argv, folder, streams, largest, env or {}))
    process.start()
    process.join(_LIMIT)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"normalcy {' '.join(argv)} did not end within {_LIMIT} s")
    said = "" if out else streams[0].read_text(encoding="utf-8")
    return Said(process.exitcode, said, streams[1].read_text(encoding="utf-8"))


def started(
    *argv: str, folder: Path, env: dict[str, str] | None = None, **streams: int
) -> subprocess.Popen[str]:
    """Start the command in a fresh interpreter, to be interrupted or read from."""
    code = "import sys; from normalcy.cli import main; sys.exit(main())"
    env = os.environ | (env or {}) | {"PYTHONPATH": str(Path(find_spec("normalcy").origin).parents[1])}
    words = [sys.executable, "-c", code, *argv]
    return subprocess.Popen(words, cwd=folder, env=env, text=True, encoding="utf-8", **streams)


def _child(
    argv: tuple[str, ...],
    folder: Path,
    streams: tuple[Path, Path],
    largest: int | None,
    env: dict[str, str],
) -> None:
    os.chdir(folder)
    os.environ.update(env)
    for number, path in zip((1, 2), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115 - as above
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    from normalcy.cli import main

    sys.exit(main(argv))
