"""Read the pending drafts' candidates, and the drafts' places among them, for a segment boundary."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_addresses, sampling_address


def exit_drafts(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Read the first num_drafts[i] drafts after num_tokens[i] tokens, request by request.

    Returns candidates [sum of num_drafts, NUM_CANDIDATES] and places [sum of num_drafts], 0 if the draft is not
    a candidate. Raises InvalidArgumentError for a slot with drafts but no candidates.
    """
    at_slots, *columns = int32_addresses(slots, num_tokens, num_drafts)
    total = int(num_drafts.sum())
    candidates, places = np.zeros((total, NUM_CANDIDATES), np.int32), np.zeros(total, np.int32)
    status = native.library().faser_exit_drafts(
        slots.size, at_slots, sampling_address(sampling), *columns, *int32_addresses(candidates, places)
    )
    native.check(status, f"reading the candidates of {slots.size} requests")
    return candidates, places
