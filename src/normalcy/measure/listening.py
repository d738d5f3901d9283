"""Hearing what each norm is given, and telling batches in which one would get a single value.

Not for running the model: what runs it decides its modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.case import Call, run
from normalcy.case.valid import valid_of
from normalcy.errors import NormalcyError, TooFewValuesError


@contextmanager
def listening(
    norms: Mapping[str, _BatchNorm], take: Callable[[str, Tensor, Tensor | None], None]
) -> Iterator[None]:
    """Within: `take(path, input, valid places or None)` is called before each norm runs.

    It is not called, but TooFewValuesError raised, where a channel has one value.
    """

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x, valid = inputs[0] if inputs else named["input"], valid_of(norm, inputs, named)
            if _single(x, valid):
                shape = f"shape {tuple(x.shape)}{'' if valid is None else ', masked'}"
                raise TooFewValuesError(
                    f"{path} ({type(norm).__name__}) gets one value per channel: {shape}",
                    "at least two for batch statistics",
                    "use larger batches, or group or layer norm in its place",
                )
            take(path, x, valid)

        return before

    with ExitStack() as stack:
        for path, norm in norms.items():
            stack.callback(norm.register_forward_pre_hook(hook(path), with_kwargs=True).remove)
        yield


def _single(x: Tensor, valid: Tensor | None) -> bool:
    """Whether a channel has exactly one value, which would be its own mean."""
    if valid is None:
        return bool(x.numel()) and x.numel() // x.shape[1] == 1
    return bool((valid.sum((0, *range(2, x.dim()))) == 1).any())


def run_unless_single(
    model: nn.Module, batch: Any, call: Call | None, take: Callable[[Any], None] | None = None
) -> NormalcyError | None:
    """Run the model on a batch and `take` its output; or return the error of a norm that got a single value.

    Other errors are raised. PyTorch's own norms say it in a ValueError, which is known by its words.
    """
    try:
        output = run(model, batch, call)
    except NormalcyError as error:
        cause = error.__cause__
        said = isinstance(cause, ValueError) and str(cause).startswith("Expected more than 1 ")
        if said or isinstance(error, TooFewValuesError):
            return error
        raise
    if take:
        take(output)
    return None
