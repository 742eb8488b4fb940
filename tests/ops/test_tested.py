"""Sums over tested drafts: the native op is the reference to the bit, and counts what was tested only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.tested import NUM_BINS, TestedSums
from lab.reference.tested import add_reference
from tests.ops.acceptance_models import model_and_slots
from tests.support.columns import columns

OUTCOMES = [native.STILL_PENDING, native.RECOVERED, native.BONUS, native.FAILED]


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 5), k=st.integers(1, 6), seed=st.integers(0, 1 << 32), num_steps=st.integers(1, 3))
def test_native_is_the_reference(n, k, seed, num_steps):
    rng = np.random.default_rng(seed)
    model, slots, _ = model_and_slots(rng, n, k)
    sums, expected = TestedSums(model), TestedSums(model)
    num_tested = 0
    for _ in range(num_steps):
        outcome = rng.choice(OUTCOMES, n).astype(np.int32)
        accepted = np.array([rng.integers(0, k + (how != native.RECOVERED)) for how in outcome], np.int32)
        step = *columns(rng.permutation(n), rng.integers(0, 16 - k, n)), accepted, outcome
        sums.add(slots.array, *step)
        add_reference(expected, model, slots.array, *step)
        for slot, first, passed, how in zip(*step, strict=True):
            last = first + passed + (how == native.RECOVERED)
            num_tested += int((slots.draft_sources[slot, first:last] == native.BY_MODEL).sum())
    for name in ("cells", "bins"):
        assert np.array_equal(getattr(sums, name), getattr(expected, name)), name
    assert sums.cells[:, :, 0].sum() == sums.bins[0].sum() == num_tested
    assert sums.cells.shape == (NUM_MODES, k, 7)
    assert sums.bins.shape == (3, NUM_BINS)


def test_gradient_and_information_are_the_log_likelihoods_derivatives():
    model, slots, margins = model_and_slots(np.random.default_rng(1), 1, 1)
    slots.array["mode"] = 0
    slots.draft_sources[:] = native.BY_MODEL
    margins[:] = np.abs(margins)
    sums, eps = TestedSums(model), 1e-3
    sums.add(slots.array, *columns([0], [3], [1], [native.BONUS]))
    margin = min(float(margins[0, 3]), 20.0)

    def log_likelihood(slope, intercept):
        return -np.log1p(np.exp(-(slope * margin + intercept)))

    at = float(model.slope[0, 0]), float(model.intercept[0, 0])
    by_slope = (log_likelihood(at[0] + eps, at[1]) - log_likelihood(at[0] - eps, at[1])) / (2 * eps)
    by_both = [log_likelihood(at[0] + a, at[1] + b) for a, b in ((eps, eps), (eps, -eps), (-eps, eps), (-eps, -eps))]
    cell = sums.cells[0, 0]
    assert cell[2] == pytest.approx(by_slope, rel=1e-3, abs=1e-9)
    assert cell[5] == pytest.approx(-(by_both[0] - by_both[1] - by_both[2] + by_both[3]) / (4 * eps**2), abs=1e-4)


def test_more_tests_than_places_are_refused():
    model, slots, _ = model_and_slots(np.random.default_rng(1), 1, 2)
    with pytest.raises(InvalidArgumentError, match="an argument is out of range"):
        TestedSums(model).add(slots.array, *columns([0], [3], [3], [native.BONUS]))
