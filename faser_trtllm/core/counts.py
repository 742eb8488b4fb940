"""Indices into the int32 array of a request's counts (faser_cpu.h, faser_count)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_TOKENS, NUM_DRAFTS, NUM_COMPUTED, NUM_DRAFT_COMPUTED, DRAFTERS, MAX_NUM_TOKENS, MAX_DRAFT_LEN = range(7)
NUM_DRAFTED, NUM_ACCEPTED, NUM_PRUNED, NUM_STEPS, NUM_PREDICTED, NUM_MISPREDICTED, NUM_COUNTS = range(7, 14)

Int32Array = npt.NDArray[np.int32]


def are_decoding(counts: Int32Array) -> npt.NDArray[np.bool_]:
    """Return Request.is_decoding of each request, [num_requests]. counts: [num_requests, NUM_COUNTS]."""
    found: npt.NDArray[np.bool_] = counts[:, NUM_COMPUTED] == counts[:, NUM_TOKENS] - 1
    return found
