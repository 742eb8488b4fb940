"""The price of a plan as a rule for the draft call: where drafting on does not pay, it ends.

The rule looks at the margins of the drafts so far. It discards nothing, so it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.decision import DraftStop
from faser_trtllm.ops.arrays import Float64Array
from faser_trtllm.policy.acceptance import AcceptanceEstimator
from faser_trtllm.policy.costs import StepCosts


def draft_stop(
    lengths: Sequence[int],
    price: float,
    verify: Float64Array,
    costs: StepCosts,
    estimator: AcceptanceEstimator,
    max_batch_size: int,
) -> DraftStop:
    """Drafting on must pay for the draft step and for the rows that it adds.

    A row of the plan costs the mean of the plan's rows (over a stair, not on it); a row beyond the plan what the
    next rows, one per request, cost. At each place these are mixed by the share of requests planned to reach it. Of a
    draft whose margin turns out bad no row is run: what that is worth hangs on how far probabilities spread.
    """
    n, slots = len(lengths), sum(lengths)
    model = estimator.model
    last = min(slots + n, len(verify) - 1)
    planned_ms = float(verify[slots] - verify[0]) / max(1, slots)
    further_ms = float(verify[last] - verify[slots]) / max(1, last - slots)
    reach = np.bincount(lengths, minlength=model.max_draft_len + 1)[::-1].cumsum()[::-1][1:] / n
    row_price = price * (further_ms + reach * (planned_ms - further_ms))
    step_price = np.full(max_batch_size + 1, costs.draft_step[n], np.float32)  # a few may join while the plan holds
    step_price[: n + 1] = costs.draft_step
    step_price *= price
    expected = estimator.prior, estimator.spread
    return DraftStop(model.slope, model.intercept, *expected, row_price.astype(np.float32), step_price)
