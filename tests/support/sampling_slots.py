"""Slots filled by hand for the tests of ops: a sampling table without requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.arrays import SAMPLING_DTYPE


class Slots:
    """Sampling entries whose arrays stay alive with this object; every field can be given by name."""

    def __init__(self, num_slots: int, vocab_size: int, max_draft_len: int, capacity: int = 64) -> None:
        self.array = np.zeros(num_slots, SAMPLING_DTYPE)
        self.vocab_size = vocab_size
        self.max_draft_len = max_draft_len
        self.tokens = np.zeros((num_slots, capacity), np.int32)
        self.draft_probs = np.zeros((num_slots, max(max_draft_len, 1), vocab_size), np.float32)
        self.draft_sources = np.zeros((num_slots, capacity), np.int8)
        self._kept: list[Any] = []
        for slot in range(num_slots):
            self.set(slot)

    def set(self, slot: int, **fields: Any) -> None:
        """Reset a slot to plain sampling, then set fields; bad_words, bias and end_ids take sequences, masks bools
        [num_mask_rows, vocab_size]."""
        self.array[slot] = np.zeros((), SAMPLING_DTYPE)
        entry = self.array[slot]
        entry["tokens"] = self.tokens[slot].ctypes.data
        entry["draft_probs"] = self.draft_probs[slot].ctypes.data
        entry["draft_sources"] = self.draft_sources[slot].ctypes.data
        entry["mode"] = native.SAMPLED
        entry["temperature"] = entry["top_p"] = entry["repetition_penalty"] = 1
        entry["prompt_len"] = 1
        for name, value in fields.items():
            if name == "tokens":
                self.tokens[slot, : len(value)] = value
            elif name == "end_ids":
                self._point(entry, "end_ids", value, np.int32)
                entry["num_end_ids"] = len(value)
            elif name == "bias":
                self._point(entry, "bias_ids", [token for token, _ in value], np.int32)
                self._point(entry, "bias_values", [bias for _, bias in value], np.float32)
                entry["num_bias"] = len(value)
            elif name == "bad_words":
                self._point(entry, "bad_words", [token for word in value for token in word], np.int32)
                self._point(entry, "cu_bad_words", np.cumsum([0, *map(len, value)]), np.int32)
                entry["num_bad_words"] = len(value)
            elif name == "masks":
                bits = np.zeros((len(value), -(-self.vocab_size // 32) * 32), bool)
                bits[:, : self.vocab_size] = value
                self._point(entry, "masks", np.packbits(bits, axis=1, bitorder="little").view(np.uint32), np.uint32)
                entry["num_mask_rows"] = len(value)
            else:
                entry[name] = value

    def arrays(self) -> list[np.ndarray]:
        """Return the arrays that the entries' pointers lead to."""
        return [self.tokens, self.draft_probs, self.draft_sources, *self._kept]

    def _point(self, entry: np.void, name: str, values: Any, dtype: Any) -> None:
        array = np.array(values, dtype)
        self._kept.append(array)
        entry[name] = array.ctypes.data
