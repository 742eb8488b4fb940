"""Calls of a draft engine: their requests, what was drafted, and the same by the host."""

from __future__ import annotations

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.sampling.table import SamplingTable
from lab.reference.draft_loop import draft_loop
from tests.engine.cuda.harness import MAX_BATCH_SIZE, random_tokens
from tests.support.engine_harness import Harness


class Drafting:
    """Requests that draft: some greedy, some seeded, one unseeded if asked; their memory is the host's.

    num_certain: drafts of the text that are pending, by request.
    """

    def __init__(
        self, engine, num_requests: int, sampled: tuple[int, ...] = (), num_certain: tuple[int, ...] = (), **params
    ) -> None:
        self.engine, self.max_draft_len = engine, 4
        self.num_drafts = np.array(num_certain or (0,) * num_requests, np.int32)
        self.table = SamplingTable(MAX_BATCH_SIZE, 320, self.max_draft_len, new_key=lambda: 99)
        self.requests = []
        for slot in range(num_requests):
            seed = None if slot % 2 == 0 or slot in sampled else 7 + slot
            temperature = 0.0 if seed is None and slot not in sampled else 0.8
            request = Request(
                str(slot),
                random_tokens(5 + 3 * slot, slot).tolist(),
                SamplingParams(max_tokens=50, seed=seed, temperature=temperature, **params),
                max_seq_len=256,
                max_draft_len=self.max_draft_len,
                arrival_s=0.0,
                keep_candidates=True,
                keep_runners_up=True,
            )
            known, certain = request.num_tokens, slice(request.num_tokens, request.num_tokens + self.num_drafts[slot])
            request.tokens[certain] = random_tokens(int(self.num_drafts[slot]), known)
            request.draft_margins[certain] = 0.5 * slot - 1.0
            request.draft_sources[known:] = native.BY_SUFFIX  # behind them stand earlier ones, which were dropped
            self.table.bind(slot, request)
            self.requests.append(request)
        harness = Harness(engine)
        rows = [
            (slot, request.tokens, 0, request.num_tokens + drafts)
            for slot, (request, drafts) in enumerate(zip(self.requests, self.num_drafts.tolist(), strict=True))
        ]
        self.batch = harness.batch(rows)

    def run(self, wanted: list[int], by_host: bool = False, stop: DraftStop | None = None):
        num_tokens = np.array([request.num_tokens for request in self.requests], np.int32)
        counts = (num_tokens, self.num_drafts, np.array(wanted, np.int32))
        draft_batch = DraftBatch(self.batch, self.table.array, *counts, self.max_draft_len, stop)
        if by_host:
            drafted = draft_loop(lambda batch: self.engine.forward(batch)[:], 320, draft_batch)
        else:
            drafted = self.engine.draft(draft_batch)
        found = []
        for request, n, count in zip(self.requests, num_tokens + self.num_drafts, drafted, strict=True):
            drafts = slice(n, n + count)
            assert (request.draft_sources[request.num_tokens : n] == native.BY_SUFFIX).all()
            assert (request.draft_sources[drafts] == native.BY_MODEL).all()
            kept = (request.tokens, request.draft_margins, request.draft_candidates, request.draft_runners_up)
            found.append(tuple(array[drafts].tolist() for array in kept))
        return drafted.tolist(), found


def assert_same_drafts(found, by_host) -> None:
    """Counts, tokens, candidates, runners-up and greedy margins to the bit; seeded margins (odd slots) up to the last
    bits of two libraries' logarithms."""
    assert found[0] == by_host[0]
    for slot, (mine, wanted) in enumerate(zip(found[1], by_host[1], strict=True)):
        assert (mine[0], *mine[2:]) == (wanted[0], *wanted[2:])
        assert mine[1] == (pytest.approx(wanted[1], rel=1e-5) if slot % 2 else wanted[1])
