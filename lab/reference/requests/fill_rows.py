"""References of ops/requests/fill_rows.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_at


def fill_rows_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    first: Int32Array,
    end: Int32Array,
    num_logit_rows: Int32Array,
    block_table: Int32Array,
) -> RaggedBatch:
    """Do what RowFiller.fill() does, in plain loops."""
    cu_rows = [0]
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for slot, start, stop, num_logits in zip(*(c.tolist() for c in (slots, first, end, num_logit_rows)), strict=True):
        token_ids += int32_at(int(sampling[slot]["tokens"]), stop)[start:].tolist()
        positions += range(start, stop)
        logit_rows += range(len(token_ids) - num_logits, len(token_ids))
        cu_rows.append(len(token_ids))
    lists = (list(slots), cu_rows, token_ids, positions, logit_rows)
    return RaggedBatch(*[np.array(values, np.int32) for values in lists], block_table)  # type: ignore[call-arg]
