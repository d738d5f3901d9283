"""The actual statistics of a model's batch norms, streamed over data into `Moments`.

One routine for the doctor's evidence and for recalibration. It changes nothing in the model: modes, buffers
and the random state are as before when it returns or fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy.case import Call, run
from normalcy.errors import DataError, TooFewValuesError
from normalcy.moments import Moments
from normalcy.undisturbed import on_batch_statistics

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how far it is, and of how much (None: not known)."""

Loss = Callable[[Any, Any], Tensor]
"""loss(output, batch), the mean over the batch's examples."""

_SAMPLE = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one norm was given, over all batches.

    Attributes:
        actual: moments of its input, one entry per channel, pooled over batches and calls.
        examples: moments of each example's mean; the places of one example are no independent values.
        calls: how many calls were pooled.
    """

    actual: Moments
    examples: Moments
    calls: int

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.actual + other.actual, self.examples + other.examples, self.calls + other.calls)

    @property
    def standard_error(self) -> float:
        """How far the mean is off by chance, in standard deviations: √(var of examples/N/var) over channels.

        Between 1/√(values), where places are as different as examples, and 1/√N, where they are alike.
        """
        var, between = self.actual.var(), self.examples.var(1)
        share = torch.where(var > 0, between / var, 0.0).nan_to_num(nan=1.0).clamp(max=1.0)
        return float((share / self.examples.count.clamp(min=1)).mean().sqrt())


@dataclass(frozen=True, slots=True)
class Gap:
    """How far evaluation is from training on the same input, for one norm, of the normalized value.

    In standard deviations of the data, from the moments alone and therefore without a second pass:

        gap² = var·(1/√(stored_var + eps) − 1/√(var + eps))² + (mean − stored_mean)²/(stored_var + eps)

    Attributes:
        rms: over all channels.
        worst: of the channel where it is largest.
        channel: which channel that is.
        mean_shift: the largest |mean − stored_mean| in standard deviations of the data.
        var_ratio: stored variance over actual variance in the worst channel.
    """

    rms: float
    worst: float
    channel: int
    mean_shift: float
    var_ratio: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one channel, before γ and β: as they came in, and normalized with either source."""

    channel: int
    before: tuple[float, ...]
    stored: tuple[float, ...]
    batch: tuple[float, ...]

    def shape(self) -> dict[str, tuple[float | None, float | None]]:
        """Skewness and kurtosis of each; equal up to rounding, as normalizing keeps the shape."""
        return {name: _shape(getattr(self, name)) for name in ("before", "stored", "batch")}


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
) -> dict[str, Measured]:
    """Run the model over `batches` with only `norms` on batch statistics; pool what each is given.

    Everything else is in evaluation mode (dropout stays off), no gradient is recorded, and no running
    statistic moves. Norms that the data never reach are missing from the result.

    Raises:
        DataError: there is no batch.
        TooFewValuesError: a norm gets one value per channel, with the norm's path.
    """
    pooled: dict[str, Measured] = {}

    def take(path: str, x: Tensor) -> None:
        found = _measured(x)
        pooled[path] = pooled[path] + found if path in pooled else found

    seen = 0
    with on_batch_statistics(model, norms), _listening(norms, take):
        for seen, batch in enumerate(batches, 1):
            run(model, batch, call)
            if progress:
                progress("measuring statistics", seen, _length(batches))
    if not seen:
        raise DataError("the data have no batch", "at least one", "is the loader empty or used up?")
    return pooled


def gap(actual: Moments, stored_mean: Tensor, stored_var: Tensor, eps: float) -> Gap:
    """The train/eval gap of a norm with these stored statistics on data with these moments.

    Example:
        >>> data = Moments.of(torch.tensor([[8.0], [10.0], [12.0]]), dim=0)
        >>> round(gap(data, torch.tensor([10.0]), data.var(), 1e-5).rms, 6)
        0.0
        >>> round(gap(data, torch.tensor([0.0]), torch.tensor([1.0]), 0.0).mean_shift, 3)
        6.124
    """
    mean, var = actual.mean, actual.var()
    stored_mean, stored_var = stored_mean.double(), stored_var.double()
    ours, theirs = (stored_var + eps).rsqrt(), (var + eps).rsqrt()
    squared = var * (ours - theirs).square() + ((mean - stored_mean) * ours).square()
    squared = squared.nan_to_num(nan=torch.inf)
    channel = int(squared.argmax())
    shift = (mean - stored_mean).abs() * theirs
    return Gap(
        rms=float(squared.mean().sqrt()),
        worst=float(squared[channel].sqrt()),
        channel=channel,
        mean_shift=float(shift.nan_to_num(nan=torch.inf).max()),
        var_ratio=float(stored_var[channel] / var[channel]),
    )


