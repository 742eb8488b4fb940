"""Commit a step's tokens natively: update the requests' counts and tokens, and find the requests that have ended."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.plan import DraftResult, ScheduledRequests, VerifyResult
from faser_trtllm.core.value import value
from faser_trtllm.ops.arrays import Int32Array, address_of, int32_addresses
from faser_trtllm.ops.requests.table import TEXTS_DTYPE, RequestTable

GOES_ON, STOP, LENGTH = range(3)  # faser_end
BLOCK_FULL, BLOCK_SPARE = 1, 2  # bits of faser_due
NUM_BOUNDS = 3  # faser_block_bounds


@value
class Committed:
    """The committed tokens of each request."""

    token_ids: tuple[int, ...]  # the output, request by request
    num_output: list[int]  # tokens output; an end id and all after it are not
    ends: list[int]  # GOES_ON, STOP (at an end id) or LENGTH (at the maximum)
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
        id are not counted, nor is the end id as accepted. Raises InvalidArgumentError, and changes nothing, for more
        tokens than there are or a slot without a request."""
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
