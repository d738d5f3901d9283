"""The actual statistics of a model's batch norms, streamed over data into `Moments`.

Not for judging them: that is the doctor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.case import Call
from normalcy.errors import DataError, NormalcyError
from normalcy.measure.listening import listening, run_unless_single
from normalcy.measure.records import Measured, Measurements, Sample, Skipped
from normalcy.moments import Moments
from normalcy.undisturbed import on_batch_statistics

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how far it is, and of how much (None: not known)."""

_SAMPLE = 2000


def tracking(model: nn.Module, norms: Iterable[str]) -> dict[str, _BatchNorm]:
    """Those of `norms` (paths) that keep running statistics and use the batch's when they train.

    A norm that is in evaluation mode while the model trains is frozen on purpose and is left out.
    """
    modules = dict(model.named_modules())
    found: dict[str, _BatchNorm] = {}
    for path in norms:
        module = modules.get(path)
        if module is None or getattr(module, "running_mean", None) is None:
            continue
        if isinstance(module, _BatchNorm) and (module.training or not model.training):
            found[path] = module
    return found


def measure(
    model: nn.Module,
    norms: Mapping[str, _BatchNorm],
    batches: Iterable[Any],
    *,
    call: Call | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """Run the model over `batches` with only `norms` on batch statistics; pool what each is given.

    Everything else is in evaluation mode (dropout stays off), no gradient is recorded, and no running
    statistic moves. Norms that the data never reach are missing from the result. Of a norm that is called
    with a mask or lengths, valid places alone count. A batch in which a norm would get one value per channel,
    as the last one of a loader may, is left out for all norms, and said in the result.

    Raises:
        DataError: there is no batch.
        TooFewValuesError: a norm gets one value per channel in every batch, with the norm's path.
    """
    pooled: dict[str, Measured] = {}
    here: list[tuple[str, Measured]] = []
    skipped: list[Skipped] = []
    refusal: NormalcyError | None = None
    seen = 0
    with (
        on_batch_statistics(model, norms),
        listening(norms, lambda path, x, valid: here.append((path, _measured(x, valid)))),
    ):
        for seen, batch in enumerate(batches, 1):
            here.clear()
            error = run_unless_single(model, batch, call)
            if error is None:
                for path, found in here:
                    pooled[path] = pooled[path] + found if path in pooled else found
            else:
                refusal = refusal or error
                skipped.append(Skipped(seen, error.given.rstrip(".")))
            if progress:
                progress("measuring statistics", seen, _length(batches))
    if not seen:
        raise DataError("the data have no batch", "at least one", "is the loader empty or used up?")
    if refusal is not None and len(skipped) == seen:
        raise refusal
    return Measurements(pooled, skipped, seen)


def sample(
    model: nn.Module,
    norms: Mapping[str, _BatchNorm],
    channels: Mapping[str, int],
    batch: Any,
    *,
    call: Call | None = None,
) -> dict[str, Sample]:
    """Up to 2000 values of one channel of each norm, on one batch, normalized with both sources.

    Norms that the batch does not reach are missing from the result, and so are those after one that would get
    one value per channel.
    """
    found: dict[str, Sample] = {}

    def take(path: str, x: Tensor, valid: Tensor | None) -> None:
        if path in found or path not in channels:
            return
        norm, channel = norms[path], channels[path]
        values = x.detach().select(1, channel)
        values = (values if valid is None else values[valid.select(1, channel)]).flatten().double()
        moments = Moments.of(values)
        mean, var = norm.running_mean, norm.running_var
        if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or not values.numel():
            return
        stored = (values - mean[channel].double()) / (var[channel].double() + norm.eps).sqrt()
        batched = (values - moments.mean) / (moments.var() + norm.eps).sqrt()
        step = max(1, -(-values.numel() // _SAMPLE))
        kept = slice(None, None, step)
        found[path] = Sample(channel, *(tuple(v[kept].tolist()) for v in (values, stored, batched)))

    with on_batch_statistics(model, norms), listening(norms, take):
        run_unless_single(model, batch, call)
    return found


def shared_statistics(model: nn.Module) -> dict[str, str]:
    """Modules that keep their running statistics in the same tensors as another: path to that one's path.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        >>> model[1].running_mean = model[0].running_mean
        >>> shared_statistics(model)
        {'0': '1', '1': '0'}
    """
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name in ("running_mean", "running_var"):
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor):
                holders.setdefault(id(tensor), []).append(path)
    others = [paths for paths in holders.values() if len(paths) > 1]
    return {path: next(other for other in paths if other != path) for paths in others for path in paths}


def _measured(x: Tensor, valid: Tensor | None) -> Measured:
    """One call: the moments of each example are merged to those of all."""
    space = tuple(range(2, x.dim()))
    each = Moments.of(x, dim=space, mask=valid)
    if valid is not None:  # examples differ in their number of places, and may have none
        return Measured(
            Moments.of(x, (0, *space), valid), Moments.of(each.mean, dim=0, mask=each.count > 0), 1
        )
    examples = Moments.of(each.mean, dim=0)
    places = each.count[0] if len(each.count) else torch.zeros_like(examples.count)
    m2 = each.m2.sum(0) + places * examples.m2
    return Measured(Moments(places * examples.count, examples.mean, m2), examples, 1)


def _length(batches: Iterable[Any]) -> int | None:
    return len(batches) if isinstance(batches, Sized) else None
