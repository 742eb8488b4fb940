"""How much a token of each request counts, by the time that its deadline leaves it."""

from __future__ import annotations

import numpy as np

from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.goodput import FloatArray

MAX_URGENCY = 4.0


def urgency(view: StepView, price: float, slowness: float) -> FloatArray | None:
    """Weights [num_requests]: more where the deadline comes before the likely end; None if all are 1.

    price: tokens per ms of the step; slowness: of the machine just now. Relative to the mean, so that urgency moves
    slots between requests and does not make drafts look cheap.
    """
    if all(request.deadline_s is None for request in view.decoding):
        return None
    pace = price / len(view.decoding)  # tokens per ms of one request
    weights = np.ones(len(view.decoding))
    for i, request in enumerate(view.decoding):
        if request.deadline_s is not None and pace > 0.0:
            slack_ms = max(1e3 * (request.deadline_s - view.now_s), 1.0)
            needed_ms = slowness * (request.max_num_tokens - request.num_tokens) / pace
            weights[i] = min(MAX_URGENCY, max(1.0, needed_ms / slack_ms))
    return weights / float(weights.mean())
