"""Synthetic acceptance: drafts are accepted at random, not by the target. For performance measurements; outputs are not
the target's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.accept import AcceptResult, Outcome
from faser_trtllm.ops.arrays import SamplingArray, int32_at
from faser_trtllm.ops.log_probs import LogProbs, TokenRows
from faser_trtllm.ops.philox import Stream, philox4x32


class Tester(Protocol):
    """The free test of one step, see ops.accept.Acceptor."""

    def load(
        self, slots: Sequence[int], num_rows: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
    ) -> None: ...

    def run(self, sampling: SamplingArray, logits: Any) -> AcceptResult: ...

    def log_probs(self, logits: Any, asked: TokenRows) -> LogProbs:
        """Log probabilities of tokens; logits: of a pass."""

    def take(self, logits: Any, rows: npt.NDArray[np.int64]) -> Any:
        """These rows of logits, in a form that run() accepts."""


def place_probabilities(acceptance: float | Sequence[float], max_draft_len: int) -> npt.NDArray[np.float64]:
    """[max_draft_len]: acceptance probability of the draft at each place of a frontier, given that those before it are
    accepted.

    A number is the mean number of accepted drafts: its whole part always, its fraction as the chance of one more
    (TensorRT-LLM's meaning). A sequence gives the probabilities themselves; places beyond it are rejected.
    """
    probabilities = np.zeros(max_draft_len)
    if isinstance(acceptance, Sequence):
        length = min(len(acceptance), max_draft_len)
        probabilities[:length] = acceptance[:length]
        return probabilities
    return np.clip(acceptance - np.arange(max_draft_len), 0.0, 1.0)


class SyntheticAcceptor:
    """Same as the wrapped tester. The token after the accepted drafts is drawn from the target's distribution.

    Acceptance is a function of the seed, the request's prompt and the draft's position, not of the batch.
    """

    def __init__(self, tester: Tester, probabilities: npt.NDArray[np.float64], seed: int) -> None:
        """probabilities [max_draft_len]: see place_probabilities."""
        self._tester = tester
        self._probabilities = probabilities
        self._seed = seed
        self._loaded: tuple[npt.NDArray[np.int64], ...] = (np.zeros(0, np.int64),) * 4

    def load(
        self, slots: Sequence[int], num_rows: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
    ) -> None:
        """As Acceptor.load."""
        self._loaded = tuple(np.array(column, np.int64) for column in (slots, num_rows, num_tokens, num_drafts))

    def run(self, sampling: SamplingArray, logits: Any) -> AcceptResult:
        """As Acceptor.run, except for which drafts are accepted."""
        slots, num_rows, num_tokens, num_drafts = self._loaded
        n = slots.size
        num_tested = np.minimum(num_rows, num_drafts)
        accepted = np.minimum(self._num_accepted(sampling, slots, num_tokens), num_tested)
        carried = accepted == num_rows  # no row to draw from
        token_ids = np.zeros((n, self._probabilities.size + 1), np.int32)
        outcome = np.where(carried, Outcome.CARRIED, np.where(accepted < num_tested, Outcome.RECOVERED, Outcome.BONUS))
        row_status = np.zeros(n, np.int32)
        for i in range(n):
            known = int(num_tokens[i] + accepted[i])
            tokens = int32_at(int(sampling[slots[i]]["tokens"]), known)
            token_ids[i, : accepted[i]] = tokens[int(num_tokens[i]) :]
        drawing = np.flatnonzero(~carried)
        if drawing.size:
            first_rows = np.cumsum(num_rows) - num_rows
            # The target's token after the accepted drafts, as if no draft were pending there.
            known, count = (num_tokens + accepted)[drawing].tolist(), drawing.size
            self._tester.load(slots[drawing].tolist(), [1] * count, known, [0] * count)
            drawn = self._tester.run(sampling, self._tester.take(logits, (first_rows + accepted)[drawing]))
            token_ids[drawing, accepted[drawing]] = drawn.token_ids[:, 0]
            failed = drawn.outcome == Outcome.FAILED
            outcome[drawing[failed]] = Outcome.FAILED
            row_status[drawing] = drawn.row_status
        num_committed = accepted + (outcome == Outcome.BONUS) + (outcome == Outcome.RECOVERED)
        counts = (np.asarray(values, np.int32) for values in (num_committed, accepted, outcome, row_status))
        return AcceptResult(token_ids, *counts)

    def take(self, logits: Any, rows: npt.NDArray[np.int64]) -> Any:
        """As Acceptor.take."""
        return self._tester.take(logits, rows)

    def log_probs(self, logits: Any, asked: TokenRows) -> LogProbs:
        """As Acceptor.log_probs."""
        return self._tester.log_probs(logits, asked)

    def _num_accepted(
        self, sampling: SamplingArray, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Number of drafts accepted before the first rejection [n]."""
        counters = np.zeros((slots.size, self._probabilities.size, 4), np.uint64)
        counters[:, :, 0] = num_tokens[:, None] + np.arange(self._probabilities.size)
        for i, slot in enumerate(slots):
            entry = sampling[slot]
            counters[i, :, 1] = zlib.crc32(int32_at(int(entry["tokens"]), int(entry["prompt_len"])).tobytes())
        counters[:, :, 3] = Stream.TEST
        coins = philox4x32(counters, self._seed)[..., 0] * 2.0**-32
        passed: npt.NDArray[np.int64] = np.cumprod(coins < self._probabilities, axis=1).sum(axis=1)
        return passed
