"""The requests that draft in one call of the draft loop."""

from __future__ import annotations

from typing import NamedTuple

from faser_trtllm.ops.arrays import Int32Array, SamplingArray


class DraftCall(NamedTuple):
    """The requests of one call; arrays [num_requests] int32."""

    sampling: SamplingArray  # the table with the slots
    slots: Int32Array
    known: Int32Array  # tokens: num_tokens committed ones and `pending` drafts
    wanted: Int32Array  # drafts after the known tokens
    num_tokens: Int32Array
    pending: Int32Array
    modes: Int32Array  # sampling modes
