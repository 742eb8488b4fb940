"""Memory for the distributions that unseeded pending drafts were drawn from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from faser_trtllm.ops.arrays import Float32Array, address_of


class DraftProbs(Protocol):
    """The distributions of each slot's pending drafts, in host or device memory."""

    def address(self, slot: int) -> int:
        """Return the address of the slot's memory, for its entry in the sampling table; 0 for device memory."""

    def rows(self, slot: int) -> Any:
        """Return the slot's distributions fp32 [max_draft_len, vocab_size]; that of the draft at a position is in row
        position % max_draft_len."""

    def park(self, slot: int) -> Any:
        """Return the slot's distributions for a later restore(); another request may use the slot meanwhile."""

    def restore(self, slot: int, parked: Any) -> None:
        """Give a slot the distributions that park() returned."""


class HostDraftProbs:
    """DraftProbs in host memory, which is allocated per slot when first needed and then kept."""

    def __init__(self, max_batch_size: int, max_draft_len: int, vocab_size: int) -> None:
        """max_draft_len: 0 if no drafts are drawn, so that no memory is needed."""
        self._shape = (max_draft_len, vocab_size)
        self._probs: list[Float32Array | None] = [None] * max_batch_size

    def address(self, slot: int) -> int:
        if not self._shape[0]:
            return 0
        probs = self._probs[slot]
        if probs is None:
            probs = self._probs[slot] = np.zeros(self._shape, np.float32)
        return address_of(probs, np.float32)

    def rows(self, slot: int) -> Float32Array:
        """See DraftProbs.rows; [0, vocab_size] if the slot has no memory yet."""
        probs = self._probs[slot]
        return np.zeros((0, self._shape[1]), np.float32) if probs is None else probs

    def park(self, slot: int) -> Float32Array | None:
        parked, self._probs[slot] = self._probs[slot], None
        return parked

    def restore(self, slot: int, parked: Float32Array | None) -> None:
        self._probs[slot] = parked
