"""The names that the embedded example learns from: read, split by name, cut into windows of characters.

Not a corpus for anything larger: five thousand names of one country and one year.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from math import inf
from string import ascii_lowercase
from typing import TypeAlias

import torch
from torch import Tensor

from normalcy.errors import ArgumentError, DataError

Batch: TypeAlias = tuple[Tensor, Tensor]

ALPHABET = "." + ascii_lowercase  # "." is both the start and the end of a name
CONTEXT = 3


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
    order = torch.randperm(len(names), generator=generator(seed), device="cpu").tolist()
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
        >>> 2.3 < bigram_loss(parts.train, parts.test) < 2.4 < 3.2958
        True
    """
    if not 0 < smoothing < inf:
        raise ArgumentError(f"smoothing={smoothing}", "a positive finite number", "use 1.0")
    size = len(ALPHABET)
    pairs = train[0][:, -1] * size + train[1]
    counts = torch.bincount(pairs, minlength=size * size).reshape(size, size).double() + smoothing
    table = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -float(table[held_out[0][:, -1], held_out[1]].mean())


def generator(seed: int) -> torch.Generator:
    """A generator on the CPU, seeded; see `split_names` for what raises."""
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"seed={seed}", "an integer from 0 to 2⁶³ − 1", "give a smaller seed")
    return torch.Generator("cpu").manual_seed(seed)
