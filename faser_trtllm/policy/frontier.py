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
        self._decoding: list[Request] = []  # whom the next ones are of
        self._draft_margins: list[Float32Array] = []
        self._modes: list[int] = []
        self._even = np.ones(1)  # weights
        self._offset = np.zeros(1)
        self._num_updates = -1  # of the estimator, when that was asked for

    def plan(self, horizon: int) -> None:
        """horizon: the longest planned length."""
        self._horizon = max(1, horizon)

    def begin(
        self,
        decoding: Sequence[Request],
        verify_ms: Sequence[float] | FloatArray,
        price: float,
        weights: FloatArray | None = None,
    ) -> None:
        """For the steps to come. verify_ms: of a pass, by slots. price: tokens per ms. weights: of requests' tokens."""
        estimator = self._estimator
        is_other = self._decoding != decoding
        if is_other:
            self._decoding = list(decoding)
            self._even = np.ones(len(decoding))
            self._draft_margins = [request.draft_margins for request in decoding]
            self._modes = [request.sampling_mode for request in decoding]
        if is_other or self._num_updates != estimator.num_updates:
            self._num_updates = estimator.num_updates
            self._offset = estimator.offsets(self._decoding)
        self._ranker.bind(
            FrontierRule(
                estimator.slope,
                estimator.intercept,
                estimator.prior_logit,
                self._draft_margins,
                self._modes,
                self._offset,
                self._even if weights is None else weights,
                verify_ms,
                price,
                self._reach,
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
