"""The command `normalcy`: which command is meant, and how a mistake, an interrupt or a fault leaves it.

Not for anything that computes: a command parses, calls, renders and gives an exit code.

| code | meaning |
|------|---------|
| 0    | nothing at or above `--fail-on` |
| 1    | a finding at or above `--fail-on`, or a proof that failed |
| 2    | the command, its input or its output cannot be used; one sentence says why |
| 70   | a fault in this package; one sentence asks to report it |
| 130  | interrupted (Ctrl-C) |
| 141  | the reader of the output has gone (`| head`); nothing is said |

`NORMALCY_TRACEBACK=1` prints the traceback of whatever ends the command, before the sentence.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from normalcy.errors import NormalcyError, OutputError

USAGE, FAULT, INTERRUPTED, NO_READER = 2, 70, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; nothing is raised.

    Example:
        >>> main(["--version"])
        normalcy 0.1.0
        0
    """
    _tolerant_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say("interrupted; nothing was left half-written.")
        return INTERRUPTED
    except BrokenPipeError:
        _silence()
        return NO_READER
    except NormalcyError as error:
        _say(str(error))
        return USAGE
    except OSError as error:
        if error.filename is not None:
            return _fault(error)
        from normalcy.cli import writing  # noqa: PLC0415 - only a mistake needs it

        _say(str(writing.standard_output_failed(error)))
        return USAGE
    except Exception as error:  # noqa: BLE001 - the last resort: a person gets a sentence
        return _fault(error)
    return code


def _run(argv: list[str]) -> int:
    if sys.stdout is None:
        raise OutputError("the standard output is closed", "a place to write to", "redirect it to a file")
    if argv[:1] == ["trace"]:  # its values may be negative, so it reads its own words
        from normalcy.cli import trace  # noqa: PLC0415 - each command loads what it needs

        return trace.run(argv[1:])
    from normalcy.cli import commands  # noqa: PLC0415 - as above

    return commands.run(argv)


def _fault(error: BaseException) -> int:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" ({os.path.basename(last[0].filename)}, line {last[0].lineno})" if last else ""  # noqa: PTH119
    text = " ".join(str(error).split())
    _say(
        f"a fault in normalcy, not in what was given: {type(error).__name__}: {text}{at}. Please report it, "
        "with the traceback that NORMALCY_TRACEBACK=1 prints."
    )
    return FAULT


def _say(sentence: str) -> None:
    """One line on the standard error, if that takes it."""
    with contextlib.suppress(OSError, ValueError):
        if os.environ.get("NORMALCY_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"normalcy: {sentence}", file=sys.stderr, flush=True)


def _silence() -> None:
    from normalcy.cli import writing  # noqa: PLC0415 - only a reader that left needs it

    writing.silence()


def _tolerant_streams() -> None:
    """Signs that a terminal cannot show are written as escapes, instead of ending the command."""
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
