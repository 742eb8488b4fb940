"""Tests of what an upload sends to the device."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.gpu.batch import DeviceBatch
from faser_trtllm.engine.gpu.limits import GpuLimits

NUM_SLOTS, TOKENS_PER_BLOCK, MAX_SEQ_LEN = 4, 8, 64


def device_batch() -> DeviceBatch:
    limits = GpuLimits(64, TOKENS_PER_BLOCK, NUM_SLOTS, 32, MAX_SEQ_LEN, 32)
    return DeviceBatch(
        HostRuntime(), limits.spec({"vocab_size": 99, "num_layers": 1, "max_seq_len": MAX_SEQ_LEN}, (0, 1))
    )


def a_row_each(positions: list[int], first_block: int) -> RaggedBatch:
    """Return a batch with one row per position, in the first slots, whose blocks are numbered from first_block on."""
    n = len(positions)
    table = first_block + np.arange(NUM_SLOTS * 8, dtype=np.int32).reshape(NUM_SLOTS, 8)
    rows = np.arange(n + 1, dtype=np.int32)
    return RaggedBatch(rows[:-1], rows, np.zeros(n, np.int32), np.array(positions, np.int32), rows[:-1], table)


def test_the_block_table_is_sent_as_far_as_the_batch_reaches() -> None:
    device = device_batch()
    device.upload(a_row_each([63, 20, 40], first_block=1), 3, 1)
    assert device.block_table[:3].tolist() == (1 + np.arange(24).reshape(3, 8)).tolist()
    device.upload(a_row_each([16], first_block=20), 1, 1)
    assert device.block_table[0, :3].tolist() == [20, 21, 22], "position 16 is in the third block"
    assert device.block_table[1:3].tolist() == (9 + np.arange(16).reshape(2, 8)).tolist(), (
        "of requests that have no rows"
    )
    assert device.cu_q_lens.tolist() == [0, 1, 1, 1, 1]


def test_blocks_that_no_row_reaches_are_not_looked_at() -> None:
    batch = a_row_each([16], first_block=20)
    batch.block_table[0, 3:] = -7
    device = device_batch()
    device.upload(batch, 1, 1)
    assert device.block_table[0, :3].tolist() == [20, 21, 22]
