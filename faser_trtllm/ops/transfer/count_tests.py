"""Count the drafts that a device has verified, per slot and source, like native rejection sampling."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, address_of, sampling_address


def count_tests(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_accepted: Int32Array, outcome: Int32Array
) -> None:
    """Count verified drafts. num_tokens: committed before verification. num_accepted, outcome: see AcceptResult."""
    status = native.library().faser_count_tests(
        slots.size,
        address_of(slots, np.int32),
        sampling_address(sampling),
        address_of(num_tokens, np.int32),
        address_of(num_accepted, np.int32),
        address_of(outcome, np.int32),
    )
    native.check(status, "counting tested drafts")
