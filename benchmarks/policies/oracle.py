"""How close a step came to a clairvoyant cut of the very drafts it had.

The oracle knows in advance how many drafts of each request will be accepted, A_r, runs 1 + A_r rows for it, and commits
as many tokens: sum(1 + A_r) tokens at the cost T(sum(1 + A_r)). Drafting is paid as it was. T is the cost table's
staircase, scaled by the step's own time over the table's prediction for it, so that the table's error and the machine's
speed cancel. It is an upper bound of what any choice of rows for these drafts could reach.
"""

from __future__ import annotations

import statistics

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode, StepOutcome


def oracle_rows(outcome: StepOutcome) -> int:
    """Rows of decoding requests that the oracle runs; also the tokens that the step commits.

    A request whose last live row accepted its draft, with more drafts behind it, committed no bonus token: its last
    accepted draft had no row of its own.
    """
    rows = 0
    for verified, accepted in zip(outcome.num_verified, outcome.num_accepted, strict=True):
        carried = accepted > verified
        rows += accepted if carried else accepted + 1
    return rows


def oracle_step_ms(outcome: StepOutcome, table: CostTable) -> float:
    """The step's time, had the pass run the oracle's rows only; never more than it took."""
    n = len(outcome.decoding)
    context = statistics.fmean(request.num_tokens for request in outcome.decoding)
    num_requests = n + (1 if outcome.num_context_rows else 0)
    actual = table.verify_ms(max(outcome.num_rows, 1), num_requests, context)
    wanted = table.verify_ms(oracle_rows(outcome) + outcome.num_context_rows, num_requests, context)
    verify_ms = outcome.verify_ms * min(1.0, wanted / actual)
    if outcome.mode is Mode.SERIAL:
        return outcome.step_ms - outcome.verify_ms + verify_ms
    rest_ms = max(0.0, outcome.step_ms - max(outcome.draft_ms, outcome.verify_ms))
    return min(outcome.step_ms, max(outcome.draft_ms, verify_ms) + rest_ms)  # a stream's clock may end after the step's
