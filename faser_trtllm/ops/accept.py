"""Rejection sampling: decide which drafts are accepted, and draw the token that follows them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    int32_addresses,
    logits_layout,
    sampling_address,
)
from faser_trtllm.ops.probs import RowStatus

__all__ = ["AcceptResult", "Outcome", "RowStatus", "accept"]


class Outcome(enum.IntEnum):
    """How the verification of a request's rows ended (sampling/rejection.py defines the terms)."""

    STILL_PENDING = native.STILL_PENDING  # all rows' drafts were accepted, no token drawn; later drafts stay pending
    RECOVERED = native.RECOVERED  # a draft was rejected, one recovered token drawn; pending drafts are dropped
    BONUS = native.BONUS  # all pending drafts were accepted, one bonus token drawn
    FAILED = native.FAILED  # see row_status; the tokens before the failing row are committed


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The tokens of each request; arrays of int32."""

    token_ids: Int32Array  # [num_requests, max_draft_len + 1], in order; the first num_tokens[i] are valid
    num_tokens: Int32Array  # [num_requests]
    num_accepted: Int32Array  # [num_requests]: how many of the first tokens were drafts
    outcome: Int32Array  # [num_requests]: Outcome
    row_status: Int32Array  # [num_requests]: RowStatus
    # Indices of branches that yielded one more token each (sampling/rejection.py); accept() leaves this empty.
    followed: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp), kw_only=True)

    @staticmethod
    def over(flat: Any, n: int, max_draft_len: int) -> AcceptResult:
        """Return the fields of n requests as views of one int32 array or tensor [at least n * (max_draft_len + 5)]."""
        width = max_draft_len + 1
        counts = (flat[n * begin : n * (begin + 1)] for begin in range(width, width + 4))
        return AcceptResult(flat[: n * width].reshape(n, width), *counts)

    def part(self, chosen: slice | npt.NDArray[np.intp]) -> AcceptResult:
        """Return the results of the chosen requests."""
        counts = (self.num_tokens, self.num_accepted, self.outcome, self.row_status)
        return AcceptResult(self.token_ids[chosen], *(each[chosen] for each in counts))


def accept(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    cu_logit_rows: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    max_draft_len: int,
    *,
    pool: int | None = None,
    result: AcceptResult | None = None,
) -> AcceptResult:
    """Verify the drafts of a batch by rejection sampling, and count the verified ones in the slots' entries.

    sampling [num_slots] (SAMPLING_DTYPE). logits [num_rows, >= vocab_size]: request i has rows cu_logit_rows[i] to
    cu_logit_rows[i + 1], of its last committed token and its first drafts. slots, num_tokens (committed) and num_drafts
    (pending, at most max_draft_len) [num_requests], cu_logit_rows [num_requests + 1] beginning with 0; all int32. pool:
    handle of the core set whose threads share the work; None: the calling thread works alone. result: written to and
    returned; tokens after the first num_tokens are left unchanged.
    """
    n = slots.size
    address, stride = logits_layout(logits, vocab_size)
    if logits.shape[0] < cu_logit_rows[n]:
        raise ValueError(f"{cu_logit_rows[n]} rows are to be verified, logits has {logits.shape[0]}")
    if result is None:
        result = AcceptResult.over(np.zeros(n * (max_draft_len + 5), np.int32), n, max_draft_len)
    outputs = (result.token_ids, result.num_tokens, result.num_accepted, result.outcome, result.row_status)
    at_slots, *columns = int32_addresses(slots, cu_logit_rows, num_tokens, num_drafts, *outputs)
    status = native.library().faser_accept(
        pool,
        n,
        at_slots,
        sampling_address(sampling),
        address,
        stride,
        vocab_size,
        *columns[:3],
        max_draft_len,
        *columns[3:],
    )
    native.check(status, "testing drafts")
    return result
