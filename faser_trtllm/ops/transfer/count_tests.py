"""Count drafts that a device has verified in their slots, by their source, as native rejection sampling does."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, address_of, sampling_address


def count_tests(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_accepted: Int32Array, outcome: Int32Array
) -> None:
    """Count drafts; arrays [n] int32. num_tokens: committed before; num_accepted, outcome: as in AcceptResult."""
    status = native.library().faser_count_tests(
        slots.size,
        address_of(slots, np.int32),
        sampling_address(sampling),
        address_of(num_tokens, np.int32),
        address_of(num_accepted, np.int32),
        address_of(outcome, np.int32),
    )
    native.check(status, "counting tested drafts")
