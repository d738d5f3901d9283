"""Reading checkpoint files: what kind a file is, by its content, and the tensors in it.

Not for models: nothing is unpickled but tensors and plain containers; whatever else a file holds, refuses it.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normalcy.checkpoint.entries import Entry, Weights, of_object, prefix_of, said_of
from normalcy.errors import MissingExtraError, TargetError

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pth.tar", ".index.json")
"""How names of checkpoints end."""

_NEEDED = "a state dict, as torch.save(model.state_dict(), …) or safetensors writes it"
_AGAIN = "copy or download it again"
_ONLY_WEIGHTS = "if you trust it, load it in Python and save its state dict alone"
_ZIP, _PICKLE = b"PK\x03\x04", tuple(b"\x80" + bytes((protocol,)) for protocol in range(2, 6))
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "is a pointer of Git LFS, not the file itself", "run git lfs pull"),
    (b"<", "is a web page, not the file that was to be downloaded", _AGAIN),
    (b"\x89HDF", "is an HDF5 file, as Keras writes it", "save the weights as safetensors"),
    (b"GGUF", "is a GGUF file", "name the safetensors file that it was made from"),
    (b"\x1f\x8b", "is compressed", "unpack it"),
)
_FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def named(target: str) -> bool:
    """Whether a command's TARGET names a checkpoint: by its ending, or else by its content.

    A folder is meant as one where a checkpoint lies in it, so that the sentence can name that.

    Example:
        >>> named("model.safetensors"), named("net.py:make"), named("model.onnx")
        (True, False, False)
    """
    path = Path(target)
    if _is_folder(path):
        return bool(_inside(path))
    there = _is_file(path)
    if ":" in target and not there:
        return False
    return target.lower().endswith(SUFFIXES) or (there and _kind(_head(path)) in ("safetensors", "torch"))


def read(path: str | Path) -> Weights:
    """The tensors of a checkpoint by name; values are read when they are asked for, where the file allows.

    Args:
        path: a `.safetensors` file, a file of `torch.save`, or the `….index.json` of several of either. The
            content decides what a file is, not its name. Files of `torch.save` are read with
            `weights_only=True`: tensors, containers, numbers, texts and `argparse.Namespace`.

    Raises:
        TargetError: there is no such file, it cannot be read, or it is no state dict; the sentence says what
            it is, where that can be told.
        MissingExtraError: it is a safetensors file, and the package safetensors is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.BatchNorm1d(3).state_dict(), f"{folder}/bn.pt")
        ...     list(read(f"{folder}/bn.pt").entries)
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    path = Path(path)
    if _is_folder(path):
        inside = _inside(path)
        raise TargetError(
            f"{path} is a folder", _NEEDED, f"name {inside[0]}" if inside else "name the file in it"
        )
    if not _is_file(path):
        raise TargetError(f"{path}: no such file", _NEEDED, "check the path")
    if path.name.endswith(".index.json"):
        return _sharded(path)
    head = _head(path)
    kind = _kind(head)
    if kind == "safetensors":
        weights = _safetensors(path)
    elif kind == "torch":
        weights = _torch(path, zipped=head.startswith(_ZIP))
    else:
        raise _foreign(path, head)
    told = path.suffix.lower()
    if (told == ".safetensors") != (kind == "safetensors") and told in SUFFIXES:
        real = "a safetensors file" if kind == "safetensors" else "a file of torch.save"
        note = f"It is named {told} and is {real}: other programs may go by the name."
        return Weights(weights.entries, weights.form, (*weights.notes, note))
    return weights


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null in it
        return False


def _is_folder(path: Path) -> bool:
    try:
        return str(path) != "." and path.is_dir()
    except (OSError, ValueError):
        return False


def _inside(folder: Path) -> list[Path]:
    """The checkpoints in a folder, an index of several first."""
    try:
        found = sorted(each for each in folder.iterdir() if each.name.lower().endswith(SUFFIXES))
    except OSError:
        return []
    return sorted(found, key=lambda each: not each.name.endswith(".index.json"))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise TargetError(
            f"{path} cannot be read ({error.strerror})", "a file", "check its permissions"
        ) from error


def _kind(head: bytes) -> str | None:
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return "safetensors"
    return "torch" if head.startswith((_ZIP, *_PICKLE)) else None


def _foreign(path: Path, head: bytes) -> TargetError:
    if not head:
        return TargetError(f"{path} is empty", _NEEDED, _AGAIN)
    for start, is_what, do in _FOREIGN:
        if head.lstrip().startswith(start):
            return TargetError(f"{path} {is_what}", _NEEDED, do)
    return TargetError(f"{path} is named like a checkpoint and is none", _NEEDED, "check what wrote it")


def _damaged(path: Path, error: BaseException) -> TargetError:
    said = _first(error) or type(error).__name__
    return TargetError(f"{path} is damaged or cut short ({said})", "a whole file", _AGAIN)


