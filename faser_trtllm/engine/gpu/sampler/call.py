"""The requests that draft in one call."""

from __future__ import annotations

from typing import NamedTuple

from faser_trtllm.ops.arrays import Int32Array, SamplingArray


class DraftCall(NamedTuple):
    """Arrays [num_requests] int32. sampling: the table that has the slots. known: tokens, num_tokens committed ones and
    `pending` drafts; wanted: drafts behind them; modes: sampling modes."""

    sampling: SamplingArray
    slots: Int32Array
    known: Int32Array
    wanted: Int32Array
    num_tokens: Int32Array
    pending: Int32Array
    modes: Int32Array
