"""Places of a model that a recorded pass says nothing about, or less than it seems.

Not for operators without a recorded call: the tape notes those as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from normalcy.flow.norms import is_norm
from normalcy.flow.records import Step
from normalcy.report import Item

_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def special(model: nn.Module, paths: Mapping[str, str], calls: Mapping[str, int]) -> Iterator[Item]:
    """Scripted and compiled modules, and those that have a fused path in evaluation."""
    whole: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in whole) or not calls[paths[path]]:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            whole.append(path)
            yield Item(path, "it is scripted: recorded as one step, and nothing inside is seen")
        elif _is_compiled(module):
            yield Item(path, "it is compiled: for the record it ran without the compiler")
        elif isinstance(module, _FAST) and not module.training:
            whole.append(path)
            yield Item(
                path,
                "in evaluation PyTorch may run it as one fused operation that calls none of its submodules; "
                "recorded is the ordinary way through them",
            )


def _is_compiled(module: nn.Module) -> bool:
    # Both are absent where the compiler was never imported.
    return (
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    )


def never_reached(
    model: nn.Module, calls: Mapping[str, int], used: Mapping[str, Step], path_of: Mapping[int, str]
) -> Iterator[Item]:
    """Norms that were never called, and the outermost modules of whose parameters nothing was used."""
    reached = dict.fromkeys(calls, False)
    whole: list[str] = []
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        below = [calls[path_of[id(inner)]] for inner in module.modules()]
        tensors = [*module.parameters(), *module.buffers()]
        touched = any(below) or any(names.get(id(tensor)) in used for tensor in tensors)
        reached[path] = touched
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in whole)
        if isinstance(module, torch.jit.ScriptModule):
            whole.append(path)
            inside = inside or bool(calls[path])
        if inside:
            continue
        if is_norm(module) and not calls[path]:
            taken = _taken(module, names, used)
            yield Item(path, f"this {type(module).__name__} was never called in the recorded pass{taken}")
        elif not touched and tensors and not _in(path, reached):
            yield Item(path, f"this {type(module).__name__} was never reached in the recorded pass")


def _taken(module: nn.Module, names: Mapping[int, str], used: Mapping[str, Step]) -> str:
    """Which tensors of a norm that is not called itself are used elsewhere, and by what."""
    held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    taken = {name: used[names[id(t)]] for name, t in held if names.get(id(t)) in used}
    if not taken:
        return ""
    step = next(iter(taken.values()))
    return f", but {step.op} in {step.module or 'the model itself'} takes its {', '.join(taken)}"


def _in(path: str, reached: Mapping[str, bool]) -> bool:
    """Whether a module around this one was not reached either, and has been named for it."""
    while path:
        path = path.rpartition(".")[0]
        if not reached.get(path, True):
            return True
    return False
