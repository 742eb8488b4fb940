"""The ragged batch that an engine runs: plain arrays, filled in place once per step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.value import value

Int32Array = npt.NDArray[np.int32]


@value
class RaggedBatch:
    """Rows of many requests, each request's rows at consecutive positions. All arrays are int32 and contiguous."""

    slots: Int32Array  # [num_requests] each request's row of block_table
    cu_rows: Int32Array  # [num_requests + 1] cumulative rows
    token_ids: Int32Array  # [num_rows]
    positions: Int32Array  # [num_rows]
    logit_rows: Int32Array  # [num_logit_rows] rows whose logits are needed, ascending
    block_table: Int32Array  # [max_batch_size, max_blocks_per_seq]
    # [num_branches] The last num_branches requests are branches of one row each (executor/branches.py); these are the
    # indices of the requests that they belong to. None: no branches.
    branch_parents: Int32Array | None = None

    @property
    def num_requests(self) -> int:
        return self.slots.size

    @property
    def num_rows(self) -> int:
        return self.token_ids.size


class BatchBuilder:
    """Builds a batch request by request; the executor's steps use the native ops/requests/fill_rows.py instead."""

    def __init__(self, block_table: Int32Array) -> None:
        self._block_table = block_table
        self.clear()

    def clear(self) -> None:
        self._slots: list[int] = []
        self._cu_rows = [0]
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._logit_rows: list[int] = []

    def add(self, slot: int, tokens: Int32Array, first: int, end: int, num_logit_rows: int) -> None:
        """Add rows for tokens[first:end] of a request; its last num_logit_rows rows produce logits."""
        self._slots.append(slot)
        self._token_ids += tokens[first:end].tolist()
        self._positions += range(first, end)
        self._cu_rows.append(len(self._positions))
        self._logit_rows += range(len(self._positions) - num_logit_rows, len(self._positions))

    def build(self) -> RaggedBatch:
        columns = (self._slots, self._cu_rows, self._token_ids, self._positions, self._logit_rows)
        slots, cu_rows, token_ids, positions, logit_rows = (np.array(column, np.int32) for column in columns)
        return RaggedBatch(slots, cu_rows, token_ids, positions, logit_rows, self._block_table)


def keep_rows(batch: RaggedBatch, rows: Int32Array, num_kept: npt.ArrayLike) -> RaggedBatch:
    """Return the batch after pruning: the given rows (ascending indices), num_kept[i] of them from request i.

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
