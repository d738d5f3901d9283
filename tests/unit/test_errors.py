"""An error's text: what was given, what is needed, what to do, on one line."""

from __future__ import annotations

import pickle

import pytest

from normalcy import errors
from normalcy.errors import NormalcyError

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, NormalcyError)]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("x is 3",), "x is 3."),
        (("x is 3.", "4."), "x is 3; needed: 4."),
        (("x is 3", "4", "give 4."), "x is 3; needed: 4. Give 4."),
        (("x is\n 3", "4", "is it 4?"), "x is 3; needed: 4. Is it 4?"),
        (("no such thing. Is it that?", "", "see help"), "no such thing. Is it that? See help."),
    ],
)
def test_the_parts_make_whole_sentences(parts: tuple[str, ...], text: str) -> None:
    assert str(NormalcyError(*parts)) == text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_keeps_its_parts_when_it_crosses_a_process(kind: type[NormalcyError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a", "b", "c")))  # noqa: S301 - our own bytes
    assert type(error) is kind
    assert (error.given, error.needed, error.do, str(error)) == ("a", "b", "c", "a; needed: b. C.")


def test_shapes_are_caught_as_pytorchs_own_errors_are() -> None:
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.ShapeError, RuntimeError)
    assert issubclass(errors.TooFewValuesError, errors.ShapeError)
