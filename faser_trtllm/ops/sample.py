"""Draw draft tokens."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    logits_layout,
    sampling_address,
)

MAX_STORED_MARGIN = 1e4  # logits; limit on Request.draft_margins


def sample_draft(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    num_known: Int32Array,
    max_draft_len: int,
    *,
    pool: int | None = None,
) -> Int32Array:
    """Draw one draft token per request from logits [num_requests, >= vocab_size]; return token ids [num_requests].

    slots, num_known [num_requests] int32. The token, -1 if the row has no valid distribution, is written after the
    num_known[i] known tokens of the slot. In sampled mode, its q is kept in draft_probs. If the slot has memory for
    them, the draft's margin and candidates are kept at its position (see core/request.py). pool: a faser_pool handle.
    """
    address, stride = logits_layout(logits, vocab_size)
    if not slots.size == num_known.size == logits.shape[0]:
        raise ValueError(f"{slots.size} slots, {num_known.size} num_known, {logits.shape[0]} rows of logits")
    tokens = np.empty(slots.size, np.int32)
    status = native.library().faser_sample_draft(
        pool,
        slots.size,
        address_of(slots, np.int32),
        sampling_address(sampling),
        address,
        stride,
        vocab_size,
        address_of(num_known, np.int32),
        max_draft_len,
        address_of(tokens, np.int32),
    )
    native.check(status, "drawing draft tokens")
    return tokens
