"""One variant of the embedded example, trained: another norm, another place, the same weights and data.

Not for the example itself, which has its faults on purpose: here everything is as it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normalcy import example
from normalcy.errors import ArgumentError
from normalcy.example import NORMS, PLACES, Batch, CharacterMLP
from normalcy.measure import mean_loss, tracking
from normalcy.surgery import recalibrate

MOMENTUM = 0.1
WEIGHT_DECAY = 1e-2
_POOLED = 1280  # examples that recalibration reads
_MOST_BATCHES = 1000  # that a loss is taken from


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """The example's network with one norm in one place.

    Example:
        >>> Variant("batch", "after").name, Variant("none").name
        ('batch after', 'none')
    """

    norm: str = "none"
    place: str = "before"

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ArgumentError(f"norm {self.norm!r}", f"one of {', '.join(NORMS)}")
        if self.place not in PLACES:
            raise ArgumentError(f"place {self.place!r}", f"one of {', '.join(PLACES)}")

    @property
    def name(self) -> str:
        """The norm, and where it stands to the activation."""
        return self.norm if self.norm == "none" else f"{self.norm} {self.place}"

    def build(self, seed: int) -> CharacterMLP:
        """The network, drawn from `seed`: the same embedding and weights whatever the variant.

        Batch norm has PyTorch's momentum of 0.1, and no bias before it, which it would erase.
        """
        dead = self.norm == "batch" and self.place == "before"
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed accelerators as well
            return CharacterMLP(norm=self.norm, place=self.place, momentum=MOMENTUM, bias=not dead)


def must_have_neighbours(variant: Variant, batch: int) -> None:
    """Refuse batch norm where an example has no neighbour.

    Raises:
        ArgumentError: batches of one; what each channel holds is then its own mean.
    """
    if variant.norm == "batch" and batch < 2:
        raise ArgumentError(
            "batch norm in batches of 1, where each value is its own mean",
            "at least 2 examples",
            "take layer, group or rms norm for batches of 1",
        )


def drawn(data: Batch, batch: int, count: int, seed: int) -> Iterator[Batch]:
    """`count` batches drawn with replacement; the same seed gives the same batches."""
    draws = example.generator(seed)
    contexts, following = data
    for _ in range(count):
        at = torch.randint(len(following), (batch,), generator=draws, device="cpu")
        yield contexts[at], following[at]


def train(
    variant: Variant,
    data: Batch,
    *,
    rate: float,
    batch: int,
    steps: int,
    seed: int,
    progress: Callable[[], None] | None = None,
) -> CharacterMLP:
    """Train one variant with AdamW; weight decay reaches matrices only. Given in evaluation mode.

    The rate stays as it is for all steps. `progress` is called after every step.

    Raises:
        ArgumentError: batch norm in batches of one, where each channel has a single value.

    Example:
        >>> parts = example.Split.of(example.load_names())
        >>> model = train(Variant("layer"), parts.train, rate=1e-2, batch=32, steps=20, seed=0)
        >>> example.evaluation_loss(model, parts.test) < 3.2
        True
    """
    must_have_neighbours(variant, batch)
    model = variant.build(seed)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=WEIGHT_DECAY)
    for piece in drawn(data, batch, steps, seed):
        example.step(model, optimizer, piece)
        if progress is not None:
            progress()
    return model.eval()


def norms_of(model: CharacterMLP) -> dict[str, _BatchNorm]:
    """Its batch norms, by path."""
    return tracking(model, [path for path, _ in model.named_modules()])


def loss_on_batches(model: CharacterMLP, data: Batch, batch: int, seed: int) -> float:
    """The loss where batch norms take their statistics from the batches, as in training.

    The windows are shuffled first, for those of one name are neighbours in the list and would be neighbours
    in a batch, as they are not in training. At most 1000 batches count, and what does not fill one is left
    out.

    Raises:
        ArgumentError: fewer windows than one batch.
    """
    contexts, following = data
    if len(following) < batch:
        raise ArgumentError(f"{len(following)} windows", f"at least one batch of {batch}")
    order = torch.randperm(len(following), generator=example.generator(seed), device="cpu")
    whole = order[: len(order) // batch * batch].reshape(-1, batch)[:_MOST_BATCHES]
    pieces = [(contexts[at], following[at]) for at in whole]
    return mean_loss(model, pieces, _loss, norms=norms_of(model))


def recalibrated(model: CharacterMLP, data: Batch, batch: int, seed: int) -> CharacterMLP:
    """The model, changed: its norms hold pooled statistics of training data, in batches as in training."""
    recalibrate(model, list(drawn(data, batch, -(-_POOLED // batch), seed)))
    return model


def _loss(output: Tensor, batch: Batch) -> Tensor:
    return example.loss(output, batch)
