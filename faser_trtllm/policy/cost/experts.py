"""Online estimate of how rows choose among experts, from the distinct experts of passes.

The closed form (core/cost/experts.py) has two overlaps. Steps without drafts depend on the overlap of rows of two
requests, steps with drafts on both. Each plan moves them along the gradient of its count, by recursive least squares
with forgetting.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_trtllm.core.cost.experts import MOST_OVERLAP, Routing
from faser_trtllm.ops.arrays import Float64Array

MEMORY_STEPS = 4000.0  # after which the text may have changed
PRIOR_ERROR = np.array([0.2, 0.1])  # of the table's overlaps, which were measured on random tokens
COUNT_ERROR = 0.2  # relative, of a step's count: requests have topics
MOST_STEP = 0.1  # limit on the change of an overlap per plan
DELTA = 0.01  # step for the numerical gradient over an overlap
TOLD = 0.005  # change of an overlap from which on `routing` is replaced


class RoutingEstimator:
    """The estimate of one policy; `routing` is replaced only when it changes noticeably, since arrays depend on it."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._prior = np.diag(PRIOR_ERROR**-2.0)
        self._info = self._prior.copy()
        self._overlaps = self._clipped(np.array([routing.overlap, routing.across]))

    def observe(self, num_steps: int, num_rows: float, num_requests: float, num_experts: float) -> None:
        """Learn from num_steps passes with these mean numbers of rows, requests and distinct experts."""
        expected = self._log_count(self._overlaps, num_rows, num_requests)
        moved = self._overlaps + DELTA * np.eye(2)
        gradient = np.array([self._log_count(each, num_rows, num_requests) - expected for each in moved]) / DELTA
        weight = num_steps / COUNT_ERROR**2
        keep = np.exp(-num_steps / MEMORY_STEPS)
        self._info = keep * self._info + (1.0 - keep) * self._prior + weight * np.outer(gradient, gradient)
        step = np.linalg.solve(self._info, weight * (np.log(num_experts) - expected) * gradient)
        self._overlaps = self._clipped(self._overlaps + np.clip(step, -MOST_STEP, MOST_STEP))
        overlap, across = self._overlaps.tolist()
        if max(abs(overlap - self.routing.overlap), abs(across - self.routing.across)) > TOLD:
            self.routing = replace(self.routing, overlap=overlap, across=across)

    def _log_count(self, overlaps: Float64Array, num_rows: float, num_requests: float) -> float:
        overlap, across = overlaps.tolist()
        routing = replace(self.routing, overlap=max(overlap, across), across=across)
        return float(np.log(routing.distinct_of(num_rows, num_requests)))

    def _clipped(self, overlaps: Float64Array) -> Float64Array:
        """Clip the overlaps; rows of one request have at least as much in common as those of two."""
        chance = min(self.routing.chance, MOST_OVERLAP)
        overlap, across = np.clip(overlaps, chance, MOST_OVERLAP).tolist()
        return np.array([max(overlap, across), across])
