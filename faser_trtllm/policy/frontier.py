"""How many drafts get a row: slots of all requests, ranked by their live survival, bought at one price."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.request import Request
from faser_trtllm.ops.arrays import Float32Array
from faser_trtllm.ops.frontier import FrontierRanker, FrontierRule
from faser_trtllm.policy.goodput import FloatArray
from faser_trtllm.policy.survival import SurvivalEstimator

SLACK = 2  # drafts beyond the planned length that a confident request of a batch may take


class Frontier:
    """plan() says how far plans look, begin() who decodes and at which price, lengths() what each step runs."""

    def __init__(self, estimator: SurvivalEstimator, max_batch_size: int, max_draft_len: int) -> None:
        self._estimator = estimator
        self._max_draft_len = max_draft_len
        self._ranker = FrontierRanker(max_batch_size, max_draft_len)
        self._horizon = 1  # longest planned length
        self._decoding: list[Request] = []  # whom the next three are of
        self._draft_margins: list[Float32Array] = []
        self._modes: list[int] = []
        self._ratio = np.ones((1, 1))  # expected survival by place over that of the first

    def plan(self, horizon: int) -> None:
        """horizon: the longest planned length."""
        self._horizon = max(1, horizon)
        self._decoding = []

    def begin(
        self, decoding: Sequence[Request], verify_ms: Sequence[float] | FloatArray, price: float, weights: FloatArray
    ) -> None:
        """For the steps to come. verify_ms: of a pass, by slots. price: tokens per ms. weights: of requests' tokens."""
        if self._decoding != decoding:
            self._decoding = list(decoding)
            self._draft_margins = [request.draft_margins for request in decoding]
            self._modes = [request.sampling_mode for request in decoding]
            survival = self._estimator.expected_many(self._decoding)[:, : self._reach]
            self._ratio = survival / survival[:, :1]
        self._ranker.bind(
            FrontierRule(
                self._estimator.slope,
                self._estimator.intercept,
                self._draft_margins,
                self._modes,
                self._estimator.offsets(self._decoding),
                weights,
                self._ratio,
                verify_ms,
                price,
            )
        )

    def lengths(self, decoding: Sequence[Request], num_pending: Sequence[int]) -> list[int]:
        """Rows per request of those that it began with, 0 to num_pending[i]."""
        return self._ranker.run([request.num_tokens for request in decoding], num_pending)

    @property
    def _reach(self) -> int:
        """Places that the number of slots counts on; a request alone is asked about each place that it drafts."""
        slack = 0 if len(self._decoding) == 1 else SLACK
        return min(self._horizon + slack, self._max_draft_len)
