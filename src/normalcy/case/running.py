"""Giving a model one batch, and saying where it failed if it does.

Not for modes or gradients: the caller sets those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from normalcy.case.words import described, did
from normalcy.errors import DataError, NormalcyError

Call = Callable[[nn.Module, Any], Any]
"""call(model, batch), for a model that is called in another way than `run` says."""


def run(model: nn.Module, batch: Any, call: Call | None = None) -> Any:
    """Give a model one batch and return what it returns.

    With `call` that is `call(model, batch)`. Otherwise the model gets the first element of a tuple (or of the
    list that PyTorch's loaders make of a tuple), and a tensor whole. A dict goes in as keyword arguments
    where its keys fit the signature of `forward`, as models of the transformers library expect; else whole.

    Raises:
        DataError: the model raised, or called sys.exit; with its exception, what it was given, and the module
            where it happened.
        NormalcyError: of its own kind, where a layer of this library refused; the module's path is added.

    Example:
        >>> import torch
        >>> run(nn.Linear(3, 2), (torch.zeros(4, 3), torch.zeros(4))).shape
        torch.Size([4, 2])
    """
    try:
        if call is not None:
            return call(model, batch)
        given = _first(batch)
        if isinstance(given, Mapping) and _fits(model, given):
            return model(**given)
        return model(given)
    except NormalcyError as error:
        path = _failed_at(model, error.__traceback__)
        if not path or error.given.startswith(f"{path} (") or f"(at {path})" in error.given:
            raise
        raise type(error)(f"{error.given} (at {path})", error.needed, error.do) from error
    except (Exception, SystemExit) as error:
        raise _not_taken(model, batch, call, error) from error


def _first(batch: Any) -> Any:
    if not isinstance(batch, (tuple, list)):
        return batch
    if not batch:
        raise DataError(f"the batch is {described(batch)}", "a tensor, tuple or dict", "give one with values")
    return batch[0]


def _fits(model: nn.Module, given: Mapping[Any, Any]) -> bool:
    if not all(isinstance(key, str) for key in given):
        return False
    try:
        inspect.signature(model.forward).bind(**given)
    except (TypeError, ValueError):
        return False
    return True


def _failed_at(model: nn.Module, trace: TracebackType | None) -> str:
    """The path of the innermost module of `model` whose call is in the traceback; "" for the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = paths.get(id(owner), found)
        trace = trace.tb_next
    return found


def _not_taken(model: nn.Module, batch: Any, call: Call | None, error: BaseException) -> DataError:
    path = _failed_at(model, error.__traceback__)
    at = f" at {path} ({type(model.get_submodule(path)).__name__})" if path else ""
    given = batch if call is not None else _first(batch)
    whole = " (a dict goes in whole where its keys do not fit forward)"
    note = whole if call is None and isinstance(given, Mapping) and not _fits(model, given) else ""
    who = "call(model, batch)" if call is not None else f"the model ({type(model).__name__})"
    happened = f"{who} {did(error)}{at}, given {described(given)}{note}"
    if isinstance(error, SystemExit):
        return DataError(happened, "code that returns", "leave the process to whoever runs it")
    return DataError(
        happened,
        "a batch in the form that the model takes",
        "check shape and dtype of the data; where the model is called otherwise, give call(model, batch)",
    )
