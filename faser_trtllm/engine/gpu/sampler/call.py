"""The requests that draft in one call of the draft loop."""

from __future__ import annotations

from typing import NamedTuple

from faser_trtllm.ops.arrays import Int32Array, SamplingArray


class DraftCall(NamedTuple):
    """The requests of one call; arrays [num_requests] int32."""

    sampling: SamplingArray  # the table with the slots
    slots: Int32Array
    known: Int32Array  # num_tokens + pending
    wanted: Int32Array  # drafts to make after the known tokens
    num_tokens: Int32Array  # committed tokens
    pending: Int32Array  # drafts after the committed tokens
    modes: Int32Array  # sampling modes
