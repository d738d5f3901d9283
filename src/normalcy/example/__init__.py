"""The embedded example: a character-level network on first names, trained on the spot, faults included.

Not a model to use and not a recipe to copy: it is here so that an examination has something real to find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch

from normalcy.example.names import (
    ALPHABET,
    CONTEXT,
    Batch,
    Split,
    bigram_loss,
    generator,
    load_names,
    split_names,
    windows,
)
from normalcy.example.network import (
    NORM_MOMENTUM,
    NORMS,
    PLACES,
    CharacterMLP,
    evaluation_loss,
    loss,
    step,
)

__all__ = [
    "ALPHABET",
    "CONTEXT",
    "NORMS",
    "NORM_MOMENTUM",
    "PLACES",
    "Batch",
    "CharacterMLP",
    "Split",
    "Trained",
    "bigram_loss",
    "evaluation_loss",
    "generator",
    "load_names",
    "loss",
    "split_names",
    "step",
    "train",
    "windows",
]

STEPS = 300
BATCH_SIZE = 128
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 1e-2
KEPT_BATCHES = 50


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The trained example and what is needed to examine, repair and judge it.

    Attributes:
        model: the network, in evaluation mode.
        optimizer: what trained it, with its state; one group, weight decay on everything.
        batches: the first 50 of the training batches (contexts (128, 3), next characters (128,)).
        held_out: every window of the names held out, for judging only.
        uniform: nats per character if all 27 symbols were equally likely, ln 27.
        bigram: nats per character of a bigram table on `held_out`, fitted on the training names.
        steps: how many training steps there were.
        seed: what the split, the initial weights and the batches follow from.
    """

    model: CharacterMLP
    optimizer: torch.optim.AdamW
    batches: list[Batch]
    held_out: Batch
    uniform: float
    bigram: float
    steps: int
    seed: int


def train(seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Trained:
    """Train the example: 300 steps of AdamW, rate 0.01, batches of 128 drawn with replacement.

    The same seed gives the same bits on the same machine with as many threads; the caller's random state is
    left alone. It takes a second or two on a CPU. `progress` is called after every step with the steps done
    and the steps in all.

    Faults on purpose, all of them ordinary: the norms' momentum of 0.001 leaves (1 − 0.001)³⁰⁰ = 74 % of the
    running statistics at their initial values, so that the model in evaluation is worse than a bigram
    table; there is a bias before each norm; weight decay reaches everything, also the norms' γ and β.
    Nothing is edited afterwards.

    Raises:
        ArgumentError: the seed is not one that a generator takes.

    Example:
        >>> trained = train()
        >>> before = evaluation_loss(trained.model, trained.held_out)
        >>> trained.bigram < before < trained.uniform
        True
    """
    draws = generator(seed)
    parts = Split.of(load_names(), seed)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed accelerators as well
        model = CharacterMLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    contexts, following = parts.train
    batches: list[Batch] = []
    for done in range(1, STEPS + 1):
        drawn = torch.randint(len(following), (BATCH_SIZE,), generator=draws, device="cpu")
        batch = contexts[drawn], following[drawn]
        step(model, optimizer, batch)
        if len(batches) < KEPT_BATCHES:
            batches.append(batch)
        if progress is not None:
            progress(done, STEPS)
    return Trained(
        model=model.eval(),
        optimizer=optimizer,
        batches=batches,
        held_out=parts.test,
        uniform=log(len(ALPHABET)),
        bigram=bigram_loss(parts.train, parts.test),
        steps=STEPS,
        seed=seed,
    )
