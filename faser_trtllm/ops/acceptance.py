"""The probability that a pending draft is accepted, given its margin; used to rank drafts and to fit acceptance."""

from __future__ import annotations

import ctypes

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.native.structures import FaserAcceptance
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    int32_addresses,
    sampling_address,
)
from faser_trtllm.ops.draft_stop import sigmoid

MAX_LOG_ODDS = 13.8  # a probability of one in a million: beyond any estimate, and finite
MAX_MARGIN = 20.0  # logits; larger margins carry no information, and would put a fit out of range


class AcceptanceModel:
    """Acceptance probability by margin: sigmoid(slope[s, j] * min(margin, MAX_MARGIN) + intercept[s, j]) at place j of
    sampling mode s.

    slope, intercept [NUM_MODES, max_draft_len] fp32: fitting writes them in place, and they never move.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.slope: Float32Array = np.zeros((NUM_MODES, max_draft_len), np.float32)
        self.intercept: Float32Array = np.zeros((NUM_MODES, max_draft_len), np.float32)
        self._struct = FaserAcceptance(
            address_of(self.slope, np.float32),
            address_of(self.intercept, np.float32),
            MAX_MARGIN,
            max_draft_len,
        )
        self.address = ctypes.addressof(self._struct)

    @property
    def max_draft_len(self) -> int:
        return int(self.slope.shape[1])

    def log_odds(
        self, sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
    ) -> Float32Array:
        """Return log-odds fp32 [sum of num_drafts] within +-MAX_LOG_ODDS, request by request: of its first
        num_drafts[i] drafts after num_tokens[i] tokens. InvalidArgumentError: a slot has drafts but no margins."""
        at_slots, *columns = int32_addresses(slots, num_tokens, num_drafts)
        odds: Float32Array = np.zeros(num_drafts.sum(), np.float32)
        status = native.library().faser_log_odds(
            self.address,
            MAX_LOG_ODDS,
            slots.size,
            at_slots,
            sampling_address(sampling),
            *columns,
            address_of(odds, np.float32),
        )
        native.check(status, f"reading the margins of {slots.size} requests")
        return odds

    def at(self, mode: int, place: int, margin: float) -> float:
        """Return the probability, computed in the native library's order of operations. margin: at most MAX_MARGIN."""
        return sigmoid(float(self.slope[mode, place]) * margin + float(self.intercept[mode, place]))
