"""Compare a step with an oracle that verifies only the drafts that will be accepted.

The oracle knows in advance how many drafts of each request will be accepted, A_r, runs 1 + A_r rows for it, and commits
as many tokens: sum(1 + A_r) tokens at the cost T(sum(1 + A_r)). Drafting costs the same. T is the cost table's time,
scaled by the step's own time over the table's prediction for it, so that the table's error and the machine's speed
cancel. It is an upper bound for any choice of rows for these drafts.
"""

from __future__ import annotations

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import StepRecord


def oracle_rows(record: StepRecord) -> int:
    """Return the oracle's rows of decoding requests, which equal the tokens that the step commits.

    A request whose last row accepted its draft, with more drafts after it, committed no bonus token: its last accepted
    draft had no row.
    """
    n = record.plan.scheduled.num_decoding
    verified, accepted = record.result.num_verified[:n], record.result.num_accepted[:n]
    return int((accepted + (accepted <= verified)).sum())


def oracle_step_ms(record: StepRecord, table: CostTable) -> float:
    """Return the step's time with only the oracle's rows in the pass, at most its real time."""
    rows, drafts, result = record.plan.scheduled, record.drafts, record.result
    n = rows.num_decoding
    context = float(rows.num_tokens[:n].mean())
    num_requests = n + (1 if record.num_context_rows else 0)
    actual = table.verify_ms(max(record.num_rows, 1), num_requests, context)
    wanted = table.verify_ms(oracle_rows(record) + record.num_context_rows, num_requests, context)
    verify_ms = result.verify_ms * min(1.0, wanted / actual)
    if record.plan.mode is Mode.SERIAL:
        return result.step_ms - result.verify_ms + verify_ms
    rest_ms = max(0.0, result.step_ms - max(drafts.draft_ms, result.verify_ms))
    # The clock of drafting may end after the step's.
    return min(result.step_ms, max(drafts.draft_ms, verify_ms) + rest_ms)
