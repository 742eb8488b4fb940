"""Passes with branches over an engine on the device's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from faser_trtllm.engine.gpu.engine import GpuEngine
from tests.support.engine_harness import Harness, Rows

Branch = tuple[int, int, int]  # the entry of the rows that it is a branch of, position, token


class Tree:
    def __init__(self, engine: GpuEngine, seed: int = 0) -> None:
        self.engine, self.harness = engine, Harness(engine, seed)
        self.table = self.harness.block_table

    def copy(self, *copies: tuple[int, int, int, int]) -> None:
        self.engine.copy_kv(np.array(copies, np.int32).reshape(-1, 4).T)

    def run(self, rows: Sequence[Rows], branches: Sequence[Branch]) -> np.ndarray:
        """-> logits of the rows, then of the branches."""
        batch, spec = self.harness.batch(rows), self.engine.spec
        size, copies = spec.tokens_per_block, []
        for number, (entry, position, _) in enumerate(branches):
            slot, _, begin, _ = rows[entry]
            row, block = self.table[spec.max_batch_size + number], position // size
            row[: block + 1] = self.table[slot, : block + 1]
            row[block] = spec.num_blocks + number
            if begin > block * size:
                copies.append((int(self.table[slot, block]), int(row[block]), 0, begin - block * size))
        self.copy(*copies)
        new = batch.num_rows + np.arange(len(branches))
        columns = {
            "slots": spec.max_batch_size + np.arange(len(branches)),
            "cu_rows": new + 1,
            "token_ids": [token for _, _, token in branches],
            "positions": [position for _, position, _ in branches],
            "logit_rows": new,
        }
        longer = {
            name: np.concatenate([getattr(batch, name), column]).astype(np.int32) for name, column in columns.items()
        }
        parents = np.array([entry for entry, _, _ in branches], np.int32)
        return self.engine.forward(replace(batch, **longer, branch_parents=parents)).copy()
