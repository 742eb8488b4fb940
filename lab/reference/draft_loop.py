"""The draft loop in Python, for engines with a single-call forward pass and logits on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import DraftBatch
from faser_trtllm.errors import InvalidArgumentError
from lab.reference import draft_stop, sample

Int32Array = npt.NDArray[np.int32]


def draft_loop(
    forward: Callable[[RaggedBatch], npt.NDArray[np.float32]], vocab_size: int, draft_batch: DraftBatch
) -> Int32Array:
    """Do what Engine.draft() does (engine/base.py), with one Engine.forward() per draft step."""
    batch, sampling, stop = draft_batch.batch, draft_batch.sampling, draft_batch.stop
    num_tokens, num_drafts = draft_batch.num_tokens, draft_batch.num_drafts
    num_new_drafts, max_draft_len = draft_batch.num_new_drafts, draft_batch.max_draft_len
    num_requests = batch.num_requests
    num_drafted = np.zeros(num_requests, np.int32)
    known = (num_tokens + num_drafts)[:num_requests].astype(np.int32)
    active = np.flatnonzero(num_new_drafts[:num_requests] > 0)
    last_rows = (batch.cu_rows[1:] - 1)[active].astype(np.int32)
    if (batch.positions[last_rows] != known[active] - 1).any():
        raise InvalidArgumentError("a request that drafts must run the row of its last known token")
    if (num_drafts[active] + num_new_drafts[active] > max_draft_len).any():
        raise InvalidArgumentError(f"a request may have at most {max_draft_len} pending drafts")
    step = RaggedBatch(batch.slots, batch.cu_rows, batch.token_ids, batch.positions, last_rows, batch.block_table)
    while True:
        logits = forward(step)
        if not active.size:
            return num_drafted
        slots = batch.slots[active]
        tokens = sample.sample_draft(sampling, slots, logits, vocab_size, known[active], max_draft_len)
        drawn = tokens >= 0
        num_drafted[active[drawn]] += 1
        goes_on = drawn & (num_drafted[active] < num_new_drafts[active])
        active, tokens = active[goes_on], tokens[goes_on]
        if stop is not None and active.size:
            pending = [
                (sampling[batch.slots[i]], int(num_tokens[i]), int(num_drafts[i] + num_drafted[i])) for i in active
            ]
            margins = [draft_stop.pending_margins(*each) for each in pending]
            sources = [draft_stop.pending_sources(*each) for each in pending]
            modes = sampling["mode"][batch.slots[active]].tolist()
            kept = np.array(draft_stop.goes_on(stop, modes, margins, sources), bool)
            active, tokens = active[kept], tokens[kept]
        if not active.size:
            return num_drafted
        iota = np.arange(active.size + 1, dtype=np.int32)
        step = RaggedBatch(batch.slots[active], iota, tokens, known[active], iota[:-1], batch.block_table)
        known[active] += 1
