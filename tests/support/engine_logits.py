"""Logits of the CPU engine, for comparisons with another's."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet

NUM_TOKENS = 80
CHUNKS = [0, 1, 38, 77, 79, NUM_TOKENS]
BLOCK = 16


def engine_logits(path: Path, token_ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocab_size] of one sequence, run in chunks and segments through scattered blocks."""
    num_blocks = NUM_TOKENS // BLOCK
    block_table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(1, -1)
    tokens = np.array(token_ids, np.int32)
    rows = []
    with (
        CoreSet(None, 1) as core_set,
        CpuEngine.open(
            path,
            core_set,
            num_blocks=num_blocks,
            tokens_per_block=BLOCK,
            max_batch_size=1,
            max_num_tokens=NUM_TOKENS,
        ) as engine,
    ):
        batch = BatchBuilder(block_table)
        for first, end in itertools.pairwise(CHUNKS):
            batch.clear()
            batch.add(0, tokens, first, end, end - first)
            logits = None
            for segment in range(len(engine.spec.segments) - 1):
                logits = engine.run_segment(batch.build(), segment)
            assert logits is not None
            rows.append(logits[: end - first, : engine.spec.vocab_size].copy())
    return np.concatenate(rows)
