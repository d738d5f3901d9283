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

    Without `argv` it is that of the process, which is taken to end with the command: what the target prints
    while the process ends goes to the standard error, too.

    Example:
        >>> main(["--version"])
        normalcy 0.1.0
        0
    """
    try:
        _tolerant_streams()
        if argv is None:
            from normalcy.cli import writing  # noqa: PLC0415 - inside, so that Ctrl-C finds its sentence

            writing.reserve_for_good()
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
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - sys.exit, and what somebody else derives from no Exception
        return _left(error)
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
    text = " ".join(str(error).split())
    _say(
        f"a fault in normalcy, not in what was given: {type(error).__name__}: {text}{_at(error)}. "
        "Please report it, with the traceback that NORMALCY_TRACEBACK=1 prints."
    )
    return FAULT


def _left(error: BaseException) -> int:
    """What was given left by a way that is no exception's, so that nobody on the way took it for one."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        _silence()  # the library below the commands leaves so when the reader of the output has gone
        return NO_READER
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        did = f"raised {type(error).__name__}, which is no Exception"
    _say(str(NormalcyError(f"what was given {did}{_at(error)}", "code that returns, or raises an Exception")))
    return USAGE


def _at(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return f" ({os.path.basename(last[0].filename)}, line {last[0].lineno})" if last else ""  # noqa: PTH119


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
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - as long as the process
        with contextlib.suppress(OSError):  # a number of its own, so that nothing else is opened as 2
            os.dup2(sys.stderr.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
