"""The loss of a model over data, with its norms on either source.

Not for gradients or training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.case import Call
from normalcy.case.words import did
from normalcy.errors import DataError, NormalcyError
from normalcy.measure.listening import listening, run_unless_single
from normalcy.undisturbed import on_batch_statistics

Loss = Callable[[Any, Any], Tensor]
"""loss(output, batch), the mean over the batch's examples."""


def mean_loss(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    norms: Mapping[str, _BatchNorm],
    among: Mapping[str, _BatchNorm] | None = None,
    call: Call | None = None,
) -> float:
    """The loss over all batches, each weighted by its examples, with only `norms` on batch statistics.

    With `norms` empty it is the evaluation loss. Batches in which one of `among` (which is `norms`, if it is
    not given) would get one value per channel are left out: with the same `among`, losses with either source
    are over the same batches.

    Raises:
        DataError: the model or the loss fails.
        TooFewValuesError: one of `among` gets one value per channel in every batch.
    """
    total = count = 0.0
    refusal: NormalcyError | None = None
    with (
        on_batch_statistics(model, norms),
        listening(norms if among is None else among, lambda *_: None),
    ):
        for batch in batches:
            outputs: list[Any] = []
            error = run_unless_single(model, batch, call, outputs.append)
            if error is not None:
                refusal = refusal or error
                continue
            examples = _examples(batch)
            total += examples * _number(loss, outputs[0], batch)
            count += examples
    if refusal is not None and not count:
        raise refusal
    return total / count if count else float("nan")


def _number(loss: Loss, output: Any, batch: Any) -> float:
    """The loss as a number; what goes wrong in it is the caller's, and said in a sentence."""
    try:
        return float(loss(output, batch))
    except (Exception, SystemExit) as error:
        raise DataError(
            f"loss(output, batch) {did(error)}",
            "a function of the model's output and of the whole batch that returns one number",
            "check it on one batch",
        ) from error


def _examples(batch: Any) -> int:
    """How many examples a batch holds: the first extent of the first tensor in it."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts: Sequence[Any] = []
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((_examples(part) for part in parts if isinstance(part, (Tensor, Mapping, Sequence))), 1)
