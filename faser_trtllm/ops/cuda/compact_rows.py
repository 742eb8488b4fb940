"""Drop rows between two segments on the device: hidden rows and the batch's ragged arrays, in one launch.

Moves num_kept rows of hidden_size values once in and once out, which bounds its time.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer, type_name

STEM = "compact_rows"
NUM_THREADS = 128


class CompactedRows(NamedTuple):
    """The inputs of the next segment."""

    hidden: Any  # [num_kept, hidden_size]
    positions: Any  # int32 [num_kept]
    request_ids: Any  # int32 [num_kept]
    cu_q_lens: Any  # int32 [num_requests + 1]
    kv_lens: Any  # int32 [num_requests]


def compact_rows(
    launcher: Launcher,
    hidden: Any,
    positions: Any,
    rows: Any,
    cu_q_lens: Any,
    kv_lens: Any,
    max_seq_len: int,
    kept: CompactedRows,
) -> None:
    """Write the listed rows and their ragged arrays to the tensors of `kept`.

    hidden [num_rows, hidden_size] torch.bfloat16, float16 or float32; positions int32 [num_rows]; rows int32
    [num_kept]: ascending indices, then -1 for the dummies that fill a bucket; each request keeps a prefix of its rows.
    cu_q_lens int32 [num_requests + 1], kv_lens int32 [num_requests], including the new rows. A dummy has a hidden row
    of zeros, position max_seq_len (outside every cache, so nothing is written for it) and request id -1, and lies
    beyond cu_q_lens. No output may overlap an input. Contiguous device tensors; asynchronous.
    """
    dtype = type_name("hidden", hidden, "bf16", "fp16", "fp32")
    num_rows, hidden_size = hidden.shape
    num_kept, num_requests = rows.shape[0], kv_lens.shape[0]
    arguments = (
        pointer("hidden", hidden, dtype, (None, None)),
        pointer("positions", positions, "int32", (num_rows,)),
        pointer("rows", rows, "int32", (None,)),
        pointer("cu_q_lens", cu_q_lens, "int32", (num_requests + 1,)),
        pointer("kv_lens", kv_lens, "int32", (None,)),
        *map(ctypes.c_int32, (num_rows, num_kept, num_requests, hidden_size * hidden.element_size(), max_seq_len)),
        pointer("kept.hidden", kept.hidden, dtype, (num_kept, hidden_size)),
        pointer("kept.positions", kept.positions, "int32", (num_kept,)),
        pointer("kept.request_ids", kept.request_ids, "int32", (num_kept,)),
        pointer("kept.cu_q_lens", kept.cu_q_lens, "int32", (num_requests + 1,)),
        pointer("kept.kv_lens", kept.kv_lens, "int32", (num_requests,)),
    )
    launcher.launch("compact_rows", (max(1, num_kept), 1, 1), (NUM_THREADS, 1, 1), arguments)
