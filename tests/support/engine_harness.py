"""Drives an engine as a scheduler would: requests with their own blocks, and passes over some rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.batch import BatchBuilder, RaggedBatch
from faser_trtllm.engine.cpu.engine import CpuEngine

Rows = tuple[int, Sequence[int], int, int]  # slot, tokens of the request, first and end of the rows to run


class Harness:
    """Gives each slot its blocks, in an order drawn from a seed, and builds batches."""

    def __init__(self, engine: CpuEngine, seed: int = 0) -> None:
        self.engine = engine
        spec = engine.spec
        blocks_per_seq = -(-spec.max_seq_len // spec.tokens_per_block)
        order = np.random.default_rng(seed).permutation(spec.num_blocks).astype(np.int32)
        self.block_table = np.resize(order, (spec.max_batch_size, blocks_per_seq)).copy()
        assert spec.num_blocks >= self.block_table.size, "each slot needs blocks of its own"
        branches = np.zeros((spec.max_num_branches, blocks_per_seq), np.int32)
        self.block_table = np.vstack([self.block_table, branches])
        self._builder = BatchBuilder(self.block_table)

    def batch(self, rows: Sequence[Rows]) -> RaggedBatch:
        self._builder.clear()
        for slot, tokens, first, end in rows:
            self._builder.add(slot, np.asarray(tokens, np.int32), first, end, end - first)
        return self._builder.build()

    def run(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Logits [num_rows, vocab_size] of each entry."""
        logits = self.engine.forward(self.batch(rows))[:, : self.engine.spec.vocab_size].copy()
        ends = np.cumsum([end - first for _, _, first, end in rows])
        return np.split(logits, ends[:-1])
