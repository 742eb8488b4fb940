"""An engine whose model is a table: the next token depends on the last three tokens, read back from KV memory.

It stores token ids where a real engine stores keys and values, so a wrong block, a stale row or a shared block written
twice changes the logits and fails the exactness tests.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.ops.arrays import int32_at
from faser_trtllm.ops.prune_rows import HostPruning
from lab.reference import draft_stop, sample

CONTEXT = 3


def make_table(vocab_size: int, seed: int, sharpness: float = 2.0) -> np.ndarray:
    """Logits [vocab_size ** CONTEXT, vocab_size] fp32."""
    rng = np.random.default_rng(seed)
    return (sharpness * rng.standard_normal((vocab_size**CONTEXT, vocab_size))).astype(np.float32)


def blend(target: np.ndarray, seed: int, noise: float) -> np.ndarray:
    """A draft's table: the target's with noise, so that some drafts are accepted and some are not."""
    rng = np.random.default_rng(seed)
    return (target + noise * rng.standard_normal(target.shape)).astype(np.float32)


def foreign(table: np.ndarray, missing: int = 1, fed: int = 0) -> np.ndarray:
    """A draft's table if it lacks one token: it never says it, and reads another one in its stead."""
    vocab_size = table.shape[1]
    contexts = np.indices((vocab_size,) * CONTEXT)
    contexts[contexts == missing] = fed
    found = table[np.ravel_multi_index(tuple(contexts), (vocab_size,) * CONTEXT).ravel()]
    found[:, missing] = -np.inf
    return found


def context_row(tokens, position: int, vocab_size: int) -> int:
    row = 0
    for p in range(position - CONTEXT + 1, position + 1):
        row = row * vocab_size + (int(tokens[p]) if p >= 0 else 0)
    return row


