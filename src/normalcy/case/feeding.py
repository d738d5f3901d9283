"""How data become batches.

Not for transforming data: a batch goes to the model as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normalcy.case.words import a, described, did
from normalcy.errors import DataError, NormalcyError

KEPT_BYTES = 2**31
"""Up to how much of a generator's data is kept, for walking it again."""


MOST_BATCHES = 100_000
"""After how many batches a generator is taken to be endless."""


class Batches(Iterable[Any]):
    """The batches of some data; every walk begins at the start and looks at each batch it gives out."""

    def __init__(self, source: Iterable[Any], name: str, *, one: bool = False) -> None:
        self._source, self._name, self._one = source, name, one

    def __iter__(self) -> Iterator[Any]:
        number = 0
        for number, batch in enumerate(_walked(self._source, self._name), 1):
            _must_be_usable(batch, "the batch" if self._one else f"batch {number} of the data")
            yield batch
        if not number:
            raise DataError(
                f"the data ({self._name}) have no batch",
                "at least one",
                "check whether the data are empty or already used up",
            )


class CountedBatches(Batches):
    """Batches whose number is known beforehand; `len` gives it."""

    def __init__(self, source: Iterable[Any], name: str, count: int, *, one: bool = False) -> None:
        super().__init__(source, name, one=one)
        self._count = count

    def __len__(self) -> int:
        return self._count


class Kept(Iterable[Any]):
    """A generator's batches, kept as they come, so that they can be walked again.

    Beyond `KEPT_BYTES` nothing is kept any more: then `again` makes a new generator for each walk, and where
    there is none the second walk is refused. So it is after a generator has failed or was interrupted: it
    cannot go on from there, and what was kept is not all.
    """

    def __init__(self, first: Iterator[Any], again: Callable[[], Any] | None = None) -> None:
        self._rest, self._again = _ending(first), again
        self._batches: list[Any] = []
        self._bytes = 0
        self._failed = False

    def __iter__(self) -> Iterator[Any]:
        if self._bytes > KEPT_BYTES or self._failed:
            yield from self._anew()
            return
        at = 0
        while self._bytes <= KEPT_BYTES:
            if at == len(self._batches) and not self._keep_next():
                return
            at += 1
            yield self._batches[at - 1]
        self._batches = []
        yield from self._rest

    def _keep_next(self) -> bool:
        try:
            batch = next(self._rest)
        except StopIteration:
            return False
        except BaseException:
            self._failed = True
            raise
        self._bytes += sum(x.numel() * x.element_size() for _, x in _tensors(batch))
        self._batches.append(batch)
        return True

    def _anew(self) -> Iterator[Any]:
        if self._again is None:
            what = (
                "that did not reach its end" if self._failed else f"of more than {KEPT_BYTES / 2**30:g} GiB"
            )
            raise DataError(
                f"the data are a generator {what}, to be walked only once",
                "data that can be walked several times",
                "give a loader, or a function that returns the generator",
            )
        return _ending(iter(self._again()))


def batches(data: Any) -> Batches:
    """Give data as batches that can be walked any number of times.

    A tensor, a dict or a tuple is one batch. A loader, a generator or a list is batches. A function without
    arguments is called, and what it returns is walked. A generator's batches are kept, up to 2 GiB.
    `len` of the result is known where the data's is.

    Raises:
        DataError: there are no data or no batch; a list looks like one batch; the data are of a kind that has
            no batches; a batch is empty or has a NaN or an infinity (a float mask of 0 and −inf passes);
            the loader itself fails. Except for the kind of data, this comes while walking.

    Example:
        >>> [described(batch) for batch in batches((torch.zeros(4, 3), torch.zeros(4)))]
        ['(float32 (4, 3), float32 (4,))']
        >>> len(list(batches(torch.zeros(4, 3) for _ in range(5))))
        5
    """
    if data is None:
        raise DataError(
            "no data were given", "a batch, or batches", "on the command line give --data file.py:callable"
        )
    if isinstance(data, Batches):
        return data
    if isinstance(data, (Tensor, Mapping, tuple)):
        return CountedBatches([data], described(data), 1, one=True)
    if _is_factory(data):
        return batches(replayable(_called(data), data))
    name = "generator" if isinstance(data, Kept) else type(data).__name__
    if isinstance(data, list):
        _must_not_be_one_batch(data)
        name = f"{a('list')} of {len(data)}"
    if isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        raise DataError(
            f"the data are the dataset {name}, which has examples, not batches",
            "a loader",
            "give DataLoader(dataset, batch_size=…)",
        )
    if (
        isinstance(data, (str, bytes, nn.Module))
        or type(data).__module__ == "numpy"
        or not isinstance(data, Iterable)
    ):
        raise DataError(
            f"the data are {a(name)}",
            "a tensor, dict or tuple (one batch), or a loader, generator or list (batches)",
            "turn arrays into tensors with torch.from_numpy",
        )
    data = replayable(data)
    try:
        return CountedBatches(data, name, len(data))
    except (Exception, SystemExit):  # noqa: BLE001 - without a length, or with one that cannot be told
        return Batches(data, name)


