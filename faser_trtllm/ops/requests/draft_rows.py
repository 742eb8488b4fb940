"""The rows of a draft model's first pass: tokens that it has not run, of the requests that take part."""

from __future__ import annotations

from typing import NamedTuple

from faser_trtllm.core.counts import Int32Array


class DraftRows(NamedTuple):
    """The requests that have rows, with a column [num] int32 for each value."""

    requests: Int32Array  # indices into the step's requests
    slots: Int32Array
    first: Int32Array  # rows are those of the tokens [first, end)
    end: Int32Array
    num_logit_rows: Int32Array  # of the last rows: 1 for a request that drafts
    num_tokens: Int32Array  # committed
    num_pending: Int32Array  # drafts after the committed tokens
    num_new: Int32Array  # drafts to make after the pending ones
