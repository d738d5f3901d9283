"""The embedded example: a character-level network on first names, trained on the spot, faults included.

Not a model to use and not a recipe to copy: it is here so that an examination has something real to find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from math import inf, log
from string import ascii_lowercase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from normalcy.errors import ArgumentError, DataError
from normalcy.nn import BatchNorm1d

Batch: TypeAlias = tuple[Tensor, Tensor]

ALPHABET = "." + ascii_lowercase  # "." is both the start and the end of a name
CONTEXT = 3
STEPS = 300
BATCH_SIZE = 128
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 1e-2
NORM_MOMENTUM = 0.001
KEPT_BATCHES = 50


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Windows of names, 80 % to train on, 10 % to choose by, 10 % held out; no name is in two parts.

    Each part is a pair (contexts (N, 3), next characters (N,)), int64, as `windows` makes it.
    """

    train: Batch
    validation: Batch
    test: Batch

    @classmethod
    def of(cls, names: Sequence[str], seed: int = 0) -> Split:
        """Split by name, shuffled by `seed`, and cut each part into windows.

        Raises:
            ArgumentError: the seed is not one that a generator takes.
            DataError: there are fewer than ten names, or one has a character outside a to z.

        Example:
            >>> parts = Split.of(load_names())
            >>> sum(len(following) for _, following in (parts.train, parts.validation, parts.test))
            36122
        """
        return cls(*(windows(part) for part in split_names(names, seed)))


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


class CharacterMLP(nn.Module):
    """logits = W·h₂ + b with hₖ = tanh(norm(Wₖ·hₖ₋₁ + bₖ)), h₀ = the embeddings of three characters, joined.

    `forward` maps indices (N, 3), int64 in [0, 27), to logits (N, 27) in the parameters' dtype. Two faults
    are there on purpose: the norm subtracts the mean and so erases the bias bₖ before it, and with momentum
    0.001 the running statistics need thousands of updates to forget that they began at 0 and 1.

    Source: the neural probabilistic language model (JMLR 3, 2003), with batch normalization before tanh.

    Example:
        >>> model = CharacterMLP(embedding=10, hidden=(200, 200))
        >>> model(torch.tensor([[0, 0, 1], [0, 1, 14]])).shape
        torch.Size([2, 27])
    """

    def __init__(self, embedding: int = 10, hidden: Sequence[int] = (200, 200)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), embedding)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = CONTEXT * embedding
        for number, units in enumerate(hidden, start=1):
            layers[f"linear{number}"] = nn.Linear(width, units)
            layers[f"norm{number}"] = BatchNorm1d(units, momentum=NORM_MOMENTUM)
            layers[f"tanh{number}"] = nn.Tanh()
            width = units
        self.hidden = nn.Sequential(layers)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, indices: Tensor) -> Tensor:
        """Logits (N, 27) of the character that follows each of `indices` (N, 3)."""
        logits: Tensor = self.output(self.hidden(self.embedding(indices).flatten(1)))
        return logits


def load_names() -> tuple[str, ...]:
    """The 5163 first names of the 1990 United States Census (public domain): lower case, sorted, each once.

    Example:
        >>> names = load_names()
        >>> len(names), names[:3]
        (5163, ('aaron', 'abbey', 'abbie'))
    """
    file = resources.files("normalcy") / "data" / "census-first-names.txt"
    return tuple(file.read_text(encoding="ascii").split())


