"""Writing a result so that it is there whole or not at all.

Not for what a model is saved to, and not for logs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from normalcy.errors import ArgumentError, OutputError

_STILL = "what stood there before stands there still"


def check(path: Path) -> None:
    """See, before long work starts, that `path` can be written; nothing is changed.

    Raises:
        OutputError: it is a folder, its folder is missing or not writable, or it may not be replaced.
    """
    with _told(path):
        if _descriptor(path) is not None:
            return
        target = _resolved(path)
        if target.is_dir():
            do = f"write to {path / 'report.html'}, for instance"
            raise OutputError(f"{path} is a folder", "the name of a file", do)
        if target.exists() and not os.access(target, os.W_OK):
            raise _unwritable(path, errno.EACCES)
        if _is_stream(target):
            return
        if not target.parent.is_dir():
            given = f"{path} lies in {target.parent}, which is no folder"
            raise OutputError(given, "a folder that is there", "create it first")
        # The permissions of a folder tell little of quotas and read-only mounts; a file made there does.
        with tempfile.TemporaryFile(dir=target.parent):
            pass


def apart(written: Mapping[str, Path | None], read: Mapping[str, str | None]) -> None:
    """See that nothing is written over something else of the same command, however their paths are spelled.

    Args:
        written: each option that names a file to write, with its path.
        read: each argument that names something to read, as `file.py:callable` or `file`.

    Raises:
        ArgumentError: two name one file.
    """
    taken: dict[object, str] = {}
    for name, text in read.items():
        for place in (text, text.rpartition(":")[0]) if text else ():
            with contextlib.suppress(OSError, ValueError):
                if os.path.isfile(place):  # noqa: PTH113 - it never raises
                    taken.setdefault(_identity(Path(place)), f"the {name} itself")
    for name, path in written.items():
        if path is None:
            continue
        with _told(path):
            where, nowhere = _identity(path), _resolved(path) == Path(os.devnull)
        if where in taken and not nowhere:
            raise ArgumentError(f"{name} {path} is {taken[where]}", "another file", "name a new one")
        taken[where] = f"the file that {name} is written to"


def _identity(path: Path) -> object:
    """What two spellings of one path have in common; of a file that is not there, its folder and name."""
    number, target = _descriptor(path), _resolved(path)
    if number is not None:
        return number
    try:
        folder = target.parent.stat()
    except OSError:
        return target
    return folder.st_dev, folder.st_ino, target.name


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[TextIO]:
    """Open `path` for UTF-8 text; it appears under its name when the block ends well, and else not at all.

    The text goes to a temporary file in the same folder, which then takes the name; a symbolic link stays and
    its target is replaced. Devices and pipes (/dev/stdout, /dev/null) are written to directly.

    Raises:
        OutputError: it cannot be written; an old file stands as it was.
    """
    check(path)
    number, target = _descriptor(path), path.resolve()
    if number is not None or _is_stream(target):
        ours = _STATE.real.fileno() if _STATE.real and number == 1 else number
        with _told(path), _text(target if ours is None else os.dup(ours)) as file:
            yield file
        return
    # Named before it is there: however soon Ctrl-C comes, it is known what to remove.
    part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.part")
    try:
        with _told(path), _text(_created(part)) as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), _mode(target))
            os.fsync(file.fileno())
        with _told(path):
            part.replace(target)
    except BaseException:  # Ctrl-C too: the temporary file goes
        part.unlink(missing_ok=True)
        raise


def write_out(text: str) -> None:
    """Write text to the standard output, all of it.

    Raises:
        OutputError: it does not take it, because it is full, for instance.
        BrokenPipeError: its reader has gone.
    """
    out = standard_output()
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise standard_output_failed(error) from error


def standard_output_failed(error: OSError) -> OutputError:
    """The sentence for a standard output that does not take what is written."""
    silence()
    return OutputError(
        f"the standard output cannot be written ({error.strerror})", "room to write", "redirect it elsewhere"
    )


def silence() -> None:
    """Let what is still buffered for the standard output go nowhere, so that leaving does not fail on it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, standard_output().fileno())
        os.close(nowhere)


@contextlib.contextmanager
def reserved_stdout() -> Iterator[None]:
    """Within, whatever is printed goes to the standard error; what is written by this module does not.

    That holds for file descriptor 1 too, so for subprocesses and compiled code: what a machine reads from the
    standard output is then ours alone. Afterwards the standard output is as before; or, after
    `reserve_for_good`, stays ours until the process has ended, with what is printed while it ends.
    """
    out, err = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out.flush()
            number, spare = out.fileno(), os.dup(out.fileno())
            stack.callback(os.close, spare)
            os.dup2(err.fileno(), number)
            stack.callback(os.dup2, spare, number)
            stack.callback(_flush, out)  # what was printed to it by its name goes where the rest went
            _STATE.real = open(spare, "w", encoding=out.encoding, errors=out.errors, closefd=False)  # noqa: SIM115 - it lives on where it is for good
            stack.callback(setattr, _STATE, "real", None)
        stack.enter_context(contextlib.redirect_stdout(err))
        try:
            yield
        finally:
            if _STATE.for_good:
                stack.pop_all()


def reserve_for_good() -> None:
    """From here on what `reserved_stdout` reserves stays reserved: the process ends with the command."""
    _STATE.for_good = True


def standard_output() -> TextIO:
    """The standard output that is ours, also while it is reserved."""
    return _STATE.real or sys.stdout


class _State:
    """The standard output belongs to the process, and so does what became of it."""

    real: TextIO | None = None
    for_good = False


_STATE = _State()


def _flush(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _refuse(path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    if isinstance(error, OutputError):
        raise error
    raise _unwritable(path, error.errno) from error


def _unwritable(path: Path, number: int | None) -> OutputError:
    why = os.strerror(number) if number else "it failed"
    kept = f"; {_STILL}" if os.path.isfile(path) else ""  # noqa: PTH113 - it never raises
    do = (
        "free some room, or write elsewhere"
        if number in _ROOM
        else "check its permissions, or write elsewhere"
    )
    return OutputError(f"{path} cannot be written ({why}){kept}", "a file that can be written", do)


_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, "a loop of symbolic links") from error


def _descriptor(path: Path) -> int | None:
    """The number of the open file that /dev/stdout and its kin stand for: opening it anew would truncate."""
    if str(path) in ("/dev/stdout", "/dev/stderr"):
        return 1 if path.name == "stdout" else 2
    numbered = re.fullmatch(r"(?:/dev|/proc/self)/fd/(\d+)", str(path))
    return int(numbered[1]) if numbered else None


def _created(part: Path) -> int:
    return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _text(file: Path | int) -> TextIO:
    return open(file, "w", encoding="utf-8", errors="backslashreplace")  # noqa: PTH123 - a number, too


def _is_stream(target: Path) -> bool:
    """Devices, pipes and sockets: what must not be replaced by a file."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _mode(target: Path) -> int:
    """The mode of the file that is replaced, or what the umask gives a new one."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
