"""The price of a plan as a rule for the draft call: where drafting on does not pay, it ends."""

from __future__ import annotations

import numpy as np

from faser_trtllm.policy.base import DraftStop
from faser_trtllm.policy.goodput import Choice, StepCosts
from faser_trtllm.policy.survival import SurvivalEstimator


def draft_stop(
    choice: Choice, costs: StepCosts, estimator: SurvivalEstimator, max_draft_len: int, max_batch_size: int
) -> DraftStop:
    """Drafting on must pay for the draft step and for the rows that it adds.

    A row of the plan costs the mean of the plan's rows (over a stair, not on it); a row beyond the plan what the
    next rows, one per request, cost. At each place these are mixed by the share of requests planned to reach it.
    """
    num_requests = len(choice.lengths)
    price, slots, verify = choice.goodput, choice.num_slots, costs.verify
    last = min(slots + num_requests, len(verify) - 1)
    planned_ms = float(verify[slots] - verify[0]) / max(1, slots)
    further_ms = float(verify[last] - verify[slots]) / max(1, last - slots)
    reach = np.bincount(choice.lengths, minlength=max_draft_len + 1)[::-1].cumsum()[::-1][1:] / num_requests
    row_price = price * (further_ms + reach * (planned_ms - further_ms))
    step_price = np.zeros(max_batch_size + 1, np.float32)
    step_price[: num_requests + 1] = costs.draft_step
    step_price[num_requests + 1 :] = costs.draft_step[num_requests]  # a few may join while the plan holds
    step_price *= price
    return DraftStop(estimator.slope, estimator.intercept, estimator.prior, row_price.astype(np.float32), step_price)
