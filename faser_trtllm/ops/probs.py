"""The distribution of the next token: edited logits as probabilities."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    SAMPLING_DTYPE,
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    float32_at,
    int32_at,
    sampling_address,
)

_LARGEST = np.finfo(np.float32).max
_F = np.float32


NO_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The filters of a sampling entry (SAMPLING_DTYPE), with the values that keep every token."""


def has_filters(entry: np.void) -> bool:
    """Return True if tokens may have probability 0 only because others are more probable."""
    return bool(entry["mode"] == native.GREEDY or any(entry[name] != off for name, off in NO_FILTERS.items()))


class RowStatus(enum.IntEnum):
    """The status of a row of logits: OK, or why it gives no distribution."""

    OK = native.ROW_OK
    NAN = native.ROW_NAN  # NaN or +inf in the row
    EMPTY = native.ROW_EMPTY  # every token is banned


def next_token_probs(
    sampling: SamplingArray, slot: int, logits: Float32Array, num_tokens: int, probs: Float32Array
) -> RowStatus:
    """Write the distribution of the token after the slot's first num_tokens tokens to probs [vocab_size].

    logits [vocab_size]. Applies, in order: penalties, bias, bans of bad words and min_tokens, the mask, temperature,
    top_k, top_p, min_p, softmax. In greedy mode, the argmax has probability 1. probs is undefined unless it is OK.
    """
    if logits.size < probs.size:
        raise ValueError(f"logits has {logits.size} entries, probs has {probs.size}")
    status = native.library().faser_next_token_probs(
        sampling_address(sampling) + slot * SAMPLING_DTYPE.itemsize,
        address_of(logits, np.float32),
        probs.size,
        num_tokens,
        address_of(probs, np.float32),
    )
    return RowStatus(status)


def edited_logits(
    sampling: SamplingArray, slot: int, logits: Float32Array, num_tokens: int
) -> tuple[RowStatus, Float32Array]:
    """Return the status and a copy of logits [vocab_size] after penalties, bias, bans and the mask."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return RowStatus.NAN, logits
    entry = sampling[slot]
    history = int32_at(int(entry["tokens"]), num_tokens)
    x = logits.astype(np.float32, copy=True)
    _penalise(entry, history, x)
    bias_ids = int32_at(int(entry["bias_ids"]), int(entry["num_bias"]))
    bias_values = float32_at(int(entry["bias_values"]), int(entry["num_bias"]))
    inside = (bias_ids >= 0) & (bias_ids < x.size)
    bias_ids, bias_values = bias_ids[inside], bias_values[inside]
    with np.errstate(over="ignore"):
        while bias_ids.size:  # repeats only for tokens that occur more than once
            tokens, first = np.unique(bias_ids, return_index=True)
            x[tokens] = _clamp(x[tokens], x[tokens] + bias_values[first])
            bias_ids, bias_values = np.delete(bias_ids, first), np.delete(bias_values, first)
    _ban_bad_words(entry, history, x)
    if num_tokens - entry["prompt_len"] < entry["min_tokens"]:
        end_ids = int32_at(int(entry["end_ids"]), int(entry["num_end_ids"]))
        x[end_ids[(end_ids >= 0) & (end_ids < x.size)]] = -np.inf
    if entry["masks"]:
        x[~_allowed(entry, num_tokens, x.size)] = -np.inf
    return (RowStatus.EMPTY if np.isneginf(x).all() else RowStatus.OK), x


def _allowed(entry: np.void, position: int, vocab_size: int) -> npt.NDArray[np.bool_]:
    num_words = -(-vocab_size // 32)
    row = position % int(entry["num_mask_rows"])
    words = int32_at(int(entry["masks"]) + 4 * row * num_words, num_words)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def _penalise(entry: np.void, history: Int32Array, x: Float32Array) -> None:
    repetition, presence, frequency = (_F(entry[f"{name}_penalty"]) for name in ("repetition", "presence", "frequency"))
    if repetition == 1 and presence == 0 and frequency == 0:
        return
    tokens, counts = np.unique(history[(history >= 0) & (history < x.size)], return_counts=True)
    before = x[tokens]
    with np.errstate(over="ignore"):
        after = np.where(before > 0, before / repetition, before * repetition)
        after = after - presence
        after = after - frequency * counts.astype(np.float32)
    x[tokens] = _clamp(before, after)


def _clamp(before: Float32Array, after: Float32Array) -> Float32Array:
    """Return `after`, kept finite where `before` is finite; a logit of -inf stays -inf."""
    return np.where(np.isneginf(before), before, np.clip(after, -_LARGEST, _LARGEST))


def _ban_bad_words(entry: np.void, history: Int32Array, x: Float32Array) -> None:
    num_words = int(entry["num_bad_words"])
    cu = int32_at(int(entry["cu_bad_words"]), num_words + 1 if num_words else 0)
    ids = int32_at(int(entry["bad_words"]), int(cu[-1]) if num_words else 0)
    if not num_words:
        return
    before_last = ids[cu[1:] - 2] if ids.size > 1 else ids
    may_fit = (np.diff(cu) == 1) | (before_last == (history[-1] if history.size else -1))
    for begin, end in np.stack([cu[:-1], cu[1:]], axis=1)[may_fit].tolist():
        *prefix, last = ids[begin:end].tolist()
        fits = len(prefix) <= history.size
        if fits and 0 <= last < x.size and history[history.size - len(prefix) :].tolist() == prefix:
            x[last] = -np.inf
