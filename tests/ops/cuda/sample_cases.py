"""Draft calls for the sample kernels."""

from __future__ import annotations

import numpy as np
import torch

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import sample as op
from faser_trtllm.ops.cuda.accept import PART_ENTRIES, workspace_bytes
from lab.reference.cuda.sample import advance_reference, sample_reference
from tests.ops.cuda.accept_batches import MODES
from tests.support.sampling_slots import Slots

MAX_REQUESTS = 7
WIDTH = 5
FIELDS = [
    {"mode": MODES[i % 3], "key": i, "temperature": 0.7, "top_k": (0, 40)[i % 2], "top_p": (1.0, 0.8)[i // 3 % 2]}
    for i in range(MAX_REQUESTS)
]


class SampleCase:
    """A draft call of some requests: entries with a history each, what the steps write, and a rule that ends it."""

    def __init__(
        self,
        fields,
        vocab_size: int,
        max_draft_len: int,
        seed: int,
        max_requests: int = MAX_REQUESTS,
        part_entries: int = PART_ENTRIES,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n, self.vocab_size, self.max_draft_len = len(fields), vocab_size, max_draft_len
        self.part_entries = part_entries
        self.slots = Slots(max_requests, vocab_size, max_draft_len)
        known = rng.integers(1, 9, max_requests)
        for slot, each in enumerate(fields):
            tokens = rng.integers(0, vocab_size, known[slot])
            counter = rng.integers(0, 2**40)
            self.slots.set(slot, tokens=tokens, prompt_len=1, draft_counter=counter, **each)
        entries = self.slots.array.view(np.uint8).reshape(-1, SAMPLING_DTYPE.itemsize)
        shape = (max_draft_len, max_requests)
        self.draws = op.Draws(
            torch.from_numpy(entries),
            torch.from_numpy(known.astype(np.int32)),
            torch.from_numpy(rng.integers(0, max_draft_len + 1, max_requests).astype(np.int32)),
            torch.from_numpy(rng.permutation(max_requests).astype(np.int32)),
            torch.full((max_requests,), 77, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.full(shape, 77, dtype=torch.int32),
            torch.full(shape, 77.0),
            torch.full((*shape, NUM_CANDIDATES), 77, dtype=torch.int32),
            torch.full((max_requests, max_draft_len, vocab_size), 77.0),
            torch.full(shape, 77, dtype=torch.int32),
            torch.zeros(workspace_bytes(max_requests, vocab_size, part_entries), dtype=torch.uint8),
        )
        tables = torch.from_numpy(rng.standard_normal((4, 3, WIDTH)).astype(np.float32))
        tables[2:] = tables[2:].abs()
        self.stop = op.StopTables(
            torch.from_numpy(self.slots.array["mode"].astype(np.int32)),
            tables,
            torch.from_numpy(rng.uniform(0, 0.1, WIDTH).astype(np.float32)),
            torch.from_numpy((rng.uniform(0, 0.6) * np.arange(max_requests + 1)).astype(np.float32)),
            torch.from_numpy(rng.integers(0, 3, max_requests).astype(np.int32)),
            torch.ones(max_requests, dtype=torch.float64),
            torch.full((1,), 77, dtype=torch.int32),
        )
        logits = rng.standard_normal((max_draft_len, max_requests, vocab_size)).astype(np.float32) * 2
        logits = np.round(logits) if seed % 2 else logits  # ties
        logits[rng.random(logits.shape) < 0.05] = -np.inf
        logits[rng.random(logits.shape[:2]) < 0.05, 0] = np.nan
        logits[rng.random(logits.shape[:2]) < 0.05] = -np.inf
        self.logits = torch.from_numpy(logits)

    def run(self, launcher) -> SampleCase:
        """All steps; launcher None: by the references."""
        for step in range(self.max_draft_len):
            logits = self.logits[step]
            scratch = torch.full((len(self.logits[0]), self.vocab_size), 55.0)
            if launcher is None:
                sample_reference(self.draws, logits, self.n, scratch)
                advance_reference(self.draws, self.stop, self.n, has_history=True)
            else:
                op.sample(launcher, self.draws, logits, self.n, scratch, part_entries=self.part_entries)
                op.advance(launcher, self.draws, self.stop, self.n, has_history=True)
        return self


def assert_same(found: SampleCase, wanted: SampleCase) -> None:
    """Seeded margins and survival up to the last bits of two logarithms, all else to the bit."""
    for name in ("known", "remaining", "newest", "step", "tokens", "candidates", "probs", "runners_up"):
        assert torch.equal(getattr(found.draws, name), getattr(wanted.draws, name)), name
    np.testing.assert_array_equal(found.slots.tokens, wanted.slots.tokens)
    torch.testing.assert_close(found.draws.margins, wanted.draws.margins, rtol=1e-5, atol=1e-9)
    is_seeded = wanted.stop.modes == native.SEEDED
    assert torch.equal(found.draws.margins[:, ~is_seeded], wanted.draws.margins[:, ~is_seeded])
    for name in ("pending", "num_going"):
        assert torch.equal(getattr(found.stop, name), getattr(wanted.stop, name)), name
    torch.testing.assert_close(found.stop.survival, wanted.stop.survival, rtol=1e-5, atol=1e-12)
