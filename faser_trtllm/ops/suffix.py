"""Draft from a request's own text: propose what followed the longest suffix that occurred before.

plugins/cpu/suffix.cpp has an online suffix automaton per slot (Blumer et al. 1985). A prediction of the output is put
in front of the text, as if it were part of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.closing import Closing
from faser_trtllm.ops.arrays import (
    Int32Array,
    SamplingArray,
    address_of,
    int32_addresses,
    sampling_address,
)


class SuffixAutomata(Closing):
    """The native automata, one per slot, of at most max_tokens tokens each; close() frees them.

    The probability that a continuation is right is learnt from every committed token, drafted or not: a rate per
    sampling mode, class of match length and support (one occurrence, several that agree, several that do not, a
    prediction), and a log-odds offset per request.
    """

    def __init__(self, max_batch_size: int, max_tokens: int) -> None:
        status = ctypes.c_int32()
        self._handle = native.library().faser_suffix_create(max_batch_size, max_tokens, ctypes.byref(status))
        native.check(status.value, "making suffix automata")

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""
        return int(native.library().faser_suffix_memory_bytes(self._handle))

    def reset(self, slot: int) -> None:
        """End the slot's request and forget its text."""
        native.check(native.library().faser_suffix_reset(self._handle, slot), "forgetting a text")

    def predict(self, slot: int, token_ids: Sequence[int], *, only_prediction: bool = False) -> None:
        """Begin the slot's request, whose output is expected to repeat these tokens (at least one).

        only_prediction: propose nothing else.
        """
        ids = np.array(token_ids, np.int32)
        library, address = native.library(), address_of(ids, np.int32)
        status = library.faser_suffix_predict(self._handle, slot, address, ids.size, int(only_prediction))
        native.check(status, "taking a prediction")

    def draft(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        num_new_drafts: Int32Array,
        num_model: Int32Array,
    ) -> Int32Array:
        """Draft at most num_new_drafts[i] tokens after num_drafts[i] pending drafts; return their number, int32
        [num_requests].

        num_tokens: committed tokens. Before place num_model[i], where the draft model would draft too, a match must be
        at least as likely to be right as the model's drafts have been. Arrays are int32 [num_requests].
        """
        found = np.zeros(slots.size, np.int32)
        at_slots, *columns = int32_addresses(slots, num_tokens, num_drafts, num_new_drafts, num_model, found)
        status = native.library().faser_suffix_draft(
            self._handle, slots.size, at_slots, sampling_address(sampling), *columns
        )
        native.check(status, "drafting from the text")
        return found

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            native.library().faser_suffix_destroy(handle)
