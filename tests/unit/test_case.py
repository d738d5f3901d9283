"""How data become batches, how a model is given one, and what a name on a command line loads."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normalcy
from normalcy import case
from normalcy.case import Case, batches, data_of, feeding, load, replayable, run
from normalcy.errors import ArgumentError, DataError, ShapeError, TargetError, TooFewValuesError


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 7


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))


class Scores(nn.Module):
    """Takes what models of language take: keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, values: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(values) * (1 if scale is None else scale)


class TakesADict(nn.Module):
    def forward(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return parts["values"].sum()


@pytest.mark.parametrize(
    "one",
    [drawn(4, 3), (drawn(4, 3), drawn(4)), {"values": drawn(4, 3)}],
    ids=["tensor", "tuple", "dict"],
)
def test_a_tensor_a_tuple_and_a_dict_are_one_batch(one):
    made = batches(one)
    assert len(made) == 1
    (batch,) = made
    assert same(batch, one)


def test_a_loader_a_list_and_a_generator_are_batches_that_can_be_walked_again():
    parts = [(drawn(4, 3, seed=s), drawn(4, seed=s)) for s in range(3)]
    dataset = torch.utils.data.TensorDataset(drawn(12, 3), drawn(12))
    for data, count in ((parts, 3), (torch.utils.data.DataLoader(dataset, 4), 3), ((p for p in parts), None)):
        made = batches(data)
        assert (len(made) if hasattr(made, "__len__") else None) == count
        first, second = list(made), list(made)
        assert len(first) == 3
        assert same(first, second)


def test_a_loader_that_cannot_tell_its_length_is_walked_without_one():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (drawn(3, seed=s) for s in range(4))

    made = batches(torch.utils.data.DataLoader(Endless(), 2))
    assert not hasattr(made, "__len__")
    assert [tuple(batch.shape) for batch in made] == [(2, 3), (2, 3)]


def test_a_generator_begun_and_left_gives_the_same_batches_again():
    kept = replayable(drawn(2, 3, seed=s) for s in range(4))
    walk = iter(kept)
    head = [next(walk), next(walk)]
    assert same(list(kept)[:2], head)
    assert same(list(kept), [drawn(2, 3, seed=s) for s in range(4)])
    assert same([*head, *walk], list(kept))


def test_a_generator_too_large_to_keep_is_made_anew_or_refused(monkeypatch):
    monkeypatch.setattr(feeding, "KEPT_BYTES", 2 * 2 * 3 * 4)

    def make():
        return (drawn(2, 3, seed=s) for s in range(5))

    expected = list(make())
    again = replayable(make(), make)
    assert same(list(again), expected)
    assert same(list(again), expected)
    alone = replayable(make())
    assert same(list(alone), expected)
    with pytest.raises(DataError, match=r"walked only once.* needed: data that can be walked several times"):
        list(alone)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, ValueError], ids=lambda e: e.__name__)
def test_a_generator_that_failed_halfway_is_made_anew_or_refused_and_never_taken_for_all(failure):
    fails = [True]

    def make():
        yield drawn(2, 3, seed=0)
        if fails.pop():
            raise failure
        yield drawn(2, 3, seed=1)

    expected = [drawn(2, 3, seed=0), drawn(2, 3, seed=1)]
    given = batches(make())
    told = KeyboardInterrupt if failure is KeyboardInterrupt else DataError
    with pytest.raises(told):
        list(given)
    with pytest.raises(DataError, match=r"a generator that did not reach its end, to be walked only once"):
        list(given)
    fails.extend([False, True])
    again = batches(make)
    with pytest.raises(told):
        list(again)
    assert same(list(again), expected)


@pytest.mark.parametrize("length", [SystemExit, RuntimeError], ids=lambda e: e.__name__)
def test_data_whose_length_fails_are_walked_without_one(length):
    class Odd(list):
        def __len__(self):
            raise length

    loader = torch.utils.data.DataLoader([drawn(3)] * 4, batch_size=2)
    loader.__class__ = type("Loader", (type(loader),), {"__len__": Odd.__len__})
    assert [len(batch) for batch in batches(loader)] == [2, 2]


def leave(*_: object) -> None:
    sys.exit(0)


def test_leaving_the_process_from_the_model_or_the_data_is_a_mistake_told_where():
    class Leaves(nn.Module):
        def forward(self, _: torch.Tensor) -> None:
            sys.exit("enough\nof it")

    x = drawn(4, 3)
    with pytest.raises(
        DataError, match=r"model \(Sequential\) called sys\.exit\('enough\\nof it'\) at 1 \(Leaves\)"
    ):
        run(nn.Sequential(nn.Identity(), Leaves()), x)
    with pytest.raises(
        DataError, match=r"^call\(model, batch\) called sys\.exit\(0\), .* needed: code that returns"
    ):
        run(nn.Identity(), x, leave)
    with pytest.raises(DataError, match=r"^the data function leave\(\) called sys\.exit\(0\)"):
        batches(leave)
    with pytest.raises(DataError, match=r"^the data \(generator\) called sys\.exit\(0\) when batch 1 was"):
        list(batches(leave() for _ in range(2)))


