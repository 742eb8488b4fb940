"""A pass as a segment engine of a fixed shape takes it: the network's inputs, padded to a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser_trtllm.builder.network.inputs import NetworkInputs, native_inputs, plugin_inputs
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.engine.tensorrt_buckets import Buckets


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """arrays: int32 inputs by name. sizes: the pass's dimensions by name (NetworkOptions.dimension_ranges).

    network_row [num_rows]: where the network has each row of the batch. Rows behind them are dummies.
    """

    arrays: Mapping[str, Int32Array]
    sizes: Mapping[str, int]
    network_row: Int32Array


def padded_inputs(
    batch: RaggedBatch, flavour: str, options: NetworkOptions, buckets: Buckets, num_blocks: int
) -> PaddedInputs:
    """Inputs of a pass in either flavour; InvalidArgumentError for a batch that cannot be.

    A dummy row is token 0. It writes no KV that anybody reads: where the cache is linear it stands behind the last
    cache row's own rows, and so beyond its length; our plugins ignore rows that belong to no request.
    """
    rows = buckets.rows(batch.num_rows)
    logit_rows = min(buckets.rows(batch.logit_rows.size), rows)
    if flavour == "native":
        cache_rows = batch.block_table[batch.slots, 0]
        inputs = native_inputs(batch, cache_rows, options.max_batch_size, options.max_seq_len)
        arrays, query_rows = _pad_native(inputs, rows, options, buckets)
    else:
        inputs = plugin_inputs(batch, options.max_seq_len)
        arrays, query_rows = _pad_plugin(inputs, rows, options), 1
    arrays["token_ids"] = _padded(inputs.arrays["token_ids"], rows, 0)
    arrays["logit_rows"] = _padded(inputs.arrays["logit_rows"], logit_rows, 0)
    network_row = np.arange(batch.num_rows, dtype=np.int32)
    if inputs.order is not None:
        network_row[inputs.order] = network_row.copy()
    sizes = {
        "rows": rows,
        "batch": options.max_batch_size,
        "batch_plus_one": options.max_batch_size + 1,
        "query_rows": query_rows,
        "logit_rows": logit_rows,
        "blocks": num_blocks,
    }
    return PaddedInputs(arrays, sizes, network_row)


def _pad_native(
    inputs: NetworkInputs, rows: int, options: NetworkOptions, buckets: Buckets
) -> tuple[dict[str, Int32Array], int]:
    arrays = dict(inputs.arrays)
    num_slots, width = arrays["pad_idx"].shape
    query_rows = min(buckets.query_rows(width, rows), options.max_query_rows)
    pad_idx = np.zeros((num_slots, query_rows), np.int32)
    pad_idx[:, :width] = arrays["pad_idx"]
    slot, place = np.divmod(arrays["unpad_idx"], width)
    if rows > arrays["positions"].size:
        cu_q_lens, write_idx = arrays["cu_q_lens"].copy(), arrays["write_idx"].copy()
        if cu_q_lens[-1] == cu_q_lens[-2]:
            write_idx[-1] = options.max_seq_len  # beyond the cache: an idle row is not written
        cu_q_lens[-1] = rows
        arrays |= {"cu_q_lens": cu_q_lens, "write_idx": write_idx}
    arrays |= {
        "positions": _padded(arrays["positions"], rows, 0),
        "pad_idx": pad_idx,
        "unpad_idx": _padded((slot * query_rows + place).astype(np.int32), rows, 0),
    }
    return arrays, query_rows


def _pad_plugin(inputs: NetworkInputs, rows: int, options: NetworkOptions) -> dict[str, Int32Array]:
    arrays = dict(inputs.arrays)
    cu_q_lens, block_table = arrays["cu_q_lens"], arrays["block_table"]
    num_idle = options.max_batch_size - (cu_q_lens.size - 1)
    return arrays | {
        "positions": _padded(arrays["positions"], rows, 0),
        "cu_q_lens": _padded(cu_q_lens, options.max_batch_size + 1, int(cu_q_lens[-1])),
        "kv_lens": _padded(arrays["kv_lens"], options.max_batch_size, 0),
        "block_table": np.pad(block_table, ((0, num_idle), (0, 0))).astype(np.int32),
    }


def _padded(array: Int32Array, size: int, value: int) -> Int32Array:
    padded = np.full(size, value, np.int32)
    padded[: array.size] = array
    return padded
