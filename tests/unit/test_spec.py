"""The table of named norms."""

from __future__ import annotations

import pytest

from normalcy import spec
from normalcy.spec import Norm, Origin

ROWS = [spec.batch, spec.instance, spec.channels, spec.layer(1), spec.layer(2), spec.rms(1), spec.group(2)]


@pytest.mark.parametrize("norm", ROWS, ids=lambda norm: norm.name)
def test_statistics_are_stored_only_where_they_outlive_an_example(norm: Norm) -> None:
    assert norm.train is Origin.DATA
    assert (norm.infer is Origin.STORED) == norm.axes.outlives_example


def test_only_rms_norm_does_not_centre() -> None:
    assert [norm.name for norm in ROWS if not norm.center] == ["rms"]


def test_rms_norm_is_layer_norm_without_the_mean() -> None:
    assert spec.rms(2).axes == spec.layer(2).axes


def test_a_row_is_made_once() -> None:
    assert spec.group(4) is spec.group(4)
    assert spec.layer(1) is not spec.layer(2)
