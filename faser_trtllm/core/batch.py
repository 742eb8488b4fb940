"""The ragged batch that an engine runs: plain arrays, filled in place once per step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.value import value

Int32Array = npt.NDArray[np.int32]


@value
class RaggedBatch:
    """Rows of many requests, each request's rows at consecutive positions.

    slots [num_requests]: rows of block_table. cu_rows [num_requests + 1]: cumulative rows.
    token_ids, positions [num_rows]. logit_rows [num_logit_rows]: ascending row indices whose logits are wanted.
    block_table [max_batch_size, max_blocks_per_seq]. All int32 and contiguous.
    branch_parents [num_branches]: the last so many requests are one row each, which takes the place of a row of the
    request of this index (executor/branches.py); None: there are none.
    """

    slots: Int32Array
    cu_rows: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    logit_rows: Int32Array
    block_table: Int32Array
    branch_parents: Int32Array | None = None

    @property
    def num_requests(self) -> int:
        return self.slots.size

    @property
    def num_rows(self) -> int:
        return self.token_ids.size


class BatchBuilder:
    """Builds a batch in preallocated buffers, which are reused every step.

    It writes through memoryviews: for a handful of numbers they take half the time of numpy.
    """

    def __init__(self, max_num_requests: int, max_num_rows: int, max_seq_len: int, block_table: Int32Array) -> None:
        self._max_num_rows = max_num_rows
        self._slots = np.zeros(max_num_requests, np.int32)
        self._cu_rows = np.zeros(max_num_requests + 1, np.int32)
        self._token_ids = np.zeros(max_num_rows, np.int32)
        self._positions = np.zeros(max_num_rows, np.int32)
        self._logit_rows = np.zeros(max_num_rows, np.int32)
        self._block_table = block_table
        self._slots_view, self._cu_rows_view = self._slots.data, self._cu_rows.data
        self._token_ids_view, self._positions_view = self._token_ids.data, self._positions.data
        self._logit_rows_view = self._logit_rows.data
        self._iota = np.arange(max(max_num_rows, max_seq_len) + 1, dtype=np.int32).data
        self.clear()

    def clear(self) -> None:
        self.num_requests = 0
        self.num_rows = 0
        self.num_logit_rows = 0

    def add(self, slot: int, tokens: Int32Array, first: int, end: int, num_logit_rows: int) -> None:
        """Add rows for tokens[first:end] of a request; its last num_logit_rows rows produce logits.

        Raises ValueError if the rows do not fit.
        """
        request, start = self.num_requests, self.num_rows
        stop = start + end - first
        if stop > self._max_num_rows:
            raise ValueError(f"a batch of {stop} rows, there is room for {self._max_num_rows}")
        if stop == start + 1:  # fast path for one row (a request without drafts): slices take three times as long
            self._token_ids_view[start] = tokens[first]
            self._positions_view[start] = first
        else:
            self._token_ids_view[start:stop] = tokens[first:end].data
            self._positions_view[start:stop] = self._iota[first:end]
        if num_logit_rows == 1:
            self._logit_rows_view[self.num_logit_rows] = stop - 1
            self.num_logit_rows += 1
        elif num_logit_rows:
            logits_stop = self.num_logit_rows + num_logit_rows
            self._logit_rows_view[self.num_logit_rows : logits_stop] = self._iota[stop - num_logit_rows : stop]
            self.num_logit_rows = logits_stop
        self._slots_view[request] = slot
        self._cu_rows_view[request + 1] = stop
        self.num_requests = request + 1
        self.num_rows = stop

    def build(self) -> RaggedBatch:
        """Views of the buffers; valid until the next clear()."""
        return RaggedBatch(
            self._slots[: self.num_requests],
            self._cu_rows[: self.num_requests + 1],
            self._token_ids[: self.num_rows],
            self._positions[: self.num_rows],
            self._logit_rows[: self.num_logit_rows],
            self._block_table,
        )


def keep_rows(batch: RaggedBatch, rows: Int32Array, num_kept: npt.ArrayLike) -> RaggedBatch:
    """The batch after pruning: the rows listed (ascending indices), num_kept[i] of them from request i.

    Each request keeps a prefix of its rows. Logit rows that were dropped are dropped from logit_rows too.
    """
    cu_rows = np.zeros(batch.num_requests + 1, np.int32)
    np.cumsum(num_kept, out=cu_rows[1:])
    wanted = np.zeros(batch.num_rows, bool)
    wanted[batch.logit_rows] = True
    logit_rows = np.flatnonzero(wanted[rows]).astype(np.int32)
    return RaggedBatch(
        batch.slots, cu_rows, batch.token_ids[rows], batch.positions[rows], logit_rows, batch.block_table
    )
