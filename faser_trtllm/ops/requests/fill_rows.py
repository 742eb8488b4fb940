"""Build the rows of a pass natively from the tokens of the requests in the sampling table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, address_of, int32_addresses, sampling_address


class DraftRows(NamedTuple):
    """The requests that have rows, with a column [num] int32 for each value."""

    requests: Int32Array  # indices into the step's requests
    slots: Int32Array
    first: Int32Array  # a request's rows are those of its tokens [first, end)
    end: Int32Array
    num_logit_rows: Int32Array  # how many of the last rows have logits: 1 if the request drafts
    num_tokens: Int32Array  # committed
    num_pending: Int32Array  # drafts after the committed tokens
    num_new: Int32Array  # drafts to make after the pending ones


class RowFiller:
    """Builds batches in buffers that are allocated once; a batch is valid until the next call."""

    def __init__(self, max_num_requests: int, max_num_rows: int, block_table: Int32Array) -> None:
        self._max_num_requests = max_num_requests
        self._max_num_rows = max_num_rows
        self._block_table = block_table
        self._cu_rows = np.zeros(max_num_requests + 1, np.int32)
        self._token_ids, self._positions, self._logit_rows = np.zeros((3, max_num_rows), np.int32)
        self._num_logit_rows, self._num_requests = np.zeros((2, 1), np.int32)
        self._num_logit_rows_view, self._num_requests_view = self._num_logit_rows.data, self._num_requests.data
        self._num_requests_address = address_of(self._num_requests, np.int32)
        outputs = (self._cu_rows, self._token_ids, self._positions, self._logit_rows, self._num_logit_rows)
        self._outputs = [address_of(array, np.int32) for array in outputs]

    def fill(
        self, sampling: SamplingArray, slots: Int32Array, first: Int32Array, end: Int32Array, num_logit_rows: Int32Array
    ) -> RaggedBatch:
        """Return rows of the tokens [first[i], end[i]) in slots[i]; the last num_logit_rows[i] have logits.

        Arrays [num_requests] int32. sampling: SamplingTable.array. Raises InvalidArgumentError for rows that do not
        fit, a request without rows, or a slot without a request.
        """
        n = slots.size
        if n > self._max_num_requests:
            raise ValueError(f"a batch of {n} requests, there is room for {self._max_num_requests}")
        at_slots, *columns = int32_addresses(slots, first, end, num_logit_rows)
        num_rows = native.library().faser_fill_rows(
            n, at_slots, sampling_address(sampling), *columns, self._max_num_rows, *self._outputs
        )
        return self._batch(slots, num_rows)

    def fill_draft(
        self, sampling: SamplingArray, rows: ScheduledRequests, num_pending: Int32Array, kind: int
    ) -> tuple[DraftRows, RaggedBatch]:
        """Return the requests and rows of a draft model's first pass: tokens that it has not run yet.

        num_pending int32 [num_requests]: pending drafts, including those of other drafters in this step. kind:
        EngineSpec.draft_kind. A request drafts once it decodes; if not all of its rows fit, it gets those that do and
        drafts later. The draft model also runs prompts. Heads and block drafters run them as far as the target has,
        since a row needs the target's hidden row of the position before (head) or of its own (block drafter). Their
        rows end with the last committed token. Block drafters draft only for requests without pending drafts.
        """
        n = len(rows)
        out = np.empty((len(DraftRows._fields), n), np.int32)
        at_slots, *columns = int32_addresses(
            rows.slots, rows.counts, num_pending, rows.num_new_tokens, rows.max_model_drafts, out
        )
        *columns, at_out = columns
        num_rows = native.library().faser_draft_rows(
            n,
            at_slots,
            sampling_address(sampling),
            *columns,
            kind,
            at_out,
            self._num_requests_address,
            self._max_num_rows,
            *self._outputs,
        )
        found = DraftRows(*out[:, : self._num_requests_view[0]])
        return found, self._batch(found.slots, num_rows)

    def _batch(self, slots: Int32Array, num_rows: int) -> RaggedBatch:
        native.check(num_rows, f"building a batch of {slots.size} requests in {self._max_num_rows} rows")
        return RaggedBatch(
            slots,
            self._cu_rows[: slots.size + 1],
            self._token_ids[:num_rows],
            self._positions[:num_rows],
            self._logit_rows[: self._num_logit_rows_view[0]],
            self._block_table,
        )
