"""Online, calibrated estimate of the probability that a draft is accepted.

A draft at position j of a request with sampling mode s has p = sigmoid(slope[s, j] * margin + intercept[s, j]). The
margin is how much of its logit the draft could lose and still be chosen (Request.draft_margins).
Damped Newton steps fit this to sums over verified drafts (ops/tested.py), which are forgotten exponentially, as in
vLLM's adaptive verification (acceptance_estimator.py). A position with few observations follows its mode. Drafts after
the first rejection are unknown and not counted (right censoring).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.arrays import Float32Array, Float64Array
from faser_trtllm.ops.tested import TestedSums

INITIAL_LOGIT = 1.5  # log-odds before anything is known: 0.82 (vLLM's value)
MEMORY_TESTS = 6000.0  # verified drafts of a sampling mode after which old ones weigh 1 / e
PRIOR_TESTS = 20.0  # weight of the mode in the estimate for a position, in drafts; drafts of one request are alike
MIN_TESTS = 100  # verified drafts before the estimate is used
MIN_RATE = 1e-3  # keeps log-odds finite
MAX_STEP = 1.0  # limit on the change of slope and intercept per fit
MIN_FAILED = 0.05  # minimum share of drafts that fail
SERIES_TERMS = 256  # of sums over consecutive drafts: 0.95 ** 256 is negligible


class AcceptanceEstimator:
    """The acceptance estimate of one policy.

    Attributes:
        tested: sums over the drafts that rejection sampling has verified. model: the predictions it compares them with.
        prior: float32 [NUM_MODES, max_draft_len], tokens expected of a draft if all before it are accepted, without
            its margin.
        spread: float32 of the same shape, how far margins move these probabilities, in either direction.
    """

    def __init__(self, max_draft_len: int, *, is_block: bool = False) -> None:
        """is_block: drafts come from a block drafter and get worse with their distance from the last token."""
        self._k = max(1, max_draft_len)
        self._is_block = is_block
        self.model = AcceptanceModel(self._k)
        self.tested = TestedSums(self.model)
        self._mode_theta = np.full((NUM_MODES, 2), (0.0, INITIAL_LOGIT))  # slope, intercept
        self._theta = np.full((NUM_MODES, self._k, 2), (0.0, INITIAL_LOGIT))
        self._info = np.zeros((NUM_MODES, self._k, 2, 2))  # discounted information matrices
        self._counts = np.zeros((NUM_MODES, self._k, 2))  # discounted numbers of verified and of accepted drafts
        self._num_tests = np.zeros(NUM_MODES)
        self._publish()

    prior: Float32Array
    spread: Float32Array

    @property
    def is_new(self) -> bool:
        """True until MIN_TESTS drafts have been verified."""
        return float(self._num_tests.sum()) < MIN_TESTS

    def knows(self, decoding: Sequence[Request]) -> bool:
        """Return True if enough drafts were verified in the sampling modes of all requests that may draft."""
        modes = {request.sampling_mode for request in decoding if request.draft_limit}
        return all(self._num_tests[mode] >= MIN_TESTS for mode in modes)

    def fit(self) -> None:
        """Update the estimate with the drafts that were verified since the last fit."""
        cells = self.tested.cells
        tests = cells[:, :, 0]
        total = float(tests.sum())
        if total == 0.0:
            return
        self._num_tests += tests.sum(1)
        kept = np.exp(-tests.sum(1) / MEMORY_TESTS)[:, None, None]
        self._counts = kept * self._counts + cells[:, :, :2]
        gradient = cells[:, :, 2:4]
        seen = cells[:, :, [[4, 5], [5, 6]]]
        self._info = kept[..., None] * self._info + seen
        # First the step that all positions of a mode share, then each position's own.
        ridge = np.eye(2)
        shared = _solve(self._info.sum(1) + ridge, gradient.sum(1))
        self._mode_theta += shared
        gradient = gradient - (seen @ shared[:, None, :, None])[..., 0]
        precision = 0.2 * PRIOR_TESTS * ridge
        apart = self._theta + shared[:, None] - self._mode_theta[:, None]
        pull = (1.0 - kept) * (apart @ precision)
        self._theta = self._mode_theta[:, None] + apart + _solve(self._info + precision, gradient - pull)
        for theta in (self._mode_theta, self._theta):
            np.maximum(theta[..., 0], 0.0, out=theta[..., 0])
        cells[:] = 0.0
        self._publish()

    def gains(self, decoding: Sequence[Request]) -> Float64Array:
        """Return the tokens that each draft is expected to yield, before drafting, [num_requests, max_draft_len]."""
        return self._gains[[request.sampling_mode for request in decoding]]

    def population(self) -> Float64Array:
        """Return the chance over all requests that all drafts up to a position are accepted, [max_draft_len]."""
        return np.cumprod(_rates(self._counts.sum(0, keepdims=True))[0])

    def _publish(self) -> None:
        self.model.slope[:] = self._theta[:, :, 0]
        self.model.intercept[:] = self._theta[:, :, 1]
        rates = _rates(self._counts)
        survival = np.cumprod(rates, axis=1, dtype=np.float64)
        self._gains = survival if self._is_block else _gains(rates, self._counts)
        prior = rates * np.minimum(1.0, self._gains / survival)
        spread = np.sqrt(_explained(rates, self._counts, self._info)[:, None] * prior * (1.0 - prior))
        self.prior = prior.astype(np.float32)
        self.spread = np.minimum(spread, np.minimum(prior, 1.0 - prior)).astype(np.float32)


def _solve(info: Float64Array, gradient: Float64Array) -> Float64Array:
    step = np.linalg.solve(info, gradient[..., None])[..., 0]
    return np.clip(step, -MAX_STEP, MAX_STEP)


def _rates(counts: Float64Array) -> Float64Array:
    """Return rates by mode and position, drawn towards the mode's and the initial rate; counts [modes, places, 2]."""
    whole = counts.sum(1, keepdims=True)
    prior_tests = 0.5 * PRIOR_TESTS
    of_mode = (whole[..., 1] + prior_tests * _sigmoid(INITIAL_LOGIT)) / (whole[..., 0] + prior_tests)
    rates = (counts[..., 1] + PRIOR_TESTS * of_mode) / (counts[..., 0] + PRIOR_TESTS)
    return np.asarray(np.clip(rates, MIN_RATE, 1.0 - MIN_RATE))


