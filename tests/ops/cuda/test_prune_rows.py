"""The prune_rows kernel, run on the CPU as it is, against the numpy reference; and on a GPU where there is one."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.ops.cuda.emulation import emulated
from tests.ops.cuda.prune_cases import assert_is_the_reference, boundary_batch
from tests.support.effort import examples


@settings(max_examples=examples(100), derandomize=True)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), max_size=3),
    st.integers(0, 20),
)
def test_the_kernel_is_the_reference(seed, num_drafts, num_others, num_dummies):
    scores, batch = boundary_batch(seed, num_drafts, num_others)
    assert_is_the_reference(emulated("prune_rows"), scores, batch, num_dummies)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_more_rows_than_threads(order):
    """Whatever the order of the threads; some rows stay and some go."""
    scores, batch = boundary_batch(order, [7] * 150 + [0] * 20, [300])
    kept = assert_is_the_reference(emulated("prune_rows", order=order), scores, batch, 61)
    assert 0 < (kept == batch.num_rows).sum() < kept.size


def test_a_rule_that_doubts_nothing_keeps_all_and_one_that_doubts_all_keeps_one_row():
    scores, batch = boundary_batch(3, [4, 1, 6], [2])
    for least, expected in ((0.0, batch.num_rows), (1.1, np.ones(3))):
        batch.rule.least = least
        assert assert_is_the_reference(emulated("prune_rows"), scores, batch, 0).tolist() == list(expected)


@pytest.mark.gpu
def test_on_a_gpu(on_gpu):
    module = on_gpu("prune_rows")
    for seed in range(20):
        scores, batch = boundary_batch(seed, [5] * 40, [100])
        assert_is_the_reference(module, scores, batch, 24, "cuda")
