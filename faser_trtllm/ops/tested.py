"""Sums over verified drafts, from which acceptance is fitted. The native library adds them up."""

from __future__ import annotations

import ctypes

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.native.structures import FaserTestSums
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, address_of, int32_addresses, sampling_address

NUM_CELL_SUMS = 7
NUM_BINS = 20


class TestedSums:
    """Sums over drafts of p, the model's estimate, y, 1 if accepted and 0 if not, m, the margin, and w = p (1 - p).

    cells [NUM_MODES, max_draft_len, 7]: sums of 1, y, (y - p) m, y - p, w m m, w m, w by sampling mode and place. bins
    [3, NUM_BINS]: sums of 1, p and y by p, in bins of equal width. Drafts after the first rejected one are not tested
    (right censoring). The reader of the sums clears them.
    """

    __test__ = False  # not a class of tests for pytest

    def __init__(self, model: AcceptanceModel) -> None:
        self._model = model
        self.cells = np.zeros((NUM_MODES, model.max_draft_len, NUM_CELL_SUMS))
        self.bins = np.zeros((3, NUM_BINS))
        addresses = (address_of(array, np.float64) for array in (self.cells, self.bins))
        self._struct = FaserTestSums(*addresses, NUM_BINS)

    def add(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_accepted: Int32Array,
        outcome: Int32Array,
    ) -> None:
        """Add a batch. num_tokens: committed before verification; num_accepted, outcome: see AcceptResult."""
        at_slots, *columns = int32_addresses(slots, num_tokens, num_accepted, outcome)
        status = native.library().faser_add_tests(
            ctypes.addressof(self._struct),
            self._model.address,
            slots.size,
            at_slots,
            sampling_address(sampling),
            *columns,
        )
        native.check(status, "counting tested drafts")
