"""References of ops/cuda/compact_rows.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.ops.arrays import Float32Array, Int32Array
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from lab.reference.compact_rows import compact_rows_reference as hidden_reference


def compact_rows_reference(
    hidden: Float32Array,
    positions: Int32Array,
    rows: Int32Array,
    cu_q_lens: Int32Array,
    kv_lens: Int32Array,
    max_seq_len: int,
) -> CompactedRows:
    """Compute compact_rows() in numpy; raise InvalidArgumentError unless the rows from 0 on exist and ascend."""
    listed = rows[rows >= 0]
    kept_hidden = np.zeros((rows.size, hidden.shape[1]), hidden.dtype)
    kept_hidden[: listed.size] = hidden_reference(hidden, listed)
    kept_positions = np.full(rows.size, max_seq_len, np.int32)
    kept_positions[: listed.size] = positions[listed]
    request_ids = np.full(rows.size, -1, np.int32)
    request_ids[: listed.size] = np.searchsorted(cu_q_lens, listed, side="right") - 1
    num_kept = np.array([np.count_nonzero(request_ids == b) for b in range(kv_lens.size)], np.int32)
    kept_cu_q_lens = np.concatenate([[0], np.cumsum(num_kept)]).astype(np.int32)
    kept_kv_lens = (kv_lens - (np.diff(cu_q_lens) - num_kept)).astype(np.int32)
    return CompactedRows(kept_hidden, kept_positions, request_ids, kept_cu_q_lens, kept_kv_lens)
