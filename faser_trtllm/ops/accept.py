"""The free test: which drafts are accepted, and the one token that follows them."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.acceptance import is_certain
from faser_trtllm.ops.arrays import (
    SAMPLING_DTYPE,
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    int32_at,
    logits_layout,
)
from faser_trtllm.ops.draw import draw_token, gumbel_max_token, residual
from faser_trtllm.ops.log_probs import LogProbs, TokenRows, token_log_probs
from faser_trtllm.ops.philox import Stream, uniform
from faser_trtllm.ops.probs import RowStatus, next_token_probs_reference
from faser_trtllm.ops.sample import Uniform, draft_probs_row

__all__ = ["AcceptResult", "Acceptor", "Outcome", "RowStatus", "accept", "accept_reference"]


class Outcome(enum.IntEnum):
    """The outcome of a request's pass."""

    CARRIED = native.CARRIED  # the last live row's test passed: later drafts stay pending, nothing was drawn
    RECOVERED = native.RECOVERED  # a draft was rejected, one recovered token drawn: pending drafts are dropped
    BONUS = native.BONUS  # every pending draft was accepted, one bonus token drawn
    FAILED = native.FAILED  # see row_status; the tokens before the failing row are committed


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What the test found per request; all int32.

    token_ids [num_requests, max_draft_len + 1]: committed tokens in order, of which the first num_tokens[i]
    count and the first num_accepted[i] were drafts. outcome, row_status [num_requests]: values of Outcome and
    RowStatus.
    """

    token_ids: Int32Array
    num_tokens: Int32Array
    num_accepted: Int32Array
    outcome: Int32Array
    row_status: Int32Array


class Acceptor:
    """The test of one step: load() the requests, run(). Its buffers are allocated once."""

    def __init__(self, max_batch_size: int, vocab_size: int, max_draft_len: int, *, pool: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._max_draft_len = max_draft_len
        self._pool = pool
        self._slots = np.zeros(max_batch_size, np.int32)
        self._cu_logit_rows = np.zeros(max_batch_size + 1, np.int32)
        self._num_tokens = np.zeros(max_batch_size, np.int32)
        self._num_drafts = np.zeros(max_batch_size, np.int32)
        self._token_ids = np.zeros((max_batch_size, max_draft_len + 1), np.int32)
        self._counts = np.zeros((4, max_batch_size), np.int32)
        self._slots_view, self._cu_logit_rows_view = self._slots.data, self._cu_logit_rows.data
        self._num_tokens_view, self._num_drafts_view = self._num_tokens.data, self._num_drafts.data
        inputs = (self._slots, self._cu_logit_rows, self._num_tokens, self._num_drafts)
        outputs = (self._token_ids, *self._counts)
        self._inputs = [address_of(array, np.int32) for array in inputs]
        self._outputs = [address_of(array, np.int32) for array in outputs]
        self._sampling: SamplingArray | None = None
        self._sampling_address = 0
        self._num_requests = 0
        self._num_rows = 0

    def load(
        self, slots: Sequence[int], num_rows: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
    ) -> None:
        """The requests to test [n]: the next num_rows[i] rows of logits are a request's frontier, its last committed
        token and its drafts.

        num_tokens: committed; num_drafts[i] >= num_rows[i] - 1: pending drafts behind them.
        """
        n = self._num_requests = len(slots)
        self._slots_view[:n], self._num_tokens_view[:n] = array("i", slots), array("i", num_tokens)
        self._num_drafts_view[:n] = array("i", num_drafts)
        cu_logit_rows = self._cu_logit_rows_view[: n + 1] = array("i", accumulate(num_rows, initial=0))
        self._num_rows = cu_logit_rows[n]

    def run(self, sampling: SamplingArray, logits: Float32Array) -> AcceptResult:
        """Test the requests loaded; logits [num_rows, >= vocab_size]. The result holds until the next call."""
        n = self._num_requests
        address, stride = logits_layout(logits, self._vocab_size)
        if logits.shape[0] < self._num_rows:
            raise ValueError(f"{self._num_rows} rows were loaded, logits has {logits.shape[0]}")
        if sampling is not self._sampling:  # the table never moves; asking numpy for its address is slow
            self._sampling, self._sampling_address = sampling, address_of(sampling, SAMPLING_DTYPE)
        slots, cu_logit_rows, num_tokens, num_drafts = self._inputs
        status = native.library().faser_accept(
            self._pool,
            n,
            slots,
            self._sampling_address,
            address,
            stride,
            self._vocab_size,
            cu_logit_rows,
            num_tokens,
            num_drafts,
            self._max_draft_len,
            *self._outputs,
        )
        native.check(status, "testing drafts")
        return AcceptResult(self._token_ids[:n], *self._counts[:, :n])

    def take(self, logits: Float32Array, rows: npt.NDArray[np.int64]) -> Float32Array:
        """A copy of these rows, for run."""
        return logits[rows]

    def log_probs(self, logits: Float32Array, asked: TokenRows) -> LogProbs:
        """Log probabilities of tokens; logits: of a pass."""
        return token_log_probs(logits[asked.rows], self._vocab_size, asked)


def accept(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    cu_logit_rows: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    max_draft_len: int,
) -> AcceptResult:
    """One free test over a batch, allocating its own buffers; arguments as in faser_accept.

    slots, num_tokens, num_drafts [num_requests], cu_logit_rows [num_requests + 1] beginning with 0; all
    int32.
    """
    acceptor = Acceptor(slots.size, vocab_size, max_draft_len)
    columns = slots, np.diff(cu_logit_rows), num_tokens, num_drafts
    acceptor.load(*(column.tolist() for column in columns))
    return acceptor.run(sampling, logits)


def accept_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    logits: Float32Array,
    vocab_size: int,
    cu_logit_rows: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    max_draft_len: int,
    *,
    uniform: Uniform = uniform,
) -> AcceptResult:
    """accept in numpy; `uniform` can be replaced to enumerate the randomness."""
    n = slots.size
    result = AcceptResult(np.zeros((n, max_draft_len + 1), np.int32), *np.zeros((4, n), np.int32))
    for i, slot in enumerate(slots.tolist()):
        entry = sampling[slot]
        result.outcome[i] = Outcome.CARRIED
        for row in range(int(cu_logit_rows[i + 1] - cu_logit_rows[i])):
            position = int(num_tokens[i]) + row
            has_draft = row < int(num_drafts[i])
            draft = int(int32_at(int(entry["tokens"]), position + 1)[position]) if has_draft else -1
            p = np.empty(vocab_size, np.float32)
            row_logits = logits[cu_logit_rows[i] + row, :vocab_size]
            status = next_token_probs_reference(sampling, slot, row_logits, position, p)
            if status is not RowStatus.OK:
                result.row_status[i] = status
                result.outcome[i] = Outcome.FAILED
                break
            certain = has_draft and is_certain(entry, position)
            token, accepted = _test(entry, p, position, draft, max_draft_len, uniform, certain)
            if has_draft:
                source = native.BY_SUFFIX if certain else native.BY_MODEL
                entry["num_tested"][source] += 1
                entry["num_passed"][source] += accepted
            result.token_ids[i, row] = token
            result.num_tokens[i] += 1
            if not accepted:
                result.outcome[i] = Outcome.RECOVERED if has_draft else Outcome.BONUS
                break
            result.num_accepted[i] += 1
    return result


def _test(
    entry: np.void,
    p: npt.NDArray[np.float32],
    position: int,
    draft: int,
    max_draft_len: int,
    uniform: Uniform,
    certain: bool,
) -> tuple[int, bool]:
    """The token committed at this position and whether it is the draft (draft -1: nothing is pending).

    certain: the draft was not drawn, so that its q is all at it.
    """
    key = int(entry["key"])
    if entry["mode"] == native.GREEDY:
        token = int(np.argmax(p))
        return token, token == draft
    if entry["mode"] == native.SEEDED:
        token = gumbel_max_token(p, key, position)
        return token, token == draft
    if draft < 0 or certain:
        token = draw_token(p, uniform(key, position, Stream.BONUS))
        return token, token == draft
    q = draft_probs_row(entry, position, p.size, max_draft_len)
    if uniform(key, position, Stream.TEST) * float(q[draft]) < float(p[draft]):
        return draft, True
    u = uniform(key, position, Stream.RECOVER)
    token = draw_token(residual(p, q), u)
    return (token if token >= 0 else draw_token(p, u)), False