def replayable(data: Any, again: Callable[[], Any] | None = None) -> Any:
    """Make of a generator data that can be walked several times; leave everything else as it is."""
    one_shot = isinstance(data, Iterator) and not isinstance(data, (Mapping, Tensor))
    return Kept(data, again) if one_shot else data


def _ending(walk: Iterator[Any]) -> Iterator[Any]:
    for number, batch in enumerate(walk):
        if number == MOST_BATCHES:
            raise DataError(
                f"the data are a generator that has not ended after {MOST_BATCHES:,} batches",
                "data that end",
                "give itertools.islice(the generator, 100), or a loader",
            )
        yield batch


def _walked(source: Iterable[Any], name: str) -> Iterator[Any]:
    """The items of a loader; its own exceptions are told apart from those of who uses them."""
    number, walk = 1, None
    while True:
        try:
            walk = iter(source) if walk is None else walk
            batch = next(walk)
        except StopIteration:
            return
        except NormalcyError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                f"the data ({name}) {did(error)} when batch {number} was asked for",
                "data that can be walked to the end",
                "walk the data once without this library to see where it fails",
            ) from error
        yield batch
        number += 1


def _is_factory(data: Any) -> bool:
    return callable(data) and not isinstance(data, (type, nn.Module, Iterable))


def _called(factory: Callable[[], Any]) -> Any:
    name = getattr(factory, "__name__", "function")
    try:
        made = factory()
    except NormalcyError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"the data function {name}() {did(error)}",
            "a function without arguments that returns data",
        ) from error
    if made is None or _is_factory(made):
        what = "nothing" if made is None else "another function"
        raise DataError(
            f"the data function {name}() returned {what}", "a batch, or batches", "return the data"
        )
    return made


def _must_not_be_one_batch(data: list[Any]) -> None:
    tensors = len(data) > 1 and all(isinstance(part, Tensor) and part.dim() for part in data)
    if tensors and len({part.shape[0] for part in data}) == 1:
        raise DataError(
            f"the data are a list of {len(data)} tensors with one common first dimension "
            f"({data[0].shape[0]}), which is probably one batch",
            "data that leave no doubt",
            "give a tuple if it is one batch, or iter(the list) if each tensor is a batch",
        )


def _must_be_usable(batch: Any, name: str) -> None:
    if batch is None or (isinstance(batch, (tuple, list, Mapping)) and not len(batch)):
        raise DataError(f"{name} is {described(batch)}", "a tensor, tuple or dict", "leave empty batches out")
    found = list(_tensors(batch))
    if found and all(x.numel() == 0 for _, x in found):
        raise DataError(
            f"{name} is empty: {described(batch)}", "at least one example", "leave empty batches out"
        )
    for place, x in found:
        # Sparse and quantized tensors and eight-bit floats have no isfinite.
        if not (x.is_floating_point() and x.layout == torch.strided and x.element_size() > 1):
            continue
        finite = x.isfinite()
        if bool(finite.all()) or _is_additive_mask(x, finite):
            continue
        nans, bad = int(x.isnan().sum()), int((~finite).sum())
        where = f" (in {place})" if place else ""
        raise DataError(
            f"{name} has {bad} of {x.numel()} values not finite: {nans} NaN, {bad - nans} infinite{where}",
            "finite values",
            "find where they come from, and repair or leave out those examples",
        )


def _is_additive_mask(x: Tensor, finite: Tensor) -> bool:
    return bool((x[finite] == 0).all()) and bool((x[~finite] == -torch.inf).all())


def _tensors(batch: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield place, batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _tensors(part, f"{place}[{key!r}]" if place else f"key {key!r}")
    elif isinstance(batch, (tuple, list)):
        for index, part in enumerate(batch):
            yield from _tensors(part, f"{place}[{index}]" if place else f"element {index}")