def _explained(rates: Float64Array, counts: Float64Array, info: Float64Array) -> Float64Array:
    """Return the share of the outcomes' variance that margins explain, [modes].

    Given their probability p, outcomes have the variance p (1 - p), whose mean is in info [modes, places, 2, 2]. Around
    a position's rate they have the variance rate (1 - rate). The difference is the variance of p itself.
    """
    prior_info = PRIOR_TESTS * _sigmoid(INITIAL_LOGIT) * (1.0 - _sigmoid(INITIAL_LOGIT))
    whole = prior_info + (counts[..., 0] * rates * (1.0 - rates)).sum(1)
    return np.asarray(np.maximum(0.0, 1.0 - (prior_info + info[..., 1, 1].sum(1)) / whole))


def _gains(rates: Float64Array, counts: Float64Array) -> Float64Array:
    """Return the tokens per step that one more position yields, from rates [modes, places] and counts [..., 2].

    Drafts fail where the text is hard, and the target's own token passes such a spot at no cost. A position that is
    left out is therefore not lost as a whole, and the next step's drafts start better than right after a failure. Let
    s(m) be the chance of m right drafts in a row after a failure. From one failure to the next there are sum s(m)
    tokens and, with k drafts per step, sum s(i (k + 1)) steps. The rates mix steps that begin after a failure with
    others, whose drafts are assumed to be as good as the average draft at later positions.
    """
    tests, passed = counts[..., 0], counts[..., 1]
    later = (passed[:, 1:].sum(1) + PRIOR_TESTS * rates[:, 0]) / (tests[:, 1:].sum(1) + PRIOR_TESTS)
    later = np.minimum(later, 1.0 - MIN_FAILED)[:, None]
    all_passed = 1.0 - (tests - passed).sum(1, keepdims=True) / np.maximum(tests[:, :1], 1.0)
    going_on = np.maximum(all_passed, 0.0) * later
    num_modes, num_places = rates.shape
    survival = _chances(rates)
    after_failure = (survival - going_on * later ** np.arange(num_places + 1)) / (1.0 - going_on)
    after_failure = np.clip(after_failure, MIN_RATE, survival)
    # After a failure, drafts get better and not worse; where none was verified, they are like those at later positions.
    ratios = np.maximum.accumulate(np.minimum(after_failure[:, 1:] / after_failure[:, :-1], later), axis=1)
    ratios = np.where(tests < PRIOR_TESTS, later, ratios)
    ratios[:, 0] = after_failure[:, 1]
    ratios = np.concatenate([ratios, np.broadcast_to(later, (num_modes, SERIES_TERMS - num_places))], axis=1)
    steps = _chances(ratios) @ _step_starts(num_places)
    tokens = steps[:, :1] / steps
    return np.asarray(np.minimum.accumulate(tokens[:, 1:] - tokens[:, :-1], axis=1))


def _chances(ratios: Float64Array) -> Float64Array:
    """Return the chances of passing the first 0, 1, ... and all positions, [modes, positions + 1]."""
    found = np.ones((len(ratios), ratios.shape[1] + 1))
    np.cumprod(ratios, axis=1, out=found[:, 1:])
    return found


@functools.cache
def _step_starts(num_places: int) -> Float64Array:
    """Mark which drafts after a failure begin a step of 0 to num_places drafts, [SERIES_TERMS + 1, num_places + 1]."""
    numbers = np.arange(SERIES_TERMS + 1)[:, None]
    return np.asarray(numbers % np.arange(1, num_places + 2) == 0, np.float64)


def _sigmoid(x: npt.ArrayLike) -> Float64Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(x))))
