"""A step's tokens, committed natively: the requests' counts and tokens, and which an end id or their limit ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import (
    MAX_NUM_TOKENS,
    NUM_ACCEPTED,
    NUM_COMPUTED,
    NUM_DRAFT_COMPUTED,
    NUM_DRAFTED,
    NUM_DRAFTS,
    NUM_PRUNED,
    NUM_STEPS,
    NUM_TOKENS,
)
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Int32Array, address_of, int32_at
from faser_trtllm.ops.requests.table import TEXTS_DTYPE, RequestTable

GOES_ON, STOP, LENGTH = range(3)  # faser_end
BLOCK_FULL, BLOCK_SPARE = 1, 2  # bits of faser_due
NUM_BOUNDS = 3  # faser_block_bounds


@value
class Found:
    """What a step found, by request.

    num_rows: committed tokens that the pass ran. num_drafted, num_draft_computed: as core.plan.DraftResult has them.
    token_ids [num_requests, width] int32, of which the first num_new[i] count and num_accepted[i] were drafts; carried:
    untested drafts stay pending; now_s: when; num_pruned: rows dropped on the way, empty: none.
    """

    slots: Sequence[int]
    num_rows: Sequence[int]
    num_drafted: Sequence[int]
    num_draft_computed: Sequence[int]
    token_ids: Int32Array
    num_new: Sequence[int]
    num_accepted: Sequence[int]
    carried: Sequence[bool]
    now_s: float
    num_pruned: Sequence[int] = ()


@value
class Committed:
    """By request: how many tokens are output (an end id and what is behind it are not), and GOES_ON, STOP (at an end
    id) or LENGTH (there may be no more). due: whose KV blocks have to be looked at, bits BLOCK_FULL and BLOCK_SPARE.
    token_ids: what is output, of all requests in turn."""

    token_ids: tuple[int, ...]
    num_output: list[int]
    ends: list[int]
    due: list[int]


class Committer:
    """Commits to a table, with buffers that are allocated once."""

    def __init__(self, table: RequestTable, bounds: Int32Array) -> None:
        """bounds [max_batch_size, NUM_BOUNDS] int32: as KVCache.bounds."""
        self._bounds = bounds  # kept for its address
        self._addresses = (
            address_of(table.counts, np.int32),
            address_of(table.times_s, np.float64),
            address_of(table.texts, TEXTS_DTYPE),
            address_of(bounds, np.int32),
        )
        self._token_ids = np.zeros(0, np.int32)
        self._outputs = np.zeros((3, len(table.counts)), np.int32)
        self._output_addresses = [address_of(row, np.int32) for row in self._outputs]

    def commit(self, found: Found) -> Committed:
        """A request whose rows do not reach its last token commits none. InvalidArgumentError, with no change, for more
        tokens than there are or a slot without a request.
        """
        n, token_ids = len(found.slots), np.ascontiguousarray(found.token_ids, np.int32)
        if token_ids.size > self._token_ids.size:
            self._token_ids = np.zeros(token_ids.size, np.int32)
        columns = array("i", found.slots)
        inputs = [found.num_rows, found.num_drafted, found.num_draft_computed]
        inputs += [found.num_new, found.num_accepted, found.carried, found.num_pruned]
        for column in inputs:
            columns += array("i", column)  # several times as fast as extend
        first = columns.buffer_info()[0]
        slots, *at, pruned = range(first, first + 4 * n * 8, 4 * n) if n else [first] * 8
        status = native.library().faser_commit(
            n,
            slots,
            *self._addresses,
            found.now_s,
            *at[:3],
            native.address_of_buffer(token_ids),
            token_ids.shape[1],
            *at[3:],
            pruned if found.num_pruned else None,
            *self._output_addresses,
            native.address_of_buffer(self._token_ids),
        )
        native.check(status, f"committing the tokens of {n} requests")
        num_output, ends, due = self._outputs[:, :n].tolist()
        return Committed(tuple(self._token_ids[: sum(num_output)].tolist()), num_output, ends, due)


def commit_reference(table: RequestTable, bounds: Int32Array, found: Found) -> Committed:
    """Committer.commit in plain loops."""
    token_ids: list[int] = []
    num_output, ends, due = [], [], []

    def blocks_of(slot: int) -> int:
        count, (full, draft_full, spare) = table.counts[slot].tolist(), bounds[slot].tolist()
        is_full = count[NUM_COMPUTED] >= full or count[NUM_DRAFT_COMPUTED] >= draft_full
        is_spare = count[NUM_TOKENS] + count[NUM_DRAFTS] <= spare
        return (BLOCK_FULL if is_full else 0) | (BLOCK_SPARE if is_spare else 0)

    for i, slot in enumerate(found.slots):
        count, text = table.counts[slot], table.texts[slot]
        known, num_new, accepted = int(count[NUM_TOKENS]), found.num_new[i], found.num_accepted[i]
        count[NUM_DRAFTS] += found.num_drafted[i]
        count[NUM_DRAFTED] += found.num_drafted[i]
        reaches_end = count[NUM_COMPUTED] + found.num_rows[i] == known
        if not reaches_end:
            count[NUM_COMPUTED] += found.num_rows[i]
            count[NUM_DRAFT_COMPUTED] = found.num_draft_computed[i]
            num_output.append(0)
            ends.append(GOES_ON)
            due.append(blocks_of(slot))
            continue
        new = found.token_ids[i, :num_new].tolist()
        int32_at(int(text["tokens"]), known + num_new)[known:] = new
        if new:
            count[NUM_ACCEPTED] += accepted
            count[NUM_STEPS] += 1
            count[NUM_PRUNED] += found.num_pruned[i] if found.num_pruned else 0
            times = table.times_s[slot]
            times[:] = found.now_s if np.isnan(times[0]) else times[0], found.now_s
        last = known + num_new - 1
        if found.carried[i]:
            count[NUM_DRAFTS] -= accepted
            count[NUM_DRAFT_COMPUTED] = found.num_draft_computed[i]
        else:
            count[NUM_DRAFTS] = 0
            count[NUM_DRAFT_COMPUTED] = min(found.num_draft_computed[i], known + accepted, last)
        end_ids = int32_at(int(text["end_ids"]), int(text["num_end_ids"])).tolist()
        kept = next((place for place, token in enumerate(new) if token in end_ids), num_new)
        count[NUM_TOKENS] = known + kept
        count[NUM_COMPUTED] = min(last, known + kept)
        token_ids += new[:kept]
        num_output.append(kept)
        due.append(blocks_of(slot))
        ends.append(STOP if kept < num_new else LENGTH if last + 1 >= count[MAX_NUM_TOKENS] else GOES_ON)
    return Committed(tuple(token_ids), num_output, ends, due)
