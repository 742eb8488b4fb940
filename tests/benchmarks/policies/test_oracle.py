"""The oracle's arithmetic on steps worked out by hand."""

import numpy as np
import pytest

from benchmarks.policies.oracle import oracle_rows, oracle_step_ms
from benchmarks.policies.watch import StepWitness
from faser_trtllm import native
from faser_trtllm.core.cost_table import CostCurve, CostTable, Fingerprint
from faser_trtllm.core.counts import NUM_COUNTS, NUM_TOKENS
from faser_trtllm.core.decision import Decision, Mode, StepView
from faser_trtllm.core.plan import DraftResult, ScheduledRequests, SchedulerOutput, StepRecord, VerifyResult
from tests.support.columns import columns

# 1 ms and 0.1 ms per row, no matter who they belong to.
TABLE = CostTable(
    Fingerprint("cpu", "isa", 2, "engine"),
    {"verify@all": CostCurve((1, 101), (1.1, 11.1)), "draft_step@all": CostCurve((1, 2), (0.1, 0.1))},
)


def step(verified, accepted, pending=None, context_rows=0, mode=Mode.SERIAL, draft_ms=0.5, verify_ms=None):
    n = len(verified)
    num_rows = n + sum(verified) + context_rows
    verify_ms = 2 * (1.0 + 0.1 * num_rows) if verify_ms is None else verify_ms  # half as fast as the table
    step_ms = draft_ms + verify_ms + 0.25 if mode is Mode.SERIAL else max(draft_ms, verify_ms) + 0.25
    pending, more = pending or verified, [0] * (context_rows > 0)
    counts = np.zeros((n + len(more), NUM_COUNTS), np.int32)
    counts[:, NUM_TOKENS] = 100
    num_new, drafts = columns([1] * n + [context_rows] * len(more), [*pending, *more])
    shares = ScheduledRequests(counts, num_new, counts, num_new, drafts, drafts, (n, n, n + len(more)))
    plan = SchedulerOutput(shares, StepView([], 0, 0, 0.0), Decision(verified, mode=mode))
    outcome = [native.RECOVERED if a < v else native.BONUS for v, a in zip(verified, accepted, strict=True)]
    sampled = columns(accepted, accepted, outcome, [*verified, *more])
    result = VerifyResult(np.zeros((n, 6), np.int32), *sampled, verify_ms=verify_ms, step_ms=step_ms)
    return StepRecord.of(plan, DraftResult(drafts, drafts, draft_ms), result, (0.0,) * 4)


def test_rows_are_accepted_drafts_and_one_more() -> None:
    assert oracle_rows(step([4, 4, 0], [0, 4, 0])) == 1 + 5 + 1


def test_a_carried_request_has_no_bonus_token() -> None:
    assert oracle_rows(step([2], [3], pending=[5])) == 3


def test_serial_step_pays_for_drafting_and_for_the_needed_rows() -> None:
    record = step([4, 4], [1, 2])  # 10 rows, 5 of them needed: 2 x 1.5 ms instead of 2 x 2.0
    assert oracle_step_ms(record, TABLE) == pytest.approx(0.5 + 0.25 + 3.0)


def test_prompt_rows_stay() -> None:
    record = step([4], [0], context_rows=20)
    assert oracle_step_ms(record, TABLE) == pytest.approx(0.75 + record.result.verify_ms * (1 + 2.1) / (1 + 2.5))


def test_nothing_to_save_where_all_drafts_were_accepted() -> None:
    record = step([3, 2], [3, 2])
    assert oracle_step_ms(record, TABLE) == pytest.approx(record.result.step_ms)


def test_overlapped_step_is_as_long_as_its_longer_stream() -> None:
    record = step([4, 4], [1, 2], mode=Mode.PING_PONG, draft_ms=3.5, verify_ms=4.0)
    assert oracle_step_ms(record, TABLE) == pytest.approx(3.5 + 0.25)


def test_witness_counts() -> None:
    witness = StepWitness(TABLE)
    record = step([4, 4], [1, 2])
    for seen in (record, step([], [])):
        witness.count(seen)
    counts = witness.counts
    assert (counts.num_steps, counts.num_requests, counts.num_rows, counts.num_tokens) == (1, 2, 10, 5)
    assert (counts.num_tested, counts.num_accepted) == (2 + 3, 3)
    assert counts.oracle_ms < counts.step_ms == record.result.step_ms
    assert counts.lengths == {4: 2}
    assert [(p.num_requests, p.draft_len, p.num_tokens) for p in witness.timeline] == [(2, 4.0, 5)]
    witness.start()
    assert witness.counts.num_steps == 0
    assert witness.timeline == []
