"""Commit a step's tokens natively: update the requests' counts and tokens, and find the requests that have ended."""

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
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Int32Array, address_of, int8_at, int32_addresses, int32_at
from faser_trtllm.ops.requests.table import TEXTS_DTYPE, RequestTable

GOES_ON, STOP, LENGTH = range(3)  # faser_end
BLOCK_FULL, BLOCK_SPARE = 1, 2  # bits of faser_due
NUM_BOUNDS = 3  # faser_block_bounds


@value
class Committed:
    """The committed tokens of each request."""

    token_ids: tuple[int, ...]  # the output, of all requests in turn
    num_output: list[int]  # tokens output; an end id and all after it are not
    ends: list[int]  # GOES_ON, STOP (at an end id) or LENGTH (there may be no more)
    due: list[int]  # requests whose KV blocks must be updated: bits BLOCK_FULL and BLOCK_SPARE


class Committer:
    """Commits to a table, with buffers that are allocated once."""

    def __init__(self, table: RequestTable, bounds: Int32Array) -> None:
        """bounds int32 [max_batch_size, NUM_BOUNDS]: KVCache.bounds."""
        self._bounds = bounds  # keep alive for its address
        self._addresses = (
            address_of(table.counts, np.int32),
            address_of(table.times_s, np.float64),
            address_of(table.texts, TEXTS_DTYPE),
            address_of(bounds, np.int32),
        )
        self._token_ids = np.zeros(0, np.int32)
        self._outputs = np.zeros((3, len(table.counts)), np.int32)
        self._output_addresses = [address_of(row, np.int32) for row in self._outputs]

    def commit(self, rows: ScheduledRequests, drafts: DraftResult, result: VerifyResult, now_s: float) -> Committed:
        """Commit the step's tokens. A request whose rows do not reach its last token commits none. Drafts after an end
        id are not counted, and the end id is not counted as accepted. Raises InvalidArgumentError, with no change, for
        more tokens than there are or a slot without a request."""
        n, token_ids, num_pruned = len(rows), result.token_ids, result.num_pruned
        if token_ids.size > self._token_ids.size:
            self._token_ids = np.zeros(token_ids.size, np.int32)
        at_slots, *columns = int32_addresses(
            rows.slots, rows.num_new_tokens, drafts.num_new_drafts, drafts.num_draft_computed, token_ids
        )
        status = native.library().faser_commit(
            n,
            len(token_ids),
            at_slots,
            *self._addresses,
            now_s,
            *columns,
            token_ids.shape[1],
            *int32_addresses(result.num_tokens, result.num_accepted, result.outcome),
            None if num_pruned is None else address_of(num_pruned, np.int32),
            *self._output_addresses,
            native.address_of_buffer(self._token_ids),
        )
        native.check(status, f"committing the tokens of {n} requests")
        num_output, ends, due = self._outputs[:, :n].tolist()
        return Committed(tuple(self._token_ids[: sum(num_output)].tolist()), num_output, ends, due)


def commit_reference(
    table: RequestTable,
    bounds: Int32Array,
    rows: ScheduledRequests,
    drafts: DraftResult,
    result: VerifyResult,
    now_s: float,
) -> Committed:
    """Committer.commit in plain loops."""
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
