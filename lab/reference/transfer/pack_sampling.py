"""References of ops/transfer/pack_sampling.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    SAMPLING_DTYPE,
    Int32Array,
    SamplingArray,
    int8_at,
    int32_at,
)
from faser_trtllm.ops.transfer.pack_sampling import (
    ENTRY_INTS,
    DraftProbsAddress,
    has_edits,
    needs_history,
)

_ADDRESSES = (
    "tokens",
    "draft_probs",
    "draft_margins",
    "draft_candidates",
    "draft_sources",
    "end_ids",
    "bias_ids",
    "bias_values",
    "bad_words",
    "cu_bad_words",
    "masks",
    "fill_masks",
    "draft_runners_up",
)


def pack_sampling_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    base: int,
    vocab_size: int,
    *,
    num_rows: Int32Array | None = None,
    branch_tokens: Sequence[int] = (),
    draft_probs: DraftProbsAddress | None = None,
) -> tuple[Int32Array, bool]:
    """Do what SamplingPacker.pack() does, in plain loops; return the block, and whether there are edits."""
    entries = sampling[slots]
    takes_part = np.ones(slots.size, bool) if num_rows is None else num_rows > 0
    is_edited = bool((has_edits(entries, num_tokens) & takes_part).any())
    entries[~takes_part] = np.zeros((), SAMPLING_DTYPE)
    for name in _ADDRESSES:
        entries[name] = 0
    pieces: list[Int32Array] = []

    def add(piece: npt.NDArray[Any]) -> int:
        at = base + 4 * (entries.size * ENTRY_INTS + sum(each.size for each in pieces))
        pieces.append(piece.view(np.int32))
        return at

    for i, slot in enumerate(slots.tolist()):
        own, entry = sampling[slot], entries[i]
        if not takes_part[i]:
            entry["tokens"] = base
            continue
        known, pending = int(num_tokens[i]), int(num_drafts[i])
        first = 0 if needs_history(own) else known
        tokens = int32_at(int(own["tokens"]), known + pending)[first:].copy()
        branch = i - (slots.size - len(branch_tokens))
        if branch >= 0 and first < known:
            tokens[known - 1 - first] = branch_tokens[branch]
        entry["tokens"] = add(tokens) - 4 * first
        if known - int(own["prompt_len"]) < own["min_tokens"]:
            if own["num_end_ids"]:
                entry["end_ids"] = add(int32_at(int(own["end_ids"]), int(own["num_end_ids"])))
        else:
            entry["num_end_ids"] = 0
        for name in ("bias_ids", "bias_values"):
            if own["num_bias"]:
                entry[name] = add(int32_at(int(own[name]), int(own["num_bias"])))
        if own["num_bad_words"]:
            ends = int32_at(int(own["cu_bad_words"]), int(own["num_bad_words"]) + 1)
            entry["cu_bad_words"] = add(ends)
            entry["bad_words"] = add(int32_at(int(own["bad_words"]), int(ends[-1])))
        if num_rows is not None:
            sources = int8_at(int(own["draft_sources"]), known + pending)[known:]
            if sources.any():
                padded = np.zeros(-(-pending // 4) * 4, np.int8)
                padded[:pending] = sources
                entry["draft_sources"] = add(padded) - known
            if own["masks"]:
                rows, num_kept, num_words = int(num_rows[i]), int(own["num_mask_rows"]), -(-vocab_size // 32)
                kept = int32_at(int(own["masks"]), num_kept * num_words).reshape(num_kept, num_words)
                # The mask of position p is at p % rows.
                positions = known + (np.arange(rows) - known) % rows
                entry["masks"], entry["num_mask_rows"] = add(kept[positions % num_kept].reshape(-1)), rows
                is_edited = True
        if draft_probs is not None and own["mode"] == native.SAMPLED:
            entry["draft_probs"] = draft_probs.address + slot * draft_probs.slot_bytes
    return np.concatenate([entries.view(np.int32), *pieces]), is_edited
