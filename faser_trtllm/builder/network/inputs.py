"""Compute the inputs of a network with native attention from a ragged batch, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.transfer.fill_inputs import check_positions


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """int32 inputs by name, without hidden rows. Row i of the network is row order[i] of the batch; None: row i."""

    arrays: dict[str, Int32Array]
    order: Int32Array | None = None


def native_inputs(batch: RaggedBatch, cache_rows: Int32Array, max_batch_size: int, max_seq_len: int) -> NetworkInputs:
    """Return the inputs of a network with native attention, its rows sorted by cache row.

    cache_rows [num_requests] int32: the cache row of each request, 0 to max_batch_size - 1, without duplicates; other
    cache rows are idle. Raises InvalidArgumentError for invalid cache rows or positions.
    """
    check_positions(batch, max_seq_len)
    counts, past = np.diff(batch.cu_rows), batch.positions[batch.cu_rows[:-1]]
    if cache_rows.size and (cache_rows.min() < 0 or cache_rows.max() >= max_batch_size):
        raise InvalidArgumentError(f"cache rows are {cache_rows.tolist()}; they must be 0 to {max_batch_size - 1}")
    if np.unique(cache_rows).size != cache_rows.size:
        raise InvalidArgumentError(f"cache rows are {cache_rows.tolist()}, each must be there once")
    num_rows = np.zeros(max_batch_size, np.int32)
    write_idx = np.zeros(max_batch_size, np.int32)
    num_rows[cache_rows] = counts
    write_idx[cache_rows] = past
    cu_q_lens = np.zeros(max_batch_size + 1, np.int32)
    np.cumsum(num_rows, out=cu_q_lens[1:])
    by_cache_row = np.argsort(cache_rows)
    order = _ranges(batch.cu_rows[:-1][by_cache_row], counts[by_cache_row])
    width = max(int(num_rows.max(initial=0)), 1)
    place = _ranges(np.zeros(max_batch_size, np.int32), num_rows)
    unpad_idx = np.repeat(np.arange(max_batch_size, dtype=np.int32) * width, num_rows) + place
    pad_idx = np.zeros(max_batch_size * width, np.int32)
    pad_idx[unpad_idx] = np.arange(batch.num_rows, dtype=np.int32)
    network_row = np.empty(batch.num_rows, np.int32)
    network_row[order] = np.arange(batch.num_rows, dtype=np.int32)
    arrays = {
        "token_ids": batch.token_ids[order],
        "positions": batch.positions[order],
        "cu_q_lens": cu_q_lens,
        "kv_lens": np.where(num_rows > 0, write_idx + num_rows, 0).astype(np.int32),
        "write_idx": write_idx,
        "pad_idx": pad_idx.reshape(max_batch_size, width),
        "unpad_idx": unpad_idx.astype(np.int32),
        "logit_rows": network_row[batch.logit_rows],
    }
    return NetworkInputs(arrays, order)


def _ranges(starts: Int32Array, counts: Int32Array) -> Int32Array:
    """Concatenate the ranges starts[i], starts[i] + 1, ... (counts[i] numbers each)."""
    ends = np.cumsum(counts)
    offsets = np.repeat(starts - (ends - counts), counts)
    return (offsets + np.arange(ends[-1] if ends.size else 0)).astype(np.int32)
