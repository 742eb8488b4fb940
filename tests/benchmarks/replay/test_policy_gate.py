"""Bounds on `price`, simulated on measurements of an H100: drafts pass at random, tables come from quick profiles."""

import numpy as np
import pytest

from benchmarks.replay.recording import NUM_OUTPUT, Recording
from benchmarks.replay.simulate import Machine, simulate
from benchmarks.replay.wrong_curve import POLICY, rate, wrong
from lab.costmodel.measured import MeasuredGpu
from lab.simulation.synthetic_profile import synthetic_profile
from tests.support.effort import pick

K = 8
PASSES = 0.75  # chance of a draft
OUTPUTS = (96, 192)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Margins tell what passes, not without error."""
    rng = np.random.default_rng(0)
    passes = rng.random((12, NUM_OUTPUT, K)) < PASSES
    margins = rng.exponential(np.where(passes, 3.0, 1.0)).astype(np.float32)
    return Recording(np.arange(12) >= 6, np.cumprod(passes, axis=2).sum(2).astype(np.int32), margins)


@pytest.fixture(scope="module")
def gpu() -> MeasuredGpu:
    return MeasuredGpu()


@pytest.mark.parametrize(
    ("load", "least"), pick([(16, 1.6), (256, 0.99)], [(1, 1.8), (16, 1.6), (64, 1.25), (256, 0.99)])
)
def test_a_quick_profile_is_enough_to_be_near_the_best(recording, gpu, load, least):
    """The H100's own quick profile drafted nothing at 16 requests, where four drafts brought half as much again."""
    machine = Machine.of_gpu(gpu, synthetic_profile(gpu, noise=0.03, seed=load))

    def tokens_per_s(spelling):
        return simulate(recording, machine, spelling, load, 0, outputs=OUTPUTS)

    off, price = tokens_per_s("off"), tokens_per_s(POLICY)
    fixed = [tokens_per_s(f"fixed:{k}") for k in pick((2, 4), (1, 2, 3, 4, 5, 6))]
    assert price > 0.98 * max(off, *fixed)
    assert price > least * off


@pytest.mark.parametrize(
    ("key", "factor"),
    pick(
        [("draft_rows@all", 5.0), ("draft_step@all", 5.0)],
        [(f"{kind}@all", f) for kind in ("verify", "draft_rows", "draft_step", "decode") for f in (5.0, 0.2)],
    ),
)
def test_a_curve_that_is_wrong_by_a_factor_of_five_costs_little_after_half_a_minute(recording, gpu, key, factor):
    table = synthetic_profile(gpu, noise=0.01)
    right, found = (rate(recording, gpu, t, 16, OUTPUTS, (30.0, 40.0)) for t in (table, wrong(table, key, factor)))
    assert found > 0.95 * right