def split_names(names: Sequence[str], seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """Shuffle the names by `seed` and cut them 80 : 10 : 10; see `Split.of` for what raises.

    Example:
        >>> [len(part) for part in split_names(load_names())]
        [4130, 516, 517]
    """
    if len(names) < 10:
        raise DataError(f"{len(names)} names were given", "at least 10, to hold one out", "give more names")
    order = torch.randperm(len(names), generator=_generator(seed), device="cpu").tolist()
    shuffled = [names[i] for i in order]
    first, second = len(names) * 8 // 10, len(names) * 9 // 10
    return shuffled[:first], shuffled[first:second], shuffled[second:]


def windows(names: Sequence[str]) -> Batch:
    """Every character of every name, its end included, with the three characters before it.

    Returns contexts (N, 3) and next characters (N,), int64 indices into ALPHABET; N = Σ(length + 1).

    Raises:
        DataError: a name has a character outside a to z.

    Example:
        >>> contexts, following = windows(["al"])
        >>> contexts.tolist(), following.tolist()
        ([[0, 0, 0], [0, 0, 1], [0, 1, 12]], [1, 12, 0])
    """
    index = {character: i for i, character in enumerate(ALPHABET)}
    contexts: list[list[int]] = []
    following: list[int] = []
    for name in names:
        if not name or not set(name) <= set(ascii_lowercase):
            raise DataError(
                f"the name {name!r}", "letters a to z only, at least one", "clean the list of names"
            )
        symbols = [0] * CONTEXT + [index[character] for character in name] + [0]
        for end in range(CONTEXT, len(symbols)):
            contexts.append(symbols[end - CONTEXT : end])
            following.append(symbols[end])
    joined = torch.tensor(contexts, dtype=torch.int64, device="cpu").reshape(-1, CONTEXT)
    return joined, torch.tensor(following, dtype=torch.int64, device="cpu")


def bigram_loss(train: Batch, held_out: Batch, smoothing: float = 1.0) -> float:
    """Nats per character of a table of character pairs: −mean log p, p = (count + s)/(total + 27·s).

    The table counts in `train` which character follows which; `smoothing` s = 1 adds one to every pair, so
    that a pair never seen keeps some probability. Counted and averaged in float64.

    Raises:
        ArgumentError: the smoothing is not positive and finite.

    Example:
        >>> parts = Split.of(load_names())
        >>> 2.3 < bigram_loss(parts.train, parts.test) < 2.4 < log(27)
        True
    """
    if not 0 < smoothing < inf:
        raise ArgumentError(f"smoothing={smoothing}", "a positive finite number", "use 1.0")
    size = len(ALPHABET)
    pairs = train[0][:, -1] * size + train[1]
    counts = torch.bincount(pairs, minlength=size * size).reshape(size, size).double() + smoothing
    table = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -float(table[held_out[0][:, -1], held_out[1]].mean())


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of `output` = model(batch[0]), logits (N, 27), in nats per character; a scalar.

    Example:
        >>> contexts, following = windows(["al"])
        >>> round(float(loss(torch.zeros(3, 27), (contexts, following))), 4)  # ln 27
        3.2958
    """
    return nn.functional.cross_entropy(output, batch[1])


def evaluation_loss(model: nn.Module, batch: Batch) -> float:
    """`loss` of the model on `batch` in evaluation mode; every module's mode is put back afterwards.

    Example:
        >>> model = CharacterMLP()
        >>> evaluation_loss(model, windows(["ann", "bob"])) > 0, model.training
        (True, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return float(loss(model(batch[0]), batch))
    finally:
        for module, mode in modes:
            module.training = mode


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
    generator = _generator(seed)
    parts = Split.of(load_names(), seed)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed accelerators as well
        model = CharacterMLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    contexts, following = parts.train
    batches: list[Batch] = []
    for done in range(1, STEPS + 1):
        drawn = torch.randint(len(following), (BATCH_SIZE,), generator=generator, device="cpu")
        batch = contexts[drawn], following[drawn]
        _step(model, optimizer, batch)
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


def _step(model: CharacterMLP, optimizer: torch.optim.AdamW, batch: Batch) -> None:
    optimizer.zero_grad()
    with torch.enable_grad():
        torch.autograd.backward(loss(model(batch[0]), batch))
    optimizer.step()


def _generator(seed: int) -> torch.Generator:
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"seed={seed}", "an integer from 0 to 2⁶³ − 1", "give a smaller seed")
    return torch.Generator("cpu").manual_seed(seed)
