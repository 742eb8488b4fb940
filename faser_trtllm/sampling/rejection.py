"""Rejection sampling: decide which drafts become tokens after a target pass, and draw the token after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.accept import AcceptResult, Outcome, accept
from faser_trtllm.ops.arrays import Float32Array, Int32Array, SamplingArray, address_of, int32_at
from faser_trtllm.ops.log_probs import LogProbs, TokenRows, token_log_probs
from faser_trtllm.sampling.draft_probs import DraftProbs


@dataclass(frozen=True, slots=True)
class VerificationRows:
    """The rows of logits that verify each request's drafts, request after request.

    A request's rows are those of its last committed token and of its first num_rows - 1 pending drafts. A request with
    0 rows takes no part. Arrays are int32 [num_requests], C-contiguous.
    """

    slots: Int32Array  # rows of the sampling table
    num_rows: Int32Array
    num_tokens: Int32Array  # committed tokens
    num_drafts: Int32Array  # pending drafts, num_rows - 1 or more

    @staticmethod
    def of(
        slots: Sequence[int], num_rows: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
    ) -> VerificationRows:
        return VerificationRows(*(np.array(column, np.int32) for column in (slots, num_rows, num_tokens, num_drafts)))

    @property
    def cu_logit_rows(self) -> Int32Array:
        """Cumulative rows int32 [num_requests + 1]: entries i and i + 1 bound request i's rows of the logits."""
        cumulative = np.zeros(self.num_rows.size + 1, np.int32)
        np.add.accumulate(self.num_rows, out=cumulative[1:])
        return cumulative


@dataclass(frozen=True, slots=True)
class BranchTokens:
    """Tokens that a pass runs in place of drafts (token trees); int32 arrays [num_branches].

    Branch b has the b-th row of logits after those of all requests.
    """

    requests: Int32Array  # indices into the verification rows
    places: Int32Array  # indices of the drafts that the tokens replace, among the request's pending drafts
    token_ids: Int32Array

    def recovered(self, found: AcceptResult) -> npt.NDArray[np.intp]:
        """Return the indices of the branches whose token was recovered at their place."""
        requests, places = self.requests, self.places
        return np.flatnonzero(
            (found.outcome[requests] == Outcome.RECOVERED)
            & (found.num_accepted[requests] == places)
            & (found.token_ids[requests, places] == self.token_ids)
        )

    def follow(self, found: AcceptResult, taken: npt.NDArray[np.intp], drawn: AcceptResult) -> AcceptResult:
        """Return `found` with the tokens `drawn` after the recovered branches `taken`; changes found's arrays."""
        has_token = drawn.outcome != Outcome.FAILED  # a failure repeats in the next step, which reports it
        followed = taken[has_token]
        requests = self.requests[followed]
        found.token_ids[requests, self.places[followed] + 1] = drawn.token_ids[has_token, 0]
        found.num_tokens[requests] += 1
        return replace(found, followed=followed)


class RejectionSampler(Protocol):
    """Verifies drafts so that the output has the target's distribution.

    The terms are vLLM's. For each request, p is the target's distribution at a row, and q the distribution from which
    the draft there was drawn:
    - draft: a pending token, verified by the row before it. For a draft found in the text, q has all its probability on
      the draft.
    - accepted: a draft that becomes a token, with probability min(1, p / q). For greedy and seeded requests: if the
      target draws the same token.
    - recovered: the token drawn from norm(max(p - q, 0)) in place of the first draft that is not accepted. All drafts
      after it are dropped.
    - bonus: the token drawn from p if all drafts were accepted and the last one has a row too.
    - still pending: drafts without a row to verify them, if all before them were accepted. They wait for the next pass,
      and no token is drawn. vLLM has none, since each of its drafts has a row.
    """

    draft_probs: DraftProbs
    """Memory for q of unseeded drafts."""

    def sample(
        self, sampling: SamplingArray, logits: Any, rows: VerificationRows, branches: BranchTokens | None = None
    ) -> AcceptResult:
        """Verify the drafts of each request and draw the token after them, in the order of `rows`.

        sampling [max_batch_size] (SAMPLING_DTYPE): the table that rows.slots index. logits [num_rows, >= vocab_size]:
        the rows of a pass on the sampler's device, first those of `rows`, then those of `branches`. A branch whose
        token is recovered yields one more token (AcceptResult.followed). The result is valid until the next call.
        Raises ValueError if there are fewer logits than rows.
        """

    def log_probs(self, logits: Any, asked: TokenRows) -> LogProbs:
        """Return the log probabilities of tokens from the logits of a pass (ops/log_probs.py)."""

    def take(self, logits: Any, rows: npt.NDArray[np.int64]) -> Any:
        """Return a copy of these rows of logits, for sample()."""

    def pass_ms(self, forward_ms: float, sample_ms: float) -> float:
        """Return the ms of the last pass as cost tables count it. forward_ms, sample_ms: host time of its forward()
        and its sample()."""


class CpuRejectionSampler:
    """RejectionSampler for logits in host memory."""

    def __init__(
        self, vocab_size: int, max_draft_len: int, draft_probs: DraftProbs, *, pool: int | None = None
    ) -> None:
        """pool: handle of the core set whose threads share the work; None: only the calling thread works."""
        self.draft_probs = draft_probs
        self._vocab_size = vocab_size
        self._max_draft_len = max_draft_len
        self._pool = pool
        self._result: AcceptResult | None = None  # reused, since most steps have the same number of requests

    def sample(
        self,
        sampling: SamplingArray,
        logits: Float32Array,
        rows: VerificationRows,
        branches: BranchTokens | None = None,
    ) -> AcceptResult:
        if self._result is not None and self._result.outcome.size != rows.slots.size:
            self._result = None
        found = self._result = self._accept(sampling, logits, rows, self._result)
        taken = None if branches is None else branches.recovered(found)
        if branches is None or taken is None or not taken.size:
            return found
        requests = branches.requests[taken]
        known = rows.num_tokens[requests] + branches.places[taken] + 1
        entries = sampling[rows.slots[requests]]  # a copy, whose history ends with the branch's token
        histories = []
        for address, length, token in zip(entries["tokens"], known, branches.token_ids[taken], strict=True):
            histories.append(int32_at(int(address), int(length)).copy())
            histories[-1][-1] = token
        entries["tokens"] = [address_of(history, np.int32) for history in histories]
        ones = np.ones(taken.size, np.int32)
        own_rows = VerificationRows(np.arange(taken.size, dtype=np.int32), ones, known, np.zeros_like(ones))
        own_logits = logits[int(rows.num_rows.sum()) + taken]
        return branches.follow(found, taken, self._accept(entries, own_logits, own_rows))

    def log_probs(self, logits: Float32Array, asked: TokenRows) -> LogProbs:
        return token_log_probs(logits[asked.rows], self._vocab_size, asked)

    def take(self, logits: Float32Array, rows: npt.NDArray[np.int64]) -> Float32Array:
        return logits[rows]

    def pass_ms(self, forward_ms: float, sample_ms: float) -> float:
        return forward_ms + sample_ms

    def _accept(
        self, sampling: SamplingArray, logits: Float32Array, rows: VerificationRows, result: AcceptResult | None = None
    ) -> AcceptResult:
        return accept(
            sampling,
            rows.slots,
            logits,
            self._vocab_size,
            rows.cu_logit_rows,
            rows.num_tokens,
            rows.num_drafts,
            self._max_draft_len,
            pool=self._pool,
            result=result,
        )