def _safetensors(path: Path) -> Weights:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        do = "run pip install safetensors"
        raise MissingExtraError(f"{path} is a safetensors file", "the package safetensors", do) from error
    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
        names = sorted(opened.keys(), key=_natural)
        prefix = prefix_of(names)
        entries = {name.removeprefix(prefix): _lazy(opened, name) for name in names}
    except RuntimeError as error:
        given = f"{path} cannot be mapped into memory ({_first(error)})"
        raise TargetError(
            given, "memory for its size", "split it into several files with an index"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return Weights(entries, "safetensors", said_of(prefix))


def _lazy(opened: Any, name: str) -> Entry:
    held = opened.get_slice(name)
    dtype = str(held.get_dtype())

    def values() -> Tensor:
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    return Entry(tuple(held.get_shape()), dtype, dtype in _FLOATING, True, values)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _torch(path: Path, *, zipped: bool) -> Weights:
    mapped = zipped and _zip_of_tensors(path)
    try:
        with ExitStack() as stack:
            # A bag of attributes, in which many trainings save their arguments along.
            stack.enter_context(torch.serialization.safe_globals([argparse.Namespace]))
            source: Any = path
            if path.suffix == ".safetensors":  # torch.load goes by this name when it is given one
                source, mapped = stack.enter_context(path.open("rb")), False
            made = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may fail at anything
        refused = type(error).__name__ == "UnpicklingError"
        raise (_objects if refused else _damaged)(path, error) from error
    entries, notes = of_object(made)
    if not entries:
        raise TargetError(f"{path} holds {_described(made)}", _NEEDED, "save model.state_dict()")
    return Weights(entries, "torch", notes)


def _zip_of_tensors(path: Path) -> bool:
    """Whether the archive may be mapped into memory; one that torch.save did not write is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path, error) from error
    names = [info.filename for info in infos]

    def has(*ends: str) -> bool:
        return any(name.endswith(ends) for name in names)

    do = "save model.state_dict() of the model it was made from"
    if has("constants.pkl") and any("/code/" in name for name in names):
        raise TargetError(f"{path} is a scripted model (TorchScript)", _NEEDED, do)
    if has("models/model.json", "serialized_exported_program.json"):
        raise TargetError(f"{path} is an exported program", _NEEDED, do)
    if has(".weights.h5"):
        raise TargetError(f"{path} is a model of Keras", _NEEDED, "save the weights as safetensors")
    if not has("data.pkl"):
        what = "an archive of NumPy arrays" if has(".npy") else "a zip archive that torch.save did not write"
        raise TargetError(f"{path} is {what}", _NEEDED, "check what wrote it")
    # Mapped, a record that somebody packed anew with compression would be read as values.
    return all(info.compress_type == zipfile.ZIP_STORED for info in infos)


def _objects(path: Path, error: Exception) -> TargetError:
    """The sentence for a file with more in it than tensors and containers, which is not unpickled."""
    try:
        others = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # noqa: BLE001 - what cannot be listed is damaged, or none of PyTorch's
        others = []
    others = [name for name in others if name != "argparse.Namespace"]
    if not others:
        return TargetError(
            f"{path} is a pickle that is not read safely ({_first(error)})", _NEEDED, _ONLY_WEIGHTS
        )
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    if any(name.startswith("torch.nn.modules.") for name in others):
        given = f"{path} is a whole pickled model ({shown}), which can run any code when it is loaded"
    else:
        given = f"{path} holds Python objects beside tensors ({shown}), which could run any code when loaded"
    return TargetError(given, _NEEDED, _ONLY_WEIGHTS)


def _first(error: BaseException) -> str:
    """The first sentence of what it says, cut to a length that fits into ours."""
    text = " ".join(str(error).split())
    return text.split(". ")[0][:120].rstrip(".")


def _described(made: object) -> str:
    if isinstance(made, Tensor):
        return "a single tensor without a name"
    if isinstance(made, Mapping):
        return "no tensor under a name" if made else "an empty mapping"
    return f"an object of type {type(made).__name__}, which names no tensors"


def _sharded(path: Path) -> Weights:
    """The files that an index names, as one."""
    try:
        found = json.loads(path.read_bytes())
        placed = {str(name): str(file) for name, file in found["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        needed = "JSON with a weight_map of names to files"
        raise TargetError(f"{path} is no index of a checkpoint", needed, "check what wrote it") from error
    files = {file: path.parent / file for file in dict.fromkeys(placed.values())}
    missing = [file for file, place in files.items() if not _is_file(place)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise TargetError(f"{path} names {shown}, which is not there", "every file beside the index", _AGAIN)
    if any(file.endswith(".index.json") for file in files):
        raise TargetError(f"{path} names an index in its turn", "files with tensors", "check what wrote it")
    shards = {file: read(place) for file, place in files.items()}
    for file, shard in shards.items():
        if len(shard.entries) < list(placed.values()).count(file):  # prefixes may be off the names
            raise TargetError(
                f"{path} places more in {file} than lies there", "files that fit the index", _AGAIN
            )
    entries = {name: entry for shard in shards.values() for name, entry in shard.entries.items()}
    notes = tuple(dict.fromkeys(note for shard in shards.values() for note in shard.notes))
    form = next((shard.form for shard in shards.values()), "safetensors")
    return Weights({name: entries[name] for name in sorted(entries, key=_natural)}, form, notes)
