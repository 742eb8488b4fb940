"""An engine whose model is a table: the next token's law depends on the last three tokens, read back from KV memory.

It stores token ids where a real engine stores keys and values, so a wrong block, a stale row or a shared block written
twice changes the logits and fails the exactness tests.
"""

from __future__ import annotations

import numpy as np

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.ops import sample

CONTEXT = 3


def make_table(vocab_size: int, seed: int, sharpness: float = 2.0) -> np.ndarray:
    """Logits [vocab_size ** CONTEXT, vocab_size] fp32."""
    rng = np.random.default_rng(seed)
    return (sharpness * rng.standard_normal((vocab_size**CONTEXT, vocab_size))).astype(np.float32)


def blend(target: np.ndarray, seed: int, noise: float) -> np.ndarray:
    """A draft's table: the target's with noise, so that some drafts are accepted and some are not."""
    rng = np.random.default_rng(seed)
    return (target + noise * rng.standard_normal(target.shape)).astype(np.float32)


def context_row(tokens, position: int, vocab_size: int) -> int:
    row = 0
    for p in range(position - CONTEXT + 1, position + 1):
        row = row * vocab_size + (int(tokens[p]) if p >= 0 else 0)
    return row


class ToyEngine:
    def __init__(
        self,
        table,
        *,
        num_blocks,
        tokens_per_block,
        max_batch_size,
        max_num_tokens=64,
        max_seq_len=64,
        stride=None,
    ):
        vocab_size = table.shape[1]
        self.spec = EngineSpec(
            vocab_size, max_seq_len, 1, num_blocks, tokens_per_block, max_num_tokens, max_batch_size, (0, 1)
        )
        self.table = table
        self.kv = np.full((num_blocks, tokens_per_block), -1, np.int64)
        self.num_forwards = 0
        self.max_rows_seen = 0

    def forward(self, batch):
        spec = self.spec
        assert 0 < batch.num_rows <= spec.max_num_tokens
        assert batch.num_requests <= spec.max_batch_size
        assert len(set(batch.slots.tolist())) == batch.num_requests
        self.num_forwards += 1
        self.max_rows_seen = max(self.max_rows_seen, batch.num_rows)
        slot_of_row = np.repeat(batch.slots, np.diff(batch.cu_rows))
        for row in range(batch.num_rows):
            block, offset = self._place(batch, slot_of_row[row], batch.positions[row])
            self.kv[block, offset] = batch.token_ids[row]
        logits = np.zeros((batch.logit_rows.size, spec.vocab_size), np.float32)
        for out, row in enumerate(batch.logit_rows):
            index = 0
            for position in range(batch.positions[row] - CONTEXT + 1, batch.positions[row] + 1):
                token = 0
                if position >= 0:
                    block, offset = self._place(batch, slot_of_row[row], position)
                    token = int(self.kv[block, offset])
                    assert token >= 0, "read a position whose KV was never written"
                index = index * spec.vocab_size + token
            logits[out] = self.table[index]
        return logits

    def run_segment(self, batch, segment):
        return self.forward(batch)

    def draft(self, batch, sampling, num_tokens, num_drafts, num_new_drafts, max_draft_len, stop=None):
        from faser_trtllm.core.batch import RaggedBatch

        logits = self.forward(batch)
        n = batch.num_requests
        drafted = np.zeros(n, np.int32)
        active = [i for i in range(n) if num_new_drafts[i] > 0]
        assert len(active) == batch.logit_rows.size
        known = {i: int(num_tokens[i] + num_drafts[i]) for i in active}
        while active:
            slots = batch.slots[active]
            lengths = np.array([known[i] for i in active], np.int32)
            tokens = sample.sample_draft(sampling, slots, logits, self.spec.vocab_size, lengths, max_draft_len)
            going = []
            for i, token in zip(active, tokens, strict=True):
                if token < 0:
                    continue
                drafted[i] += 1
                known[i] += 1
                if drafted[i] < num_new_drafts[i]:
                    going.append((i, token))
            active = [i for i, _ in going]
            if not active:
                break
            m = len(active)
            step = RaggedBatch(
                batch.slots[active],
                np.arange(m + 1, dtype=np.int32),
                np.array([token for _, token in going], np.int32),
                np.array([known[i] - 1 for i in active], np.int32),
                np.arange(m, dtype=np.int32),
                batch.block_table,
            )
            logits = self.forward(step)
        return drafted

    def compact_rows(self, rows):
        raise AssertionError("nothing prunes rows yet")

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _place(self, batch, slot, position):
        block = int(batch.block_table[slot, position // self.spec.tokens_per_block])
        assert 0 <= block < self.spec.num_blocks
        return block, int(position % self.spec.tokens_per_block)
