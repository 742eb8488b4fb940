"""Drawing one draft token per request: the native function and its reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    float32_at,
    int8_at,
    int32_at,
    logits_layout,
    sampling_address,
)
from faser_trtllm.ops.philox import Stream
from faser_trtllm.ops.probs import RowStatus, edited_logits
from lab.reference.draw import draw_token, gumbel_lead, gumbel_max_token, gumbel_runner_up
from lab.reference.philox import uniform
from lab.reference.probs import next_token_probs_reference

Uniform = Callable[[int, int, Stream], float]
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


def sample_draft_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    num_known: Int32Array,
    max_draft_len: int,
    *,
    uniform: Uniform = uniform,
) -> Int32Array:
    """Do what sample_draft() does, in numpy; `uniform` can be replaced to enumerate the randomness."""
    tokens = np.full(slots.size, -1, np.int32)
    for i, (slot, known) in enumerate(zip(slots.tolist(), num_known.tolist(), strict=True)):
        entry = sampling[slot]
        q = np.empty(vocab_size, np.float32)
        if next_token_probs_reference(sampling, slot, logits[i, :vocab_size], known, q) is not RowStatus.OK:
            continue
        if entry["mode"] == native.GREEDY:
            tokens[i] = np.argmax(q)
        elif entry["mode"] == native.SEEDED:
            tokens[i] = gumbel_max_token(q, int(entry["key"]), known)
        else:
            draft_probs_row(entry, known, vocab_size, max_draft_len)[:] = q
            tokens[i] = draw_token(q, uniform(int(entry["key"]), int(entry["draft_counter"]), Stream.DRAFT))
            entry["draft_counter"] += np.uint64(1)
        int32_at(int(entry["tokens"]), known + 1)[known] = tokens[i]
        if entry["draft_sources"]:
            int8_at(int(entry["draft_sources"]), known + 1)[known] = native.BY_MODEL
        edited = edited_logits(sampling, slot, logits[i, :vocab_size], known)[1]
        if entry["mode"] == native.SEEDED:
            margin = float(entry["temperature"]) * gumbel_lead(q, int(entry["key"]), known)
        else:
            margin = _top_margin(edited)
        _keep_confidence(entry, edited, known, int(tokens[i]), margin)
        runners_up = int32_at(int(entry["draft_runners_up"]), known + 1)
        if runners_up.size:
            is_seeded = entry["mode"] == native.SEEDED
            runners_up[known] = (
                gumbel_runner_up(q, int(entry["key"]), known) if is_seeded else _best_other(edited, int(tokens[i]))
            )
    return tokens


def _top_margin(edited: Float32Array) -> float:
    if edited.size == 1:
        return MAX_STORED_MARGIN
    second, best = np.sort(edited)[-2:]
    with np.errstate(over="ignore"):
        return float(best - second)


def _best_other(edited: Float32Array, token: int) -> int:
    """Return the best token that is not this one, -1 if there is none."""
    order = np.lexsort((np.arange(edited.size), -edited.astype(np.float64)))
    return next((int(v) for v in order if v != token and edited[v] > -np.inf), -1)


def _keep_confidence(entry: np.void, edited: Float32Array, position: int, token: int, margin: float) -> None:
    order = np.lexsort((np.arange(edited.size), -edited.astype(np.float64)))
    margins = float32_at(int(entry["draft_margins"]), position + 1)
    if margins.size:
        margins[position] = min(margin, MAX_STORED_MARGIN)
    candidates = int32_at(int(entry["draft_candidates"]), (position + 1) * NUM_CANDIDATES)
    if candidates.size:
        mine = candidates[position * NUM_CANDIDATES :]
        possible = order[edited[order] > -np.inf][:NUM_CANDIDATES]
        mine[:] = -1
        mine[: possible.size] = possible
        if token not in mine:
            mine[-1] = token


def draft_probs_row(entry: np.void, position: int, vocab_size: int, max_draft_len: int) -> Float32Array:
    """Return the q [vocab_size] that the draft at this position was drawn from, in the slot's own memory."""
    row = position % max_draft_len
    return float32_at(int(entry["draft_probs"]) + row * vocab_size * 4, vocab_size)