def sample(
    model: nn.Module,
    norms: Mapping[str, _BatchNorm],
    channels: Mapping[str, int],
    batch: Any,
    *,
    call: Call | None = None,
) -> dict[str, Sample]:
    """Up to 2000 values of one channel of each norm, on one batch, normalized with both sources."""
    found: dict[str, Sample] = {}

    def take(path: str, x: Tensor) -> None:
        if path in found or path not in channels:
            return
        norm, channel = norms[path], channels[path]
        values = x.detach().select(1, channel).flatten().double()
        moments = Moments.of(values)
        mean, var = norm.running_mean, norm.running_var
        if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
            return
        stored = (values - mean[channel].double()) / (var[channel].double() + norm.eps).sqrt()
        batched = (values - moments.mean) / (moments.var() + norm.eps).sqrt()
        step = max(1, -(-values.numel() // _SAMPLE))
        kept = slice(None, None, step)
        found[path] = Sample(channel, *(tuple(v[kept].tolist()) for v in (values, stored, batched)))

    with on_batch_statistics(model, norms), _listening(norms, take):
        run(model, batch, call)
    return found


def mean_loss(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    norms: Mapping[str, _BatchNorm],
    call: Call | None = None,
) -> float:
    """The loss over all batches, each weighted by its examples, with only `norms` on batch statistics.

    With `norms` empty it is the evaluation loss.
    """
    total = count = 0.0
    with on_batch_statistics(model, norms):
        for batch in batches:
            examples = _examples(batch)
            total += examples * _number(loss, run(model, batch, call), batch)
            count += examples
    return total / count if count else float("nan")


def _measured(x: Tensor) -> Measured:
    """One call: the moments of each example are merged to those of all."""
    each = Moments.of(x, dim=tuple(range(2, x.dim())))
    examples = Moments.of(each.mean, dim=0)
    places = each.count[0] if len(each.count) else torch.zeros_like(examples.count)
    m2 = each.m2.sum(0) + places * examples.m2
    return Measured(Moments(places * examples.count, examples.mean, m2), examples, 1)


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


@contextmanager
def _listening(norms: Mapping[str, _BatchNorm], take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within: `take(path, input)` is called before each norm runs."""

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if inputs else named["input"]
            if x.numel() and x.numel() // x.shape[1] == 1:
                raise TooFewValuesError(
                    f"{path} ({type(norm).__name__}) gets one value per channel: shape {tuple(x.shape)}",
                    "at least two for batch statistics",
                    "use larger batches, or group or layer norm in its place",
                )
            take(path, x)

        return before

    with ExitStack() as stack:
        for path, norm in norms.items():
            stack.callback(norm.register_forward_pre_hook(hook(path), with_kwargs=True).remove)
        yield


def _shape(values: tuple[float, ...]) -> tuple[float | None, float | None]:
    """E[d³]/var^1.5 and E[d⁴]/var²; None where the values do not vary or are not finite."""
    x = torch.tensor(values, dtype=torch.float64)
    moments = Moments.of(x)
    d, var = x - moments.mean, float(moments.var())
    if not var > 0 or not math.isfinite(var):
        return None, None
    return float((d**3).mean()) / var**1.5, float((d**4).mean()) / var**2


def _number(loss: Loss, output: Any, batch: Any) -> float:
    """The loss as a number; what goes wrong in it is the caller's, and said in a sentence."""
    try:
        return float(loss(output, batch))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise DataError(
            f"loss(output, batch) raised {said}",
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


def _length(batches: Iterable[Any]) -> int | None:
    return len(batches) if isinstance(batches, Sized) else None
