"""The estimator finds a known logistic under censoring, is calibrated, and follows requests and changes."""

import numpy as np
import pytest

from faser_trtllm.core.sampling_params import SamplingMode
from faser_trtllm.policy.base import Mode, StepOutcome
from faser_trtllm.policy.survival import SurvivalEstimator, reliability
from tests.policy.world import request

GREEDY, SEEDED, SAMPLED = SamplingMode


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def feed(estimator, rng, requests, num_steps, truth, num_drafts=6):
    """truth(request index, place, margin) -> probability. Tests stop at the first rejection (censoring)."""
    for _ in range(num_steps):
        tested, accepted = [], []
        for i, r in enumerate(requests):
            margins = rng.exponential(2.0, num_drafts)
            r.draft_margins[r.num_tokens : r.num_tokens + num_drafts] = margins
            passed = [rng.random() < truth(i, j, m) for j, m in enumerate(margins)] + [False]
            a = passed.index(False)
            accepted.append(a)
            tested.append(min(a + 1, num_drafts))
        n = len(requests)
        estimator.observe(
            StepOutcome(requests, [num_drafts] * n, [num_drafts] * n, [0] * n, tested, accepted, 0, 0, 0, 0, 0,
                        1.0, 1.0, 2.0, Mode.SERIAL, 0.0)
        )  # fmt: skip


def test_a_known_logistic_is_recovered_from_censored_observations():
    rng = np.random.default_rng(0)
    estimator = SurvivalEstimator(6, 4)
    slope, intercept = 0.9, [0.5, 0.2, 0.0, -0.2, -0.2, -0.2]
    feed(
        estimator,
        rng,
        [request(str(i), slot=i) for i in range(4)],
        1500,
        lambda i, j, m: _sigmoid(slope * m + intercept[j]),
    )
    for j in range(4):  # deeper places are reached less often
        assert estimator.slope[GREEDY, j] == pytest.approx(slope, abs=0.25)
        assert estimator.intercept[GREEDY, j] == pytest.approx(intercept[j], abs=0.35)
    assert estimator.reliability().ece < 0.03


def test_rates_by_place_are_the_marginal_ones():
    rng = np.random.default_rng(1)
    estimator = SurvivalEstimator(6, 4)
    feed(estimator, rng, [request(str(i), slot=i) for i in range(4)], 400, lambda i, j, m: 0.9 - 0.1 * min(j, 3))
    assert estimator.prior[GREEDY, :3] == pytest.approx([0.9, 0.8, 0.7], abs=0.05)
    assert estimator.population()[1] == pytest.approx(0.72, abs=0.06)


def test_a_request_unlike_the_others_gets_an_offset_and_a_new_one_starts_from_the_population():
    rng = np.random.default_rng(2)
    estimator = SurvivalEstimator(6, 8)
    requests = [request(str(i), slot=i) for i in range(8)]
    feed(estimator, rng, requests, 300, lambda i, j, m: 0.35 if i == 0 else 0.85)
    assert estimator.offset(requests[0]) < -0.6
    assert max(estimator.offset(r) for r in requests) < 0.8
    assert estimator.offset(request("new", slot=0)) == 0.0


def test_one_request_is_not_counted_twice():
    """What the population has learnt leaves the offset, so both together stay calibrated."""
    rng = np.random.default_rng(3)
    estimator = SurvivalEstimator(6, 1)
    only = request("only", slot=0)
    feed(estimator, rng, [only], 600, lambda i, j, m: 0.4)
    assert estimator.expected(only)[0] == pytest.approx(0.4, abs=0.12)


def test_a_change_is_followed():
    rng = np.random.default_rng(4)
    estimator = SurvivalEstimator(6, 4)
    requests = [request(str(i), slot=i) for i in range(4)]
    feed(estimator, rng, requests, 300, lambda i, j, m: 0.9)
    feed(estimator, rng, requests, 600, lambda i, j, m: 0.3)
    assert estimator.prior[GREEDY, 0] == pytest.approx(0.3, abs=0.08)
    assert (estimator.slope >= 0).all()


def test_survival_never_rises_and_expectations_of_one_and_many_agree():
    rng = np.random.default_rng(5)
    estimator = SurvivalEstimator(8, 4)
    requests = [request(str(i), slot=i) for i in range(4)]
    feed(estimator, rng, requests, 100, lambda i, j, m: _sigmoid(m - 1))
    many = estimator.expected_many(requests)
    for row, r, n in zip(many, requests, [0, 3, 8, 5], strict=True):
        r.draft_margins[r.num_tokens : r.num_tokens + 8] = rng.exponential(2.0, 8)
        survival = estimator.survival(r, n)
        assert len(survival) == n
        assert (np.diff([1.0, *survival]) <= 0).all()
        assert row == pytest.approx(estimator.expected(r), rel=1e-5)


def test_each_sampling_mode_has_its_own_law_and_a_new_one_starts_from_all():
    """Margins of seeded requests say less, and fewer of their drafts are accepted."""
    rng = np.random.default_rng(7)
    estimator = SurvivalEstimator(6, 4)
    greedy, seeded = ([request(f"{mode}{i}", slot=2 * i + mode, mode=mode) for i in range(2)] for mode in (0, 1))
    truth = {GREEDY: (2.0, -0.5), SEEDED: (0.8, -1.0)}
    everyone = greedy + seeded
    feed(
        estimator,
        rng,
        everyone,
        2000,
        lambda i, j, m: _sigmoid(truth[everyone[i].sampling_mode][0] * m + truth[everyone[i].sampling_mode][1]),
    )
    for mode, (slope, intercept) in truth.items():
        assert estimator.slope[mode, 0] == pytest.approx(slope, abs=0.3)
        assert estimator.intercept[mode, 0] == pytest.approx(intercept, abs=0.3)
    assert estimator.prior[GREEDY, 0] > estimator.prior[SEEDED, 0] + 0.1
    assert max(abs(estimator.offset(r)) for r in everyone) < 0.4, "what a mode has in common is no request's offset"
    assert estimator.reliability().ece < 0.03
    # The third mode was never seen.
    assert estimator.prior[SEEDED, 0] < estimator.prior[SAMPLED, 0] < estimator.prior[GREEDY, 0]
    assert estimator.slope[SEEDED, 0] < estimator.slope[SAMPLED, 0] < estimator.slope[GREEDY, 0]
    assert estimator.population()[0] == pytest.approx(float(estimator.prior[SAMPLED, 0]), abs=0.05)


def test_a_lying_confidence_shows_in_the_diagram():
    rng = np.random.default_rng(6)
    p = rng.random(4000)
    honest = reliability(p, rng.random(4000) < p)
    liar = reliability(p, rng.random(4000) < p / 2)
    assert honest.ece < 0.04
    assert liar.ece > 0.2
    assert honest.count.sum() == 4000
    assert reliability([], []).ece == 0.0
