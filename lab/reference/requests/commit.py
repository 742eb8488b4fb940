"""References of ops/requests/commit.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import (
    MAX_NUM_TOKENS,
    NUM_ACCEPTED,
    NUM_COMPUTED,
    NUM_DRAFT_COMPUTED,
    NUM_DRAFTED,
    NUM_DRAFTS,
    NUM_MISPREDICTED,
    NUM_PREDICTED,
    NUM_PRUNED,
    NUM_STEPS,
    NUM_TOKENS,
)
from faser_trtllm.core.plan import DraftResult, ScheduledRequests, VerifyResult
from faser_trtllm.ops.arrays import Int32Array, int8_at, int32_at
from faser_trtllm.ops.requests.commit import BLOCK_FULL, BLOCK_SPARE, GOES_ON, LENGTH, STOP, Committed
from faser_trtllm.ops.requests.table import RequestTable


def commit_reference(
    table: RequestTable,
    bounds: Int32Array,
    rows: ScheduledRequests,
    drafts: DraftResult,
    result: VerifyResult,
    now_s: float,
) -> Committed:
    """Do what Committer.commit() does, in plain loops."""
    token_ids: list[int] = []
    num_output, ends, due = [], [], []

    def blocks_of(slot: int) -> int:
        count, (full, draft_full, spare) = table.counts[slot].tolist(), bounds[slot].tolist()
        is_full = count[NUM_COMPUTED] >= full or count[NUM_DRAFT_COMPUTED] >= draft_full
        is_spare = count[NUM_TOKENS] + count[NUM_DRAFTS] <= spare
        return (BLOCK_FULL if is_full else 0) | (BLOCK_SPARE if is_spare else 0)

    for i, slot in enumerate(rows.slots.tolist()):
        count, text = table.counts[slot], table.texts[slot]
        known, num_draft_computed = int(count[NUM_TOKENS]), drafts.num_draft_computed[i]
        count[NUM_DRAFTS] += drafts.num_new_drafts[i]
        count[NUM_DRAFTED] += drafts.num_new_drafts[i]
        if i >= len(result.token_ids):
            count[NUM_COMPUTED] += rows.num_new_tokens[i]
            count[NUM_DRAFT_COMPUTED] = num_draft_computed
            num_output.append(0)
            ends.append(GOES_ON)
            due.append(blocks_of(slot))
            continue
        num_new, accepted = int(result.num_tokens[i]), int(result.num_accepted[i])
        new = result.token_ids[i, :num_new].tolist()
        int32_at(int(text["tokens"]), known + num_new)[known:] = new
        end_ids = int32_at(int(text["end_ids"]), int(text["num_end_ids"])).tolist()
        kept = next((place for place, token in enumerate(new) if token in end_ids), num_new)
        if new:
            count[NUM_ACCEPTED] += min(accepted, kept)
            count[NUM_DRAFTED] -= count[NUM_DRAFTS] - (kept + 1) if kept < accepted else 0
            count[NUM_STEPS] += 1
            count[NUM_PRUNED] += 0 if result.num_pruned is None else result.num_pruned[i]
            times = table.times_s[slot]
            times[:] = now_s if np.isnan(times[0]) else times[0], now_s
        last, pending = known + num_new - 1, int(count[NUM_DRAFTS])
        if result.outcome[i] == native.STILL_PENDING:
            count[NUM_DRAFTS] -= accepted
            count[NUM_DRAFT_COMPUTED] = num_draft_computed
        else:
            count[NUM_DRAFTS] = 0
            count[NUM_DRAFT_COMPUTED] = min(num_draft_computed, known + accepted, last)
        if text["draft_sources"]:
            sources = int8_at(int(text["draft_sources"]), known + pending)[known:].tolist()
            passed = min(accepted, kept)
            is_rejected = result.outcome[i] == native.RECOVERED and passed == accepted
            count[NUM_PREDICTED] += sources[:passed].count(native.BY_PREDICTION)
            count[NUM_MISPREDICTED] += sources[passed:].count(native.BY_PREDICTION) if is_rejected else 0
        count[NUM_TOKENS] = known + kept
        count[NUM_COMPUTED] = min(last, known + kept)
        token_ids += new[:kept]
        num_output.append(kept)
        due.append(blocks_of(slot))
        ends.append(STOP if kept < num_new else LENGTH if last + 1 >= count[MAX_NUM_TOKENS] else GOES_ON)
    return Committed(tuple(token_ids), num_output, ends, due)
