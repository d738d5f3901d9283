"""Training and evaluation differ in where statistics come from, and in nothing else."""

from __future__ import annotations

import pytest
import torch
from laws.tables import BATCH, DTYPES, NORMS, SAME_IN_EVAL, Row

from normalcy import nn as ours
from normalcy.testing import (
    check_depends_on_neighbours,
    check_eval_independent_of_neighbours,
    check_train_equals_eval,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", SAME_IN_EVAL, ids=str)
def test_norms_without_stored_statistics_are_the_same_in_training_and_evaluation(
    row: Row, dtype: torch.dtype
) -> None:
    check_train_equals_eval(row.layer(dtype), row.input(dtype, offset=100))
    with pytest.raises(AssertionError, match="does not depend"):
        check_depends_on_neighbours(row.layer(dtype), row.input(dtype))


@pytest.mark.parametrize("row", BATCH, ids=str)
def test_batch_norm_in_training_depends_on_the_neighbours(row: Row) -> None:
    check_depends_on_neighbours(row.layer(), row.input(offset=100))
    with pytest.raises(AssertionError, match="training and evaluation differ"):
        check_train_equals_eval(row.layer(), row.input())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", NORMS, ids=str)
def test_in_evaluation_an_example_does_not_depend_on_its_neighbours(row: Row, dtype: torch.dtype) -> None:
    check_eval_independent_of_neighbours(row.layer(dtype), row.input(dtype, offset=100))


def test_without_stored_statistics_batch_norm_depends_on_neighbours_in_evaluation_too() -> None:
    layer = ours.BatchNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(AssertionError, match="alone"):
        check_eval_independent_of_neighbours(layer, BATCH[1].input())


@pytest.mark.parametrize("row", BATCH, ids=str)
def test_evaluation_changes_no_buffer(row: Row) -> None:
    layer = row.layer().eval()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer(row.input())
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
