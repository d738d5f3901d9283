"""Loading what a command line names: `file.py:callable` or `package.module:callable`.

Not for saved models: nothing is ever unpickled here, and checkpoints are refused by name.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from normalcy.case.feeding import replayable
from normalcy.case.record import Case
from normalcy.case.words import a, did, raised
from normalcy.errors import DataError, TargetError

_BUILDS = "file.py:callable, where the callable builds the model"
_SAVED = {
    ".onnx": "an ONNX file",
    ".safetensors": "a checkpoint",
    ".pt": "a checkpoint",
    ".pth": "a checkpoint",
    ".ckpt": "a checkpoint",
    ".bin": "a checkpoint",
}
_OWN = str(Path(__file__).parent)


def load(target: str, data: str | None = None) -> Case:
    """Load the case that `target` names, with the data that `data` names, if any.

    The callable is called without arguments and returns a module or a `Case`; a module or Case that stands
    under the name already is taken as it is. `data` names a function that returns data (it may be a
    generator), or data. A file's folder stays importable, and `sys.argv` holds the file alone while it runs.

    Raises:
        TargetError: the target cannot be found, read, run or called, or gives no module; the sentence has the
            line in the file where that is known.
        DataError: the same for `data`.

    Example:
        >>> load("torch.nn:Identity").model
        Identity()
    """
    modules: dict[Path, ModuleType] = {}
    made = _value(target, "model", modules, lambda value: isinstance(value, (nn.Module, Case)))
    if isinstance(made, nn.Module):
        case = Case(made)
    elif isinstance(made, Case):
        case = made
    else:
        raise TargetError(
            f"{target} gave {_wrong(made)}",
            "a torch.nn.Module or a normalcy.Case",
            "return normalcy.Case(model, data=…) where there is more than a model"
            if isinstance(made, tuple)
            else "return the built model itself",
        )
    if data is None:
        return case
    return replace(case, data=_data(data, modules))


def _data(named: str, modules: dict[Path, ModuleType]) -> Any:
    again: list[Callable[[], Any]] = []
    try:
        made = _value(named, "data", modules, lambda value: not callable(value), again)
    except TargetError as error:
        needed = error.needed.replace("builds the model", "returns data")
        raise DataError(f"--data: {error.given}", needed, error.do) from error
    if made is None:
        raise DataError(
            f"--data: {named} returned None", "a batch, or batches", "end it with a return statement"
        )
    return replayable(made, again[0] if again else None)


def _value(
    named: str,
    role: str,
    modules: dict[Path, ModuleType],
    ready: Callable[[Any], bool],
    again: list[Callable[[], Any]] | None = None,
) -> Any:
    """What stands under a name: itself where it is `ready`, else what calling it returns."""
    place, colon, name = named.rpartition(":")
    if not colon:
        raise _no_colon(named)
    module, path = _module(named, place, modules)
    if not all(part.isidentifier() for part in name.split(".")):
        shown = repr(name) if name else "nothing"
        raise TargetError(
            f"{named} names {shown} after the colon",
            f"{place}:callable",
            "write the name alone, without parentheses",
        )
    found = _attribute(module, place, name)
    if ready(found):
        return found
    if not callable(found):
        raise TargetError(
            f"{name} in {place} is {a(type(found).__name__)}",
            "something to call",
            "name the function that builds it",
        )
    _must_need_no_arguments(found, name, place)
    if again is not None:
        again.append(found)
    with _theirs(f"{name}() in {place}", path, role):
        return found()


def _no_colon(named: str) -> TargetError:
    path = Path(named)
    if not named.strip():
        return TargetError("the target is empty", _BUILDS)
    if path.suffix.lower() in _SAVED:
        return _saved(path)
    if path.is_dir():
        return TargetError(f"{named} is a folder", _BUILDS)
    if path.suffix == ".py" and path.is_file():
        names = _defined(path)
        do = f"it defines {', '.join(names)}" if names else ""
        return TargetError(
            f"{named} says no callable", f"{named}:callable, where the callable builds the model", do
        )
    if path.is_file():
        return TargetError(f"{named} is neither Python nor a checkpoint", _BUILDS)
    if path.suffix == ".py" or len(path.parts) > 1:
        return TargetError(f"{named}: no such file", _BUILDS)
    return TargetError(
        f"{named!r} has no colon", f"{_BUILDS}, or package.module:callable", "add a colon and a name"
    )


def _saved(path: Path) -> TargetError:
    if not path.is_file():
        return TargetError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}", _BUILDS)
    kind = _SAVED[path.suffix.lower()]
    do = "write a function that builds the model and loads the weights"
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        return TargetError(f"{path} cannot be read ({error.strerror})", _BUILDS, "check its permissions")
    if not _looks_saved(path.suffix.lower(), head):
        return TargetError(f"{path} is named like {kind} and is none", _BUILDS, do)
    if path.suffix.lower() != ".onnx":
        do += f", or examine it alone: normalcy doctor {path}"
        return TargetError(f"{path} is {kind}, which is weights without a model", _BUILDS, do)
    return TargetError(f"{path} is {kind}, which is not supported yet", _BUILDS, do)


def _looks_saved(suffix: str, head: bytes) -> bool:
    if suffix == ".safetensors":
        return head[8:9] == b"{"
    if suffix == ".onnx":
        return head[:1] == b"\x08"
    return head[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _module(named: str, place: str, modules: dict[Path, ModuleType]) -> tuple[ModuleType, Path]:
    path = Path(place)
    if path.suffix.lower() in _SAVED:
        raise _saved(path)
    if place and path.is_dir() and not (place.isidentifier() and (path / "__init__.py").is_file()):
        raise TargetError(f"{place} is a folder", _BUILDS)
    if path.suffix == ".py" or path.is_file():
        if path.suffix != ".py" or not path.is_file():
            raise _no_file(path)
        path = path.resolve()
        if path not in modules:
            modules[path] = _from_file(path, place)
        return modules[path], path
    if not place or len(path.parts) > 1 or not all(part.isidentifier() for part in place.split(".")):
        given = f"{place}: no such file" if place else f"{named!r} names no file"
        raise TargetError(given, f"{_BUILDS}, or package.module:callable")
    return _imported(place)


def _no_file(path: Path) -> TargetError:
    if path.is_dir():
        return TargetError(f"{path} is a folder", _BUILDS)
    if path.is_file():
        return TargetError(f"{path} is no Python file", _BUILDS)
    names = [p.stem for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.stem, names, 1)
    do = f"there is {path.parent / close[0]}.py" if close else "check the path"
    return TargetError(f"{path}: no such file", _BUILDS, do)


def _from_file(path: Path, place: str) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TargetError(
            f"{place} cannot be read ({error.strerror})", _BUILDS, "check its permissions"
        ) from error
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"target_{id(path):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise TargetError(f"{place} cannot be loaded as Python", _BUILDS)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickling look their module up
    with _theirs(place, path, "file"):
        # Compiled here, as a script is: without leaving a cache in somebody's folder.
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - running it is what was asked for
    return module


def _imported(place: str) -> tuple[ModuleType, Path]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        known = importlib.util.find_spec(place) is not None
    except ModuleNotFoundError as error:
        known = not (error.name and (place == error.name or place.startswith(f"{error.name}.")))
    except (Exception, SystemExit):  # noqa: BLE001 - a parent package failed: importing it tells how
        known = True
    if not known:
        raise TargetError(
            f"there is no module {place!r}",
            f"package.module:callable, or {_BUILDS}",
            "check the name, and whether it is installed here",
        )
    with _theirs(place, None, "file"):
        module = importlib.import_module(place)
    return module, Path(getattr(module, "__file__", None) or place)


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        with _theirs(f"looking up {part} in {place}", None, "model"):  # it may be computed
            there = hasattr(found, part)
        if not there:
            names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            own = [n for n in names if getattr(vars(module)[n], "__module__", None) == module.__name__]
            close = difflib.get_close_matches(name, names, 1) or own[:5]
            do = f"there is {' or '.join(close)}" if close else "check the name"
            raise TargetError(f"{place} has no {name!r}", "the name of a callable in it", do)
        found = getattr(found, part)
    return found


def _must_need_no_arguments(function: Callable[..., Any], name: str, place: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will tell
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is inspect.Parameter.empty and p.kind not in kinds
    ]
    if needed:
        many = "arguments" if len(needed) > 1 else "argument"
        raise TargetError(
            f"{name} in {place} needs the {many} {', '.join(needed)}",
            "a callable without required arguments",
            f"write a function that calls {name} with them",
        )


@contextmanager
def _theirs(what: str, path: Path | None, role: str) -> Iterator[None]:
    """Somebody else's code runs within; whatever it raises becomes a sentence with their file and line."""
    argv, sys.argv = sys.argv, [str(path) if path else what]
    try:
        yield
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        where = f"{_shown(error.filename) or what}{line}"
        raise TargetError(
            f"{where} is no valid Python ({error.msg})", "a file that Python can run"
        ) from error
    except SystemExit as error:
        at = _line(error, path)
        do = 'guard what is for the command line with if __name__ == "__main__"' if role == "file" else ""
        raise TargetError(f"{what} {did(error)}{at}", "code that returns", do) from error
    except Exception as error:
        how = "could not be imported: it raised" if role == "file" else "raised"
        needed = {"file": "a file that Python can run", "data": "data"}.get(role, "a model")
        raise TargetError(f"{what} {how} {raised(error)}{_line(error, path)}", needed) from error
    finally:
        sys.argv = argv


def _line(error: BaseException, path: Path | None) -> str:
    """The last line of theirs in a traceback, as " (file, line n)"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OWN, "<"))]
    folder = f"{path.resolve().parent}/" if path else ""
    theirs = [
        f for f in frames if folder and f.filename.startswith(folder) and "site-packages" not in f.filename
    ]
    last = (theirs or frames)[-1:]
    return f" ({_shown(last[0].filename)}, line {last[0].lineno})" if last else ""


def _shown(filename: str | None) -> str:
    """A path as a person would type it from here."""
    if not filename:
        return ""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _wrong(made: Any) -> str:
    if made is None:
        return "None, as without a return statement"
    if isinstance(made, type):
        return f"the class {made.__name__}, not an instance of it"
    if isinstance(made, dict) and made and all(isinstance(v, torch.Tensor) for v in made.values()):
        return "a state dict, which is the weights without the model"
    return a(type(made).__name__)


def _defined(path: Path) -> list[str]:
    """Names of the functions and classes at the top of a file, without running it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")][:5]
