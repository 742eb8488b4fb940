"""The oracle's arithmetic on steps worked out by hand."""

from types import SimpleNamespace

import pytest

from benchmarks.policies.oracle import oracle_rows, oracle_step_ms
from benchmarks.policies.watch import StepWitness
from faser_trtllm.core.cost_table import CostCurve, CostTable, Fingerprint
from faser_trtllm.core.decision import Mode, StepOutcome

# 1 ms and 0.1 ms per row, no matter who they belong to.
TABLE = CostTable(
    Fingerprint("cpu", "isa", 2, "engine"),
    {"verify@all": CostCurve((1, 101), (1.1, 11.1)), "draft_step@all": CostCurve((1, 2), (0.1, 0.1))},
)


def step(verified, accepted, pending=None, context_rows=0, mode=Mode.SERIAL, draft_ms=0.5, verify_ms=None):
    n = len(verified)
    rows = n + sum(verified) + context_rows
    verify_ms = 2 * (1.0 + 0.1 * rows) if verify_ms is None else verify_ms  # the machine is half as fast as the table
    return StepOutcome(
        decoding=[SimpleNamespace(num_tokens=100) for _ in verified],
        num_pending=pending or verified,
        num_verified=verified,
        num_pruned=[0] * n,
        num_tested=[min(v, a + 1) for v, a in zip(verified, accepted, strict=True)],
        num_accepted=accepted,
        num_drafted=sum(verified),
        num_rows=rows,
        num_context_rows=context_rows,
        num_draft_rows=n,
        num_waiting=0,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        step_ms=draft_ms + verify_ms + 0.25 if mode is Mode.SERIAL else max(draft_ms, verify_ms) + 0.25,
        mode=mode,
        now_s=0.0,
    )


def test_rows_are_accepted_drafts_and_one_more() -> None:
    assert oracle_rows(step([4, 4, 0], [0, 4, 0])) == 1 + 5 + 1


def test_a_carried_request_has_no_bonus_token() -> None:
    assert oracle_rows(step([2], [3], pending=[5])) == 3


def test_serial_step_pays_for_drafting_and_for_the_needed_rows() -> None:
    outcome = step([4, 4], [1, 2])  # 10 rows, 5 of them needed: 2 x 1.5 ms instead of 2 x 2.0
    assert oracle_step_ms(outcome, TABLE) == pytest.approx(0.5 + 0.25 + 3.0)


def test_prompt_rows_stay() -> None:
    outcome = step([4], [0], context_rows=20)
    assert oracle_step_ms(outcome, TABLE) == pytest.approx(0.75 + outcome.verify_ms * (1 + 2.1) / (1 + 2.5))


def test_nothing_to_save_where_all_drafts_were_accepted() -> None:
    outcome = step([3, 2], [3, 2])
    assert oracle_step_ms(outcome, TABLE) == pytest.approx(outcome.step_ms)


def test_overlapped_step_is_as_long_as_its_longer_stream() -> None:
    outcome = step([4, 4], [1, 2], mode=Mode.PING_PONG, draft_ms=3.5, verify_ms=4.0)
    assert oracle_step_ms(outcome, TABLE) == pytest.approx(3.5 + 0.25)


def test_witness_counts() -> None:
    witness = StepWitness(TABLE)
    outcome = step([4, 4], [1, 2])
    for seen in (outcome, step([], [])):
        witness.count(seen)
    counts = witness.counts
    assert (counts.num_steps, counts.num_requests, counts.num_rows, counts.num_tokens) == (1, 2, 10, 5)
    assert (counts.num_tested, counts.num_accepted) == (2 + 3, 3)
    assert counts.oracle_ms < counts.step_ms == outcome.step_ms
    assert counts.lengths == {4: 2}
    assert [(p.num_requests, p.draft_len, p.num_tokens) for p in witness.timeline] == [(2, 4.0, 5)]
    witness.start()
    assert witness.counts.num_steps == 0
    assert witness.timeline == []
