"""References of ops/transfer/fill_inputs.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.batch import Int32Array, RaggedBatch
from faser_trtllm.ops.transfer.fill_inputs import SECTIONS, PassLimits, check_batch


def fill_inputs_reference(batch: RaggedBatch, limits: PassLimits, out: Int32Array) -> None:
    """Do what fill_inputs() does, in numpy."""
    check_batch(batch, limits)
    n, num_rows = batch.num_requests, batch.num_rows
    counts = np.diff(batch.cu_rows)
    starts = limits.starts.tolist()

    def put(name: str, values: Int32Array, size: int, rest: int = 0) -> None:
        section = out[starts[SECTIONS.index(name)] :][:size]
        section[: values.size], section[values.size :] = values, rest

    put("cu_q_lens", batch.cu_rows, limits.max_num_requests + 1, num_rows)
    put("kv_lens", batch.positions[batch.cu_rows[:-1]] + counts, limits.max_num_requests)
    for name in ("token_ids", "positions", "logit_rows"):
        put(name, getattr(batch, name), limits.max_num_rows)
    if starts[SECTIONS.index("first_branch")] >= 0:
        parents = np.zeros(0, np.int32) if batch.branch_parents is None else batch.branch_parents
        num_parents = n - parents.size
        first_branch = num_parents + np.searchsorted(parents, np.arange(num_parents))
        put("first_branch", first_branch.astype(np.int32), limits.max_num_requests + 1, n)
    width = int(batch.positions.max(initial=-1)) // limits.tokens_per_block + 1
    table = out[starts[-1] :][: n * limits.max_blocks_per_seq].reshape(n, limits.max_blocks_per_seq)
    table[:, :width] = batch.block_table[batch.slots, :width]