class ToyEngine(HostPruning):
    """Two segments: the first remembers the tokens, the second remembers them again and gives logits, so that rows that
    are dropped between the two leave a hole that a later pass must fill. With num_experts, tokens name the experts of
    their rows, which are counted and change nothing else."""

    TOP_K = 2  # experts of a row
    distinct_experts = 0.0  # of the last pass

    def __init__(
        self,
        table,
        *,
        num_blocks,
        tokens_per_block,
        max_batch_size,
        max_num_tokens=64,
        max_seq_len=64,
        segmented=False,
        max_num_branches=0,
        max_logit_rows=None,
        longest=None,
        num_experts=0,
    ):
        """longest: positions that it knows, fewer than max_seq_len for a draft model with a window."""
        vocab_size = table.shape[1]
        segments = (0, 1, 2) if segmented else (0, 2)
        self.spec = EngineSpec(
            vocab_size,
            max_seq_len,
            2,
            num_blocks,
            tokens_per_block,
            max_num_tokens,
            max_batch_size,
            segments,
            max_num_branches,
            max_logit_rows,
            num_experts=num_experts,
            top_k=self.TOP_K if num_experts else 0,
        )
        self._num_distinct = [0, 0]  # by segment
        self._longest = longest or max_seq_len
        self.table = table
        self.kv = np.full((2, num_blocks + max_num_branches, tokens_per_block), -1, np.int64)
        self.num_forwards = 0
        self._hidden = []  # (slot, position) of the rows between the segments
        self._block_table = None

    def forward(self, batch):
        self._write(0, batch)
        self._write(1, batch)
        return self._logits(batch)

    def run_segment(self, batch, segment):
        if segment:
            assert self._hidden == self._rows(batch), "the batch does not match the rows that are left"
        self._write(segment, batch)
        self._hidden, self._block_table = self._rows(batch), batch.block_table
        return self._logits(batch) if segment == 1 else None

    def early_exit(self, rows, candidates):
        """The first segment's opinion: right more often than not."""
        scores = np.full(candidates.shape, -np.inf, np.float32)
        for i, (row, ids) in enumerate(zip(rows, candidates, strict=True)):
            index = self._context(0, *self._hidden[row])
            noise = np.random.default_rng(index).standard_normal(self.spec.vocab_size)
            known = ids >= 0
            scores[i, known] = (self.table[index] + noise)[ids[known]]
        return scores

    def compact_rows(self, rows):
        assert (np.diff(rows) > 0).all()
        self._hidden = [self._hidden[row] for row in rows]

    def _rows(self, batch):
        slots = np.repeat(batch.slots, np.diff(batch.cu_rows))
        return list(zip(slots.tolist(), batch.positions.tolist(), strict=True))

    def _write(self, segment, batch):
        spec = self.spec
        assert 0 < batch.num_rows <= spec.max_num_tokens
        assert batch.positions.max() < self._longest
        parents = () if batch.branch_parents is None else batch.branch_parents.tolist()
        assert batch.num_requests - len(parents) <= spec.max_batch_size
        assert len(parents) <= spec.max_num_branches
        assert len(set(batch.slots.tolist())) == batch.num_requests
        self.num_forwards += segment
        self._block_table = batch.block_table
        self._count_experts(segment, batch.token_ids)
        for token, (slot, position) in zip(batch.token_ids, self._rows(batch), strict=True):
            self.kv[(segment, *self._place(slot, position))] = token
        for branch, parent in enumerate(parents, batch.num_requests - len(parents)):
            self._write_chain(segment, batch, branch, parent)

    def _count_experts(self, segment, tokens):
        if number := self.spec.num_experts:
            taken = {(k * number // self.TOP_K + segment + int(t)) % number for t in tokens for k in range(self.TOP_K)}
            self._num_distinct[segment] = len(taken)
            self.distinct_experts = sum(self._num_distinct[: segment + 1]) / (segment + 1)

    def _write_chain(self, segment, batch, branch, parent):
        """The rows of a branch's request before its place, in its own block."""
        (row,) = range(*batch.cu_rows[branch : branch + 2])
        place, size = int(batch.positions[row]), self.spec.tokens_per_block
        block, _ = self._place(batch.slots[branch], place)
        assert block >= self.spec.num_blocks, "a branch's row is in a block of its own"
        for other in range(*batch.cu_rows[parent : parent + 2]):
            position = int(batch.positions[other])
            if place // size * size <= position < place:
                self.kv[segment, block, position % size] = batch.token_ids[other]

    def copy_kv(self, copies):
        for source, target, first, end in copies.T.tolist():
            assert 0 <= first < end <= self.spec.tokens_per_block
            self.kv[:, target, first:end] = self.kv[:, source, first:end]

    def _logits(self, batch):
        rows = self._rows(batch)
        num_branches = 0 if batch.branch_parents is None else batch.branch_parents.size
        assert batch.logit_rows.size - num_branches <= (self.spec.max_logit_rows or self.spec.max_num_tokens)
        logits = np.zeros((batch.logit_rows.size, self.spec.vocab_size), np.float32)
        for out, row in enumerate(batch.logit_rows):
            logits[out] = self.table[self._context(1, *rows[row])]
        return logits

    def _context(self, segment, slot, position):
        index = 0
        for p in range(position - CONTEXT + 1, position + 1):
            token = 0
            if p >= 0:
                token = int(self.kv[(segment, *self._place(slot, p))])
                assert token >= 0, "read a position whose KV was never written"
            index = index * self.spec.vocab_size + token
        return index

    def _place(self, slot, position):
        block = int(self._block_table[slot, position // self.spec.tokens_per_block])
        assert 0 <= block < self.kv.shape[1]
        return block, int(position % self.spec.tokens_per_block)

    def draft(self, draft_batch):
        from faser_trtllm.core.batch import RaggedBatch

        batch, sampling, stop = draft_batch.batch, draft_batch.sampling, draft_batch.stop
        num_tokens, num_drafts = draft_batch.num_tokens, draft_batch.num_drafts
        num_new_drafts, max_draft_len = draft_batch.num_new_drafts, draft_batch.max_draft_len
        logits = self._catch_up(draft_batch)
        n = batch.num_requests
        drafted = np.zeros(n, np.int32)
        active = [i for i in range(n) if num_new_drafts[i] > 0]
        assert len(active) == batch.logit_rows.size == len(logits)
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
            if stop is not None and going:
                pending = [
                    (sampling[batch.slots[i]], int(num_tokens[i]), known[i] - int(num_tokens[i])) for i, _ in going
                ]
                margins = [draft_stop.pending_margins(*each) for each in pending]
                sources = [draft_stop.pending_sources(*each) for each in pending]
                modes = [int(entry["mode"]) for entry, _, _ in pending]
                goes_on = draft_stop.goes_on(stop, modes, margins, sources)
                going = [item for item, on in zip(going, goes_on, strict=True) if on]
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
            logits = self._step(step)
        return drafted

    def _step(self, batch):
        """Logits behind the drafts of the last step."""
        return self.forward(batch)

    def _catch_up(self, draft_batch):
        """The batch's rows -> logits behind the last known token of each request that drafts."""
        return self.forward(draft_batch.batch)

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class ToyHead(ToyEngine):
    """A draft head: a row of a committed token finds the target's row of the position before, of the same text, or the
    test fails. Rows of pending drafts go on from its own, and must be run again once those drafts are committed."""

    def __init__(self, table, target, **sizes):
        super().__init__(table, **sizes)
        self.spec = dataclasses.replace(self.spec, is_head=True)
        self._target = target
        self._is_own = np.ones(self.kv.shape[1:], bool)  # rows that were not made from the target's

    def _write(self, segment, batch):
        super()._write(segment, batch)
        for row in self._rows(batch):
            self._is_own[self._place(*row)] = True

    def _catch_up(self, draft_batch):
        batch = draft_batch.batch
        self.forward(batch)
        for slot, position in self._rows(batch):
            self._is_own[self._place(slot, position)] = False
            if position:
                place = self._place(slot, position - 1)
                token = self._target.kv[(1, *place)]
                assert token == self.kv[(1, *place)] >= 0, "the target has not run the position before in this text"
        logits = []
        for i, slot in enumerate(batch.slots):
            first, num_drafts = int(draft_batch.num_tokens[i]), int(draft_batch.num_drafts[i])
            if not draft_batch.num_new_drafts[i]:
                continue
            assert batch.positions[batch.cu_rows[i + 1] - 1] == first - 1 > 0
            stale = [position for position in range(first) if self._is_own[self._place(slot, position)]]
            assert not stale, "a committed token's row is not of the target's"
            tokens = int32_at(int(draft_batch.sampling[slot]["tokens"]), first + num_drafts)
            for position in range(first, first + num_drafts):
                self.kv[(1, *self._place(slot, position))] = tokens[position]
                self._is_own[self._place(slot, position)] = True
            logits.append(self.table[self._context(1, slot, first + num_drafts - 1)])
        return np.array(logits, np.float32).reshape(len(logits), self.spec.vocab_size)


def laws_by_place(table, num_places):
    """Logits, as `table` has them, of the first, second, ... token after a context, whatever comes between."""
    contexts, vocab_size = table.shape
    following = np.arange(contexts)[:, None] % (contexts // vocab_size) * vocab_size + np.arange(vocab_size)
    probs = np.exp(table - table.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    laws = [probs]
    while len(laws) < num_places:
        laws.append(np.einsum("ct,ctv->cv", probs, laws[-1][following]))
    return [np.log(law).astype(np.float32) for law in laws]


class ToyMedusa(ToyEngine):
    """Medusa heads, fewer than there may be drafts: what a head says hangs on the target's row of the position before
    the last committed token, which must be there, and on the draft's place. No KV."""

    NUM_HEADS = 3

    def __init__(self, table, target, **sizes):
        super().__init__(table, **sizes)
        self.spec = dataclasses.replace(self.spec, is_head=True)
        self._target = target
        self._last = {}  # by slot: context of the target's row, place of the newest draft
        self._heads = [*laws_by_place(table, 1 + self.NUM_HEADS)[1:], np.full_like(table, -np.inf)]

    def _catch_up(self, draft_batch):
        batch = draft_batch.batch
        self._block_table = batch.block_table
        logits = []
        for i, slot in enumerate(batch.slots.tolist()):
            first, num_drafts = int(draft_batch.num_tokens[i]), int(draft_batch.num_drafts[i])
            if not draft_batch.num_new_drafts[i]:
                continue
            assert batch.positions[batch.cu_rows[i + 1] - 1] == first - 1 > 0
            tokens = int32_at(int(draft_batch.sampling[slot]["tokens"]), first - 1)
            for position in range(max(0, first - 1 - CONTEXT), first - 1):
                kept = self._target.kv[(1, *self._place(slot, position))]
                assert kept == tokens[position], "the target has not run the position before in this text"
            context = context_row(tokens, first - 2, self.spec.vocab_size)
            self._last[slot] = (context, num_drafts)
            logits.append(self._law(slot))
        return np.array(logits, np.float32).reshape(len(logits), self.spec.vocab_size)

    def _step(self, batch):
        for slot in batch.slots.tolist():
            context, place = self._last[slot]
            self._last[slot] = (context, place + 1)
        return np.array([self._law(slot) for slot in batch.slots.tolist()], np.float32)

    def _law(self, slot):
        context, place = self._last[slot]
        return self._heads[min(place, self.NUM_HEADS)][context]


class ToyBlock(ToyEngine):
    """A block drafter of a product law: it drafts where nothing is pending, from the target's rows of all tokens before
    the last committed one, which must be of the same text, or the test fails."""

    NUM_PLACES = 3

    def __init__(self, table, target, **sizes):
        super().__init__(table, **sizes)
        self.spec = dataclasses.replace(self.spec, block_size=self.NUM_PLACES + 1)
        self._target = target
        self._last = {}  # by slot: context of the block, place of the newest draft
        self._laws = [*laws_by_place(table, self.NUM_PLACES), np.full_like(table, -np.inf)]

    def _catch_up(self, draft_batch):
        batch = draft_batch.batch
        self._block_table = batch.block_table
        logits = []
        for i, slot in enumerate(batch.slots.tolist()):
            is_drafting = draft_batch.num_new_drafts[i] > 0
            begin, end = batch.cu_rows[i], batch.cu_rows[i + 1] - is_drafting
            for position, token in zip(batch.positions[begin:end], batch.token_ids[begin:end], strict=True):
                place = (1, *self._place(slot, position))
                assert self._target.kv[place] == token, "the target has not run this position in this text"
                self.kv[place] = token
            if is_drafting:
                assert draft_batch.num_drafts[i] == 0, "a block cannot be extended"
                last = int(draft_batch.num_tokens[i]) - 1
                assert batch.positions[end] == last
                tokens = int32_at(int(draft_batch.sampling[slot]["tokens"]), last + 1)
                kept = [int(self.kv[(1, *self._place(slot, position))]) for position in range(last)]
                assert kept == tokens[:last].tolist(), "a context row is missing, or of another text"
                self._last[slot] = (context_row(tokens, last, self.spec.vocab_size), 0)
                logits.append(self._law(slot))
        return np.array(logits, np.float32).reshape(len(logits), self.spec.vocab_size)

    def _step(self, batch):
        for slot in batch.slots.tolist():
            context, place = self._last[slot]
            self._last[slot] = (context, place + 1)
        return np.array([self._law(slot) for slot in batch.slots.tolist()], np.float32)

    def _law(self, slot):
        context, place = self._last[slot]
        return self._laws[min(place, self.NUM_PLACES)][context]
