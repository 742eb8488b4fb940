"""Drafts that only serve to learn, while nothing is drafted, whether drafting would pay again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from faser_trtllm.core.request import Request
from faser_trtllm.policy.measured_costs import MeasuredCosts
from faser_trtllm.policy.survival import SurvivalEstimator

WARM_UP_LEN = 2  # in every step while nothing is known
SHARE = 0.004  # of the time
LENGTH = 3
MAX_LAG = 64  # tokens that the draft has missed, of all requests in a probe but the first
MAX_SAVED_STEPS = 4.0
REQUESTS = 4
RUN = 16  # probes in a row for the same requests, so that their catching up is paid once
MAX_LOSS = 10.0  # of what was expected: more is somebody else's work in between
MIN_COST = 0.3  # of its time, however much it promises


class Probes:
    """Saves a share of the time, and spends it on a few drafts for a few requests in turn.

    A probe costs what it takes beyond the worth of its tokens, so where drafting nearly pays, probes are frequent.
    """

    def __init__(self, max_draft_len: int, costs: MeasuredCosts, estimator: SurvivalEstimator) -> None:
        self._costs = costs
        self._estimator = estimator
        self._length = min(LENGTH, max_draft_len)
        self._warm_up_len = min(WARM_UP_LEN, max_draft_len)
        self._saved_ms = 0.0
        self._spent_ms = 0.0  # for the last probe, which was not charged yet
        self._next_at_ms = 0.0
        self._num_probes = 0

    def save(self, num_steps: int, ms: float) -> None:
        """So many steps without drafts took ms each."""
        self._saved_ms = min(self._saved_ms + SHARE * num_steps * ms, MAX_SAVED_STEPS * ms)

    def charge(self, lost_ms: float) -> None:
        """What the last probe turned out to cost beyond the worth of its tokens, instead of what was expected; the cold
        caches that it left behind are in it."""
        self._saved_ms += self._spent_ms - min(max(lost_ms, 0.0), MAX_LOSS * self._spent_ms)
        self._spent_ms = 0.0

    def lengths(self, decoding: Sequence[Request], context_len: float, price: float) -> list[int] | None:
        """Drafts per request, if it is time for a probe; price: tokens per ms of the step without."""
        n = len(decoding)
        if self._estimator.is_new:
            return [self._warm_up_len if i < REQUESTS else 0 for i in range(n)]
        if self._saved_ms < self._next_at_ms:
            return None
        turn = self._num_probes // RUN * REQUESTS % n
        chosen = [i % n for i in range(turn, turn + min(n, REQUESTS))]
        lags = [decoding[i].num_tokens - decoding[i].num_draft_computed_tokens for i in chosen]
        within = [total <= MAX_LAG for total in itertools.accumulate(lags)]
        chosen = [i for i, ok in zip(chosen, [True, *within[1:]], strict=True) if ok and decoding[i].draft_limit]
        needed_ms = self._cost_ms([decoding[i] for i in chosen], n, sum(lags[: len(chosen)]), context_len, price)
        if not chosen or self._saved_ms < needed_ms:
            self._next_at_ms = needed_ms
            return None
        self._saved_ms -= needed_ms
        self._spent_ms = needed_ms
        self._next_at_ms = 0.0
        self._num_probes += 1
        return [self._length if i in chosen else 0 for i in range(n)]

    def _cost_ms(self, chosen: list[Request], n: int, lag: int, context_len: float, price: float) -> float:
        costs = self._costs.costs(n, n, context_len)
        ms = self._costs.late_row_ms * lag + self._length * costs.draft_step[len(chosen)]
        ms += costs.verify[self._length * len(chosen)] - costs.verify[0]
        estimator = self._estimator
        gained = sum(sum(estimator.expected(request, self._length)) for request in chosen)
        return max(MIN_COST * ms, ms - gained / price)