def test_a_generator_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(feeding, "MOST_BATCHES", 5)

    def endless():
        while True:
            yield drawn(2, 3)

    for data in (endless(), endless):
        with pytest.raises(DataError, match=r"has not ended after 5 batches; .* itertools\.islice"):
            list(batches(data))
    assert len(list(batches(drawn(2, 3, seed=s) for s in range(5)))) == 5


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["function", "partial"])
def test_a_function_is_called_for_its_data(wrap):
    assert same(list(batches(wrap(lambda: [drawn(2, 3)]))), [drawn(2, 3)])
    assert same(list(batches(wrap(lambda: drawn(2, 3)))), [drawn(2, 3)])


REFUSED = [
    (None, "no data were given; needed: a batch"),
    ([], r"the data \(a list of 0\) have no batch"),
    ((), r"the batch is \(\)"),
    ({}, r"the batch is \{\}"),
    (iter(()), "have no batch"),
    (
        [drawn(4, 3), drawn(4)],
        r"a list of 2 tensors with one common first dimension \(4\), which is probably one batch",
    ),
    ("data.csv", "the data are a str; needed: a tensor, dict or tuple"),
    (3, "the data are an int"),
    (drawn(4, 3).numpy(), "the data are a ndarray.* torch.from_numpy"),
    (nn.Sequential(nn.Linear(3, 3)), "the data are a Sequential"),
    (torch.utils.data.TensorDataset(drawn(4, 3)), "the dataset TensorDataset.* DataLoader"),
    (drawn(0, 3), r"the batch is empty: float32 \(0, 3\)"),
    ([(drawn(4, 3),), (drawn(0, 3),)], "batch 2 of the data is empty"),
    ([(drawn(4, 3),), None], "batch 2 of the data is None"),
    (lambda: None, "returned nothing"),
    (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
    (
        lambda: (1 / n for n in (1, 0)),
        "raised ZeroDivisionError: division by zero when batch 2 was asked for",
    ),
]


def without_address(value):
    return re.sub(r" at 0x\w+", "", str(value))[:40]


@pytest.mark.parametrize(("data", "sentence"), REFUSED, ids=without_address)
def test_data_without_usable_batches_are_refused(data, sentence):
    with pytest.raises(DataError, match=sentence):
        list(batches(data))


def test_values_that_are_not_finite_are_counted_where_they_stand():
    bad = drawn(4, 3)
    bad[1, 2], bad[2, 0], bad[3, 1] = float("nan"), float("inf"), float("-inf")
    with pytest.raises(
        DataError,
        match=r"batch 2 of the data has 3 of 12 values not finite: 1 NaN, 2 infinite \(in key 'x'\)",
    ):
        list(batches([{"x": drawn(4, 3)}, {"x": bad, "n": torch.arange(4)}]))


def test_an_additive_attention_mask_is_no_fault_and_the_same_with_a_nan_is():
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    assert len(list(batches((drawn(3, 3), mask)))) == 1
    mask[2, 2] = float("nan")
    with pytest.raises(DataError, match=r"1 NaN, 3 infinite \(in element 1\)"):
        list(batches((drawn(3, 3), mask)))


def test_the_model_gets_the_first_element_of_a_tuple_or_of_a_loaders_list():
    model, x = nn.Linear(3, 2), drawn(4, 3)
    for batch in (x, (x, drawn(4)), [x, drawn(4)]):
        assert torch.equal(run(model, batch), model(x))


def test_a_dict_goes_in_as_keywords_where_they_fit_and_whole_where_not():
    model, x = Scores(), drawn(4, 3)
    assert torch.equal(run(model, {"values": x, "scale": torch.tensor(3.0)}), model(x, torch.tensor(3.0)))
    assert torch.equal(run(model, ({"values": x}, drawn(4))), model(x))
    assert torch.equal(run(TakesADict(), {"values": x}), x.sum())
    assert torch.equal(run(TakesADict(), {"parts": {"values": x}}), x.sum())


def test_call_decides_how_the_model_is_called():
    model, x = Scores(), drawn(4, 3)
    made = run(model, (x, 5.0), lambda m, batch: m(batch[0], torch.tensor(batch[1])))
    assert torch.equal(made, model(x) * 5)


def test_a_batch_that_does_not_fit_names_its_shape_and_the_module_that_failed():
    with pytest.raises(
        DataError,
        match=r"the model \(Scores\) raised RuntimeError: mat1.* at inner \(Linear\), given float32 \(4, 7\)",
    ) as caught:
        run(Scores(), {"values": drawn(4, 7)}["values"])
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(DataError, match=r"given \{x: float32 \(4, 3\)\} \(a dict goes in whole"):
        run(Scores(), {"x": drawn(4, 3)})
    with pytest.raises(DataError, match=r"call\(model, batch\) raised KeyError: 'absent'"):
        run(Scores(), {}, lambda _, batch: batch["absent"])


def test_a_refusal_of_one_of_our_layers_keeps_its_kind_and_gains_the_path():
    model = nn.Sequential(nn.Linear(3, 2), normalcy.nn.BatchNorm1d(2))
    with pytest.raises(TooFewValuesError, match=r"\(at 1\)"):
        run(model, drawn(1, 3))
    assert int(model[1].num_batches_tracked) == 0
    with pytest.raises(ShapeError, match=r"\(at 1\)"):
        run(nn.Sequential(nn.Identity(), normalcy.nn.BatchNorm1d(5)), drawn(4, 3))


def test_an_interrupt_in_the_model_or_the_data_is_no_fault_of_theirs():
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(nn.Linear(3, 2), drawn(4, 3), interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(batches(interrupted() for _ in range(2)))


def test_a_case_has_its_data_or_its_loaders():
    x, loader = drawn(4, 3), [(drawn(2, 3),)]
    assert data_of(Case(nn.Identity(), x, loader=loader)) is x
    assert data_of(Case(nn.Identity(), loader=loader)) is loader
    assert same(list(Case(nn.Identity(), loader=loader).batches()), loader)
    made = Case(nn.Identity(), (part for part in loader))
    assert same(list(made.batches()), list(made.batches()))
    assert normalcy.Case is Case


def test_a_case_of_something_else_than_a_model_is_refused():
    for model, sentence in ((nn.Linear, "the class Linear"), (None, "None"), ({}, r"\{\}")):
        with pytest.raises(TargetError, match=f"the model of a Case is {sentence}"):
            Case(model)
    for name in ("loss", "call"):
        with pytest.raises(ArgumentError, match=f"{name} is an int; needed: a function"):
            Case(nn.Identity(), **{name: 3})
    with pytest.raises(ArgumentError, match=r"optimizer is a str; needed: a torch\.optim\.Optimizer"):
        Case(nn.Identity(), optimizer="adam")


SOURCE = """
import sys

import torch
from beside import WIDTH
from torch import nn

import normalcy

seen = list(sys.argv)
calls = []
ready = nn.Linear(WIDTH, 2)


class Build:
    @staticmethod
    def small():
        return nn.Linear(WIDTH, 1)


def whole():
    return normalcy.Case(ready, data=torch.full((2, WIDTH), 5.0), loss=lambda output, batch: output.mean())


def many():
    calls.append(1)
    for n in range(3):
        yield torch.full((2, WIDTH), n + 5.0)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "target_of_a_test.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "target_of_a_test.py"
    for name in [n for n, m in sys.modules.items() if str(tmp_path) in str(getattr(m, "__file__", None))]:
        del sys.modules[name]


def test_a_target_is_a_function_a_method_a_module_or_a_case(file):
    assert load(f"{file}:Build.small").model.out_features == 1
    assert load(f"{file}:ready").model.out_features == 2
    found = load(f"{file}:whole")
    assert found.loss is not None
    assert float(next(iter(found.batches())).mean()) == 5


def test_a_target_is_also_a_module_that_can_be_imported(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load("target_of_a_test:whole").model.out_features == 2
    assert load("torch.nn:Identity").data is None


def test_data_named_apart_take_the_place_of_the_cases_own(file):
    found = load(f"{file}:whole", f"{file}:many")
    assert [float(batch.mean()) for batch in found.batches()] == [5, 6, 7]
    assert [float(batch.mean()) for batch in found.batches()] == [5, 6, 7]
    assert found.loss is not None


def test_a_file_is_run_once_for_model_and_data_with_its_own_argv_and_leaves_no_cache(file):
    argv = list(sys.argv)
    load(f"{file}:whole", f"{file}:many")
    module = sys.modules["target_of_a_test"]
    assert module.seen == [str(file)]
    assert sys.argv == argv
    assert "target_of_a_test" not in str(list(file.parent.glob("__pycache__/*")))


def test_a_file_named_as_a_library_does_not_take_its_place(file):
    (file.parent / "torch.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(3, 4)\n")
    assert load(f"{file.parent / 'torch.py'}:make").model.out_features == 4
    assert sys.modules["torch"] is torch


def test_nothing_is_unpickled(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    for name in ("model.pt", "model.pth", "model.ckpt", "model.bin"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        for target in (tmp_path / name, f"{tmp_path / name}:make"):
            with pytest.raises(TargetError, match="is a checkpoint, which is weights without a model"):
                load(str(target))
    assert not (tmp_path / "sprung").exists()


def test_the_public_names_are_these():
    assert {name for name in case.__all__ if not hasattr(case, name)} == set()


@pytest.mark.parametrize("batch", [(), []])
def test_an_empty_tuple_is_no_batch_for_any_operation(batch):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(DataError, match=r"the batch is .*; needed: a tensor"):
        normalcy.surgery.fold(model.eval(), batch)
