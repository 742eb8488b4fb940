"""Rules that end drafting where more drafts do not pay at a plan's price.

Inside the draft call, the rule uses the margins of the drafts so far. It discards no draft, so it is exact. A block
drafter makes all drafts in one pass, so their number is chosen before the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.decision import DraftStop
from faser_trtllm.ops.arrays import Float64Array, Int32Array
from faser_trtllm.policy.acceptance import AcceptanceEstimator
from faser_trtllm.policy.costs import StepCosts


def draft_stop(
    lengths: Sequence[int],
    price: float,
    verify: Float64Array,
    costs: StepCosts,
    estimator: AcceptanceEstimator,
    max_batch_size: int,
    experts: Float64Array | None = None,
) -> DraftStop:
    """Return the rule by which more drafting must pay for the draft step and for the rows that it adds.

    verify: ms by slots. experts: the part of it that experts take.

    A row of the plan costs the mean of the plan's rows, which averages over the kernels' tiles. A row beyond the plan
    costs what the next rows, one per request, cost. At each position these are mixed by the share of requests planned
    to reach it. Experts have no tiles, and a request's later rows read fewer new ones, so they cost what those at their
    position do. No row is run for a draft with a bad margin; the value of that option depends on the spread of
    probabilities.
    """
    n = len(lengths)
    model = estimator.model
    row_price = price * _row_ms(lengths, verify, model.max_draft_len, experts)
    step_price = np.full(max_batch_size + 1, costs.draft_step[n], np.float32)  # a few may join while the plan holds
    step_price[: n + 1] = costs.draft_step
    step_price *= price
    expected = estimator.prior, estimator.spread
    return DraftStop(model.slope, model.intercept, *expected, row_price.astype(np.float32), step_price)


def block_lengths(
    lengths: Sequence[int],
    limits: Int32Array,
    modes: Sequence[int],
    price: float,
    verify: Float64Array,
    costs: StepCosts,
    estimator: AcceptanceEstimator,
    experts: Float64Array | None = None,
) -> list[int]:
    """Return the number of a block's drafts for each request, at least `lengths`: more as long as a position's drafts
    are worth its step.

    Rows are run only for drafts with good margins, so a draft is worth its survival minus the price of a row, or 0 if
    that is negative. Survival is taken to be one standard deviation above or below its mean, with equal chances.
    """
    prior, spread = (values[list(modes)].astype(np.float64) for values in (estimator.prior, estimator.spread))
    mean = np.cumprod(prior, axis=1)
    deviation = np.sqrt(np.maximum(0.0, np.cumprod(prior**2 + spread**2, axis=1) - mean**2))
    over = mean - price * _row_ms(lengths, verify, mean.shape[1], experts)
    worth = 0.5 * (np.maximum(0.0, over + deviation) + np.maximum(0.0, over - deviation))
    wanted = np.array(lengths)
    for place in range(int(wanted.min()), mean.shape[1]):
        further = (wanted == place) & (wanted > 0) & (limits > place)
        active = int((wanted > place).sum() + further.sum())
        step_ms = float(costs.draft_step[active] - costs.draft_step[active - further.sum()])
        if further.any() and worth[further, place].sum() > price * step_ms:
            wanted[further] = place + 1
    return wanted.tolist()  # type: ignore[no-any-return]


def _row_ms(
    lengths: Sequence[int], verify: Float64Array, num_places: int, experts: Float64Array | None
) -> Float64Array:
    """Return ms of a row at each position, [num_places]; see draft_stop."""
    n, slots = len(lengths), sum(lengths)
    last = min(slots + n, len(verify) - 1)
    further_ms = float(verify[last] - verify[slots]) / max(1, last - slots)
    num_reaching = np.bincount(lengths, minlength=num_places + 1)[::-1].cumsum()[::-1][1:]
    planned_ms: Float64Array | float
    if experts is None:
        planned_ms = float(verify[slots] - verify[0]) / max(1, slots)
    else:
        planned_ms = float(verify[slots] - experts[slots] - verify[0] + experts[0]) / max(1, slots)
        planned_ms += np.diff(experts[np.cumsum([0, *num_reaching])]) / np.maximum(1, num_reaching)
    return np.asarray(further_ms + num_reaching / n * (planned_ms - further_ms))
