"""The estimate is calibrated, tells places and modes apart, and follows what changes."""

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.sampling_params import SamplingMode
from faser_trtllm.policy.acceptance import INITIAL_LOGIT, AcceptanceEstimator
from faser_trtllm.sampling.table import SamplingTable
from tests.policy.world import request
from tests.support.columns import columns


class Tests:
    """Rejection sampling with known acceptance, eight requests at a time."""

    __test__ = False

    def __init__(self, modes=(SamplingMode.GREEDY,) * 8, max_draft_len=4, seed=0, is_block=False):
        self.rng = np.random.default_rng(seed)
        self.k = max_draft_len
        self.requests = [request(f"r{i}", max_draft_len, slot=i, mode=mode) for i, mode in enumerate(modes)]
        self.sampling = SamplingTable(len(modes), 4, max_draft_len)
        for one in self.requests:
            self.sampling.bind(one.slot, one)
        self.estimator = AcceptanceEstimator(max_draft_len, is_block=is_block)

    def run(self, num_steps, probability, every=16):
        """probability(request index, place, margin) of a draft's acceptance."""
        n = len(self.requests)
        for step in range(num_steps):
            accepted, outcome = np.zeros(n, np.int32), np.full(n, native.BONUS, np.int32)
            for i, one in enumerate(self.requests):
                margins = self.rng.exponential(2.0, self.k)
                one.draft_margins[one.num_tokens : one.num_tokens + self.k] = margins
                for place, margin in enumerate(margins):
                    if self.rng.random() >= probability(i, place, margin):
                        outcome[i] = native.RECOVERED
                        break
                    accepted[i] += 1
            slots, known = [r.slot for r in self.requests], [r.num_tokens for r in self.requests]
            self.estimator.tested.add(self.sampling.array, *columns(slots, known, accepted, outcome))
            if step % every == every - 1:
                self.estimator.fit()
        return self.estimator


def logistic(slope, intercept):
    return lambda i, place, margin: 1.0 / (1.0 + np.exp(-(slope * margin + intercept)))


def test_before_anything_is_known_it_is_the_initial_rate():
    estimator = AcceptanceEstimator(3)
    p = 1.0 / (1.0 + np.exp(-INITIAL_LOGIT))
    assert estimator.is_new
    assert estimator.gains([request("r", 3)])[0] == pytest.approx(np.cumprod([p] * 3))
    assert estimator.population() == pytest.approx(np.cumprod([p] * 3))


def test_margins_are_learnt_and_predictions_are_calibrated():
    estimator = Tests().run(600, logistic(0.9, -0.4))
    assert not estimator.is_new
    assert estimator.model.slope[0, 0] == pytest.approx(0.9, abs=0.15)
    assert estimator.model.intercept[0, 0] == pytest.approx(-0.4, abs=0.25)
    count, predicted, passed = estimator.tested.bins
    assert np.abs(predicted - passed).sum() / count.sum() < 0.03  # expected calibration error


def test_a_sampling_mode_is_known_by_tests_of_its_own():
    """A prediction for a mode that has not been seen yet is worth nothing."""
    estimator = Tests().run(100, logistic(0.9, -0.4))
    greedy, seeded = request("greedy"), request("seeded", mode=SamplingMode.SEEDED)
    assert estimator.knows([greedy])
    assert not estimator.knows([greedy, seeded])
    assert estimator.knows([greedy, request("none", max_draft_len=0, mode=SamplingMode.SEEDED)]), "it has no drafts"


def test_a_blocks_drafts_get_worse_with_their_place_and_a_chains_are_taken_to_get_better():
    rates = (0.84, 0.57, 0.22, 0.5)
    gains = {}
    for is_block in (True, False):
        estimator = Tests(is_block=is_block).run(800, lambda i, place, margin: rates[place])
        gains[is_block] = estimator.gains([request("r")])[0]
    assert gains[True] == pytest.approx(np.cumprod(rates), abs=0.03)
    assert gains[False][2] > 1.5 * gains[True][2]


def test_the_spread_is_how_far_margins_move_probabilities():
    estimator = Tests().run(600, logistic(0.9, -0.4))
    drawn = logistic(0.9, -0.4)(0, 0, np.random.default_rng(1).exponential(2.0, 100_000))
    assert estimator.spread[SamplingMode.GREEDY, 0] == pytest.approx(drawn.std(), abs=0.03)
    assert not estimator.spread[SamplingMode.SEEDED].any(), "nothing was seen of these"


def test_margins_that_tell_nothing_spread_nothing():
    rates = (0.9, 0.6, 0.8, 0.3)
    estimator = Tests().run(800, lambda i, place, margin: rates[place])
    assert estimator.spread.max() < 0.08
    assert not AcceptanceEstimator(4).spread.any()


def test_places_have_rates_of_their_own():
    rates = (0.9, 0.6, 0.8, 0.3)
    estimator = Tests().run(800, lambda i, place, margin: rates[place])
    assert estimator.population() == pytest.approx(np.cumprod(rates), abs=0.1)


def test_sampling_modes_are_told_apart():
    modes = (SamplingMode.GREEDY, SamplingMode.SEEDED) * 4
    tests = Tests(modes)
    estimator = tests.run(400, lambda i, place, margin: 0.5 if i % 2 else 0.9)
    gains = estimator.gains(tests.requests)
    assert gains[0, 0] == pytest.approx(0.9, abs=0.05)
    assert gains[1, 0] == pytest.approx(0.5, abs=0.08)


def _renewal(hazards, num_drafts, num_steps, seed=0):
    """Steps of one text in which the chance of a wrong draft depends on how many were right since the last wrong one ->
    tests and passes by place [1, num_drafts, 2], and tokens per step."""
    rng, counts, tokens, age = np.random.default_rng(seed), np.zeros((1, num_drafts, 2)), 0, 0
    for _ in range(num_steps):
        for place in range(num_drafts + 1):  # the last is the target's own token
            is_right = rng.random() >= hazards[min(age, len(hazards) - 1)]
            tokens, age = tokens + 1, age + 1 if is_right else 0
            if place < num_drafts:
                counts[0, place] += 1.0, is_right
                if not is_right:
                    break
    return counts, tokens / num_steps


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_what_a_place_brings_where_failures_come_in_clusters(num_drafts):
    """A text that is hard behind a failure and easy elsewhere: from the tests of steps of one length it
    is known what others bring. A product of rates takes the last draft of many for more than it is worth."""
    hazards = (0.4, 0.15, 0.1)
    tests = Tests(max_draft_len=4)
    counts, _ = _renewal(hazards, num_drafts, 6000)
    tests.estimator.tested.cells[0, :num_drafts, :2] = counts[0]
    tests.estimator.fit()
    gains = tests.estimator.gains(tests.requests[:1])[0]
    true = [1.0] + [_renewal(hazards, k, 20_000)[1] for k in (1, 2, 3, 4)]
    for k in range(num_drafts):
        assert gains[k] == pytest.approx(true[k + 1] - true[k], abs=0.06)
    if num_drafts == 4:
        assert tests.estimator.population()[3] > true[4] - true[3] + 0.05


def test_it_follows_a_change():
    tests = Tests()
    tests.run(300, lambda i, place, margin: 0.9)
    estimator = tests.run(1500, lambda i, place, margin: 0.3)
    assert estimator.prior[0, 0] == pytest.approx(0.3, abs=0.1)


def test_gains_never_rise_along_a_request():
    tests = Tests()
    estimator = tests.run(50, logistic(0.5, 0.0))
    assert (np.diff(estimator.gains(tests.requests), axis=1) <= 0.0).all()
