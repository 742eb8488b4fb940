"""Dropping rows between two segments: the engine's memory against the reference."""

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from lab.reference.compact_rows import compact_rows_reference
from tests.engine.conftest import open_harness  # noqa: F401
from tests.support.tiny_model import TinyConfig, TinyModel


def test_native_is_the_reference(open_harness):  # noqa: F811
    """Several prunings in a row, down to no rows at all."""
    harness = open_harness(TinyModel(TinyConfig(num_layers=2, hidden_size=74)), segments=[0, 1, 2])
    rng = np.random.default_rng(4)
    for num_rows in (1, 2, 17, 40):
        harness.engine.run_segment(harness.batch([(0, np.arange(num_rows), 0, num_rows)]), 0)
        hidden = harness.engine.hidden_rows(num_rows)
        for share in (1.0, 0.7, 0.7, 0.3, 0.0):
            rows = np.flatnonzero(rng.random(len(hidden)) < share).astype(np.int32)
            harness.engine.compact_rows(rows)
            hidden = compact_rows_reference(hidden, rows)
            np.testing.assert_array_equal(harness.engine.hidden_rows(rows.size), hidden)


@pytest.mark.parametrize("rows", [[1, 1], [2, 0], [5], [-1, 2]])
def test_both_refuse_the_same_rows(open_harness, rows):  # noqa: F811
    harness = open_harness(TinyModel(TinyConfig(num_layers=2)), segments=[0, 1, 2])
    harness.engine.run_segment(harness.batch([(0, range(5), 0, 5)]), 0)
    hidden = harness.engine.hidden_rows(5)
    array = np.array(rows, np.int32)
    with pytest.raises(InvalidArgumentError):
        harness.engine.compact_rows(array)
    with pytest.raises(InvalidArgumentError):
        compact_rows_reference(hidden, array)
    np.testing.assert_array_equal(harness.engine.hidden_rows(5), hidden)


def test_hidden_rows_are_those_of_the_last_segment(open_harness):  # noqa: F811
    harness = open_harness(TinyModel(TinyConfig(num_layers=2)), segments=[0, 1, 2])
    with pytest.raises(InvalidArgumentError):
        harness.engine.hidden_rows(5)
    harness.engine.run_segment(harness.batch([(0, range(5), 0, 5)]), 0)
    with pytest.raises(InvalidArgumentError):
        harness.engine.hidden_rows(4)
