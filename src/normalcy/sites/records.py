"""What is known about a model's norms, as values: frozen records and nothing else.

Not the place for deciding anything; `find` fills these in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from normalcy.flow import Step
from normalcy.report import Item


@dataclass(frozen=True, slots=True)
class Producer:
    """What computes the values a norm receives.

    Attributes:
        path: path of the module that ran when the values were produced; None where that is not known.
        op: canonical name of the operation, for example "conv2d"; None where it is not known.
        module: the convolution or linear layer itself, where the operation is its own.
        why: why the producer is not known; empty where it is.
    """

    path: str | None
    op: str | None
    module: nn.Module | None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Removal:
    """One norm that subtracts a dead bias again, and how the bias reaches its channels.

    Channel `channels[i]` of the norm receives `factors[i] · bias[sources[i]]` on top of the rest.

    Attributes:
        where: the norm's path.
        module: the norm; None for a functional one.
        tracks: the norm keeps a running mean, which has to take the bias over.
    """

    where: str
    module: nn.Module | None
    tracks: bool
    channels: tuple[int, ...]
    sources: tuple[int, ...]
    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DeadBias:
    """Verdict: does every consumer of a layer's output subtract its bias again?

    Attributes:
        where: path of the layer with the bias.
        ok: the bias has no influence on anything while statistics come from the batch.
        why: one sentence: which norms remove it, or where it survives.
        module: the layer.
        removals: the norms that remove it; empty unless `ok`.
    """

    where: str
    ok: bool
    why: str
    module: nn.Module | None
    removals: tuple[Removal, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Verdict: can this norm be folded into the layer before it, as far as wiring tells?

    Numbers (overflow, a negative variance) are judged by the folding itself.
    """

    ok: bool
    why: str
    producer: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One normalizer of a model.

    Attributes:
        where: the module's path, or "PATH: batch_norm (call 2)" for a functional one.
        module: the layer; None for a functional one.
        kind: "batch", "layer", "group", "instance" or "rms".
        cls: class name, or the function's name.
        channels: size of the axis (or axes) that γ and β have; None where it is not known.
        steps: its calls, in order.
        values: values that share one statistic, one number for each call.
        tracks: it keeps running statistics.
        holder: of a functional norm, the path of the module that holds the running statistics it is given.
        producer: what computes its input in the first call.
        dead_bias: verdict on the bias of the layer that feeds it; None where there is no such bias.
        fold: verdict on folding it into the layer before it.
    """

    where: str
    module: nn.Module | None
    kind: str
    cls: str
    channels: int | None
    steps: tuple[Step, ...]
    values: tuple[int, ...]
    tracks: bool
    holder: str | None
    producer: Producer
    dead_bias: DeadBias | None
    fold: Fold

    @property
    def calls(self) -> int:
        """How often it ran in the recorded pass."""
        return len(self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """All norm sites of a model, in the order in which they first ran.

    Attributes:
        sites: the known ones.
        biases: the verdict on every layer with a bias that feeds some known norm.
        unrecognized: what looks like a normalizer and is none that is known.
        not_seen: known norms that the recorded pass never reached.
        idle: the paths of known norms that did not run in the pass, and whose tensors nothing used either.
    """

    sites: tuple[Site, ...]
    biases: tuple[DeadBias, ...]
    unrecognized: tuple[Item, ...]
    not_seen: tuple[Item, ...]
    idle: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, where: str) -> Site:
        for site in self.sites:
            if site.where == where:
                return site
        raise KeyError(where)

    @property
    def dead(self) -> tuple[DeadBias, ...]:
        """The biases that are dead."""
        return tuple(bias for bias in self.biases if bias.ok)
