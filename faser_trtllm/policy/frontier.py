"""How many drafts get a row: slots of all requests, ranked by their live survival, bought at one price."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.request import Request
from faser_trtllm.policy.goodput import (
    FloatArray,
    StepCosts,
    num_paying,
    num_paying_few,
    stop_along,
    top_prefixes,
    top_prefixes_few,
)
from faser_trtllm.policy.measured_costs import FEW_REQUESTS
from faser_trtllm.policy.survival import SurvivalEstimator

SLACK = 2  # drafts beyond the planned length that a confident request of a batch may take


class Frontier:
    """plan() for the steps of a plan, lengths() in each of them."""

    def __init__(self, estimator: SurvivalEstimator, max_draft_len: int) -> None:
        self._estimator = estimator
        self._max_draft_len = max_draft_len
        self._horizon = 0  # longest planned length
        self._requests: tuple[Request, ...] = ()
        self._ratio = np.ones((1, max_draft_len))  # expected survival by place over that of the first, by request
        self._ratio_lists: list[list[float]] = []  # up to where the price looks, for a few requests
        self._mean_ratio: list[float] = []
        self._alone: Request | None = None  # whose expected acceptance by place _alone_ratio has
        self._alone_ratio: list[float] = []

    def plan(self, decoding: Sequence[Request], horizon: int) -> None:
        """horizon: the longest planned length."""
        self._horizon = horizon
        self._alone = None
        if len(decoding) == 1:
            return
        survival = self._estimator.expected_many(list(decoding))
        self._ratio = survival / np.maximum(survival[:, :1], 1e-9)
        self._requests = tuple(decoding)
        if len(decoding) <= FEW_REQUESTS:
            reached = self._ratio[:, : self._reach]
            self._ratio_lists, self._mean_ratio = reached.tolist(), reached.mean(0).tolist()

    def lengths(
        self,
        decoding: Sequence[Request],
        num_pending: Sequence[int],
        costs: StepCosts,
        price: float,
        weights: FloatArray | None,
    ) -> list[int]:
        """Rows per request, 0 to num_pending[i]. price: tokens per ms. weights: of each request's tokens."""
        if len(decoding) == 1:
            return [self._length_alone(decoding[0], num_pending[0], costs, price)]
        requests = list(decoding)
        if weights is None and len(requests) <= FEW_REQUESTS:
            return self._few_lengths(requests, num_pending, costs, price)
        live = self._estimator.survivals(requests, list(num_pending))
        ratios = self._ratio
        if self._requests != tuple(requests):  # half of the batch, or someone has come or left
            ratios = ratios.mean(0, keepdims=True)
        ahead = live[:, :1] * ratios[:, : self._reach]
        if weights is not None:
            live *= weights[:, None]
            ahead *= weights[:, None]
        ranked = -np.sort(-ahead.ravel())
        return top_prefixes(live, num_paying(ranked, np.asarray(costs.verify), price))

    @property
    def _reach(self) -> int:
        return min(self._horizon + SLACK, self._max_draft_len)

    def _length_alone(self, request: Request, num_pending: int, costs: StepCosts, price: float) -> int:
        """Place by place: whether a row runs must not depend on later drafts, of which there are no others here."""
        if request is not self._alone:
            expected = self._estimator.expected(request)
            self._alone = request
            self._alone_ratio = [1.0] + [b / a for a, b in itertools.pairwise(expected[: self._horizon])]
        survival = self._estimator.survival(request, num_pending)
        return stop_along(survival, self._alone_ratio, costs.verify, price)

    def _few_lengths(
        self, requests: list[Request], num_pending: Sequence[int], costs: StepCosts, price: float
    ) -> list[int]:
        """The same for a few requests, for which numpy would take longer than plain loops."""
        survival = self._estimator.survival
        if self._requests == tuple(requests):
            ratios = self._ratio_lists
        else:
            ratios = [self._mean_ratio] * len(requests)
        pending = list(zip(requests, num_pending, strict=True))
        first = [survival(request, 1) if n else [] for request, n in pending]
        ahead = [s * x for one, ratio in zip(first, ratios, strict=True) for s in one for x in ratio]
        ahead.sort(reverse=True)
        num_slots = num_paying_few(ahead, costs.verify, price)
        if num_slots >= sum(num_pending):
            return list(num_pending)
        return top_prefixes_few([survival(request, n) if n else [] for request, n in pending], num_slots)
