"""How likely a pending draft is accepted, by its margin; shared by the ops that rank drafts and that count tests."""

from __future__ import annotations

import ctypes

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Float64Array,
    Int8Array,
    SamplingArray,
    address_of,
    float32_at,
    int8_at,
)
from faser_trtllm.ops.draft_stop import sigmoid

MAX_LOG_ODDS = 13.8  # a millionth: less certain than any estimate, and finite
MAX_MARGIN = 20.0  # logits; more says nothing more, and keeps a fit in range


class AcceptanceModel:
    """sigmoid(slope[s, j] * min(margin, MAX_MARGIN) + intercept[s, j]) at place j of sampling mode s.

    slope, intercept [NUM_MODES, max_draft_len] fp32: written in place by whoever fits them; their addresses hold for
    life.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.slope: Float32Array = np.zeros((NUM_MODES, max_draft_len), np.float32)
        self.intercept: Float32Array = np.zeros((NUM_MODES, max_draft_len), np.float32)
        self._struct = native.FaserAcceptance(
            address_of(self.slope, np.float32),
            address_of(self.intercept, np.float32),
            MAX_MARGIN,
            max_draft_len,
        )
        self.address = ctypes.addressof(self._struct)

    @property
    def max_draft_len(self) -> int:
        return int(self.slope.shape[1])

    def log_odds(self, mode: int, margins: Float32Array, sources: Int8Array) -> Float64Array:
        """Of a request's first pending drafts, by their margins and sources [n] (core/request.py) -> [n], at most
        MAX_LOG_ODDS from 0."""
        n = margins.size
        logits = self.slope[mode, :n] * np.minimum(margins, MAX_MARGIN).astype(np.float64) + self.intercept[mode, :n]
        own = np.where(sources == native.BY_MODEL, logits, margins)
        odds: Float64Array = np.clip(own, -MAX_LOG_ODDS, MAX_LOG_ODDS)
        return odds

    def at(self, mode: int, place: int, margin: float) -> float:
        """In the native library's order of operations; margin at most MAX_MARGIN."""
        return sigmoid(float(self.slope[mode, place]) * margin + float(self.intercept[mode, place]))


def is_certain(entry: np.void, position: int) -> bool:
    """Whether the draft at this position was proposed by a drafter that draws nothing; its margin is then the log-odds
    that it is accepted."""
    sources = int8_at(int(entry["draft_sources"]), position + 1)
    return bool(sources.size and sources[position] != native.BY_MODEL)


def pending_margins(sampling: SamplingArray, slot: int, num_tokens: int, num_pending: int) -> list[float]:
    """Of the slot's first num_pending drafts, at most MAX_MARGIN each."""
    margins = float32_at(int(sampling[slot]["draft_margins"]) + 4 * num_tokens, num_pending).tolist()
    return [min(margin, MAX_MARGIN) for margin in margins]
