"""What the rules judge: gathered once, from a recorded pass and from measurements.

No judgement here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normalcy.conventions import TORCH
from normalcy.doctor.findings import Loss
from normalcy.measure import Gap, Measured, Measurements
from normalcy.report import Item
from normalcy.sites import DeadBias, Site, Sites
from normalcy.statistics import weight_left


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """One known norm, seen in a recorded pass (`site`) or only found in the model.

    Attributes:
        where: the module's path, or the site's name for a functional one.
        module: the layer; of a functional one, that which holds the running statistics it is given, or None.
        kind: "batch", "layer", "group", "instance" or "rms"; of a checkpoint's also "unknown".
        site: None where no pass was recorded, or the pass did not reach it.
        measured: what it was given on the data; None where that was not measured.
        gap: its train/eval gap; None where that was not measured.
    """

    where: str
    module: nn.Module | None
    kind: str
    site: Site | None = None
    measured: Measured | None = None
    gap: Gap | None = None

    @property
    def lent(self) -> bool:
        """Whether it is not called, and a function is given its running statistics."""
        return self.module is not None and self.site is not None and self.site.module is None

    @property
    def stored(self) -> tuple[Tensor, Tensor] | None:
        """Running mean and variance, if it keeps them."""
        mean, var = (getattr(self.module, name, None) for name in ("running_mean", "running_var"))
        return (mean, var) if isinstance(mean, Tensor) and isinstance(var, Tensor) else None

    @property
    def updates(self) -> int | None:
        """How many batches the running statistics took in; None where that is not counted."""
        counter = getattr(self.module, "num_batches_tracked", None)
        return int(counter) if isinstance(counter, Tensor) else None

    @property
    def momentum(self) -> float | None:
        """The weight of the new value; None: cumulative, or nothing running."""
        momentum = getattr(self.module, "momentum", None)
        return float(momentum) if momentum is not None and self.stored else None

    @property
    def weight_left(self) -> float | None:
        """What the initial state weighs in the running statistics; None where that is not known.

        Neither is it where the statistics contradict the counter: a variance below the initial state's share
        of 1, or statistics that moved in no update, as in a checkpoint converted without its counter.
        """
        if self.stored is None or self.updates is None:
            return None
        if self.updates == 0 or self.momentum == 0:
            return 1.0 if self.initial else None
        if self.momentum is None or getattr(self.module, "convention", TORCH).debias:
            return 0.0
        left, var = weight_left(self.momentum, self.updates), self.stored[1]
        rounding = self.updates * torch.finfo(var.dtype).eps  # one in each update
        return left if bool((var >= left * (1 - rounding)).all()) or not bool(var.isfinite().all()) else None

    @property
    def initial(self) -> bool:
        """Whether the running statistics are exactly the initial ones, mean 0 and variance 1."""
        return self.stored is not None and bool((self.stored[0] == 0).all() and (self.stored[1] == 1).all())

    @property
    def overflown(self) -> int:
        """In how many channels what it was given on the data has no finite mean and variance."""
        if self.measured is None:
            return 0
        actual = self.measured.actual
        return int((~(actual.mean.isfinite() & actual.m2.isfinite())).sum())

    @property
    def values(self) -> int | None:
        """The fewest values that shared one statistic in the recorded pass."""
        return min(self.site.values, default=None) if self.site else None


@dataclass(frozen=True, slots=True, eq=False)
class Dead:
    """A bias that is dead in evaluation.

    Attributes:
        verdict: which, and what removes it.
        kept: why it cannot be taken out; "" where it can.
        in_training: whether it is dead in training too; None where no pass in training could be recorded.
    """

    verdict: DeadBias
    kept: str = ""
    in_training: bool | None = True


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Everything that rules may look at.

    Attributes:
        model: the model examined.
        norms: its known norms.
        sites: wiring facts; None where there were no data to record a pass with.
        unrecognized: what looks like a normalizer and is none that is known.
        dead: biases that are dead.
        idle: norms that the recorded pass had no use for.
        left_out: what was measured, where batches had to be left out of it; else None.
        refusal: why nothing could be measured; "" where something was, or was not asked for.
        optimizer: None where none was given.
        loss: None where no loss was given.
    """

    model: nn.Module
    norms: tuple[Norm, ...]
    sites: Sites | None = None
    unrecognized: tuple[Item, ...] = ()
    dead: tuple[Dead, ...] = ()
    idle: frozenset[str] = frozenset()
    left_out: Measurements | None = None
    refusal: str = ""
    optimizer: torch.optim.Optimizer | None = None
    loss: Loss | None = None
