"""Synthetic acceptance, to measure performance: drafts are accepted at random and not by the target, so outputs are not
the target's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.accept import AcceptResult, Outcome
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_at
from faser_trtllm.ops.philox import Stream, philox4x32
from faser_trtllm.ops.transfer.count_tests import count_tests
from faser_trtllm.sampling.rejection import BranchTokens, RejectionSampler, VerificationRows


def place_probabilities(acceptance: float | Sequence[float], max_draft_len: int) -> npt.NDArray[np.float64]:
    """Return the probability that the draft at each position [max_draft_len] is accepted if those before it are.

    A number is the mean number of accepted drafts: its integer part always, its fraction as the chance of one more
    (TensorRT-LLM's meaning). A sequence lists the probabilities; drafts beyond it are rejected.
    """
    probabilities = np.zeros(max_draft_len)
    if isinstance(acceptance, Sequence):
        length = min(len(acceptance), max_draft_len)
        probabilities[:length] = acceptance[:length]
        return probabilities
    return np.clip(acceptance - np.arange(max_draft_len), 0.0, 1.0)


class SyntheticRejectionSampler:
    """Accepts drafts at random; another sampler does everything else, such as drawing the next token.

    Acceptance depends on the seed, the request's prompt and the draft's position, but not on the batch. It does not
    support branches.
    """

    def __init__(self, sampler: RejectionSampler, probabilities: npt.NDArray[np.float64], seed: int) -> None:
        """probabilities [max_draft_len]: see place_probabilities."""
        self.draft_probs, self.log_probs = sampler.draft_probs, sampler.log_probs
        self.take, self.pass_ms = sampler.take, sampler.pass_ms
        self._sampler = sampler
        self._probabilities = probabilities
        self._seed = seed

    def sample(
        self, sampling: SamplingArray, logits: Any, rows: VerificationRows, branches: BranchTokens | None = None
    ) -> AcceptResult:
        assert branches is None, "drafts that are accepted at random have no branches"
        slots, num_rows, num_tokens = rows.slots, rows.num_rows, rows.num_tokens
        n = slots.size
        num_verified = np.minimum(num_rows, rows.num_drafts)
        accepted = np.minimum(self._num_accepted(sampling, slots, num_tokens), num_verified)
        is_pending = accepted == num_rows  # no row to draw from
        token_ids = np.zeros((n, self._probabilities.size + 1), np.int32)
        outcome = np.where(
            is_pending, Outcome.STILL_PENDING, np.where(accepted < num_verified, Outcome.RECOVERED, Outcome.BONUS)
        )
        row_status = np.zeros(n, np.int32)
        for i in range(n):
            tokens = int32_at(int(sampling[slots[i]]["tokens"]), int(num_tokens[i] + accepted[i]))
            token_ids[i, : accepted[i]] = tokens[int(num_tokens[i]) :]
        drawing = np.flatnonzero(~is_pending)
        if drawing.size:
            # The target's token after the accepted drafts, drawn as if no draft were pending there.
            known, ones = (num_tokens + accepted)[drawing].astype(np.int32), np.ones(drawing.size, np.int32)
            own_rows = VerificationRows(slots[drawing], ones, known, np.zeros_like(ones))
            places = (rows.cu_logit_rows[:-1] + accepted)[drawing].astype(np.int64)
            own_logits = self._sampler.take(logits, places)
            drawn = self._sampler.sample(sampling, own_logits, own_rows)
            token_ids[drawing, accepted[drawing]] = drawn.token_ids[:, 0]
            failed = drawn.outcome == Outcome.FAILED
            outcome[drawing[failed]] = Outcome.FAILED
            row_status[drawing] = drawn.row_status
        num_committed = accepted + (outcome == Outcome.BONUS) + (outcome == Outcome.RECOVERED)
        counts = (np.asarray(values, np.int32) for values in (num_committed, accepted, outcome, row_status))
        found = AcceptResult(token_ids, *counts)
        count_tests(sampling, slots, num_tokens, found.num_accepted, found.outcome)
        return found

    def _num_accepted(
        self, sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array
    ) -> npt.NDArray[np.int64]:
        """Return the number of drafts before the first rejection, int64 [n]."""
        counters = np.zeros((slots.size, self._probabilities.size, 4), np.uint64)
        counters[:, :, 0] = num_tokens[:, None] + np.arange(self._probabilities.size)
        for i, slot in enumerate(slots):
            entry = sampling[slot]
            counters[i, :, 1] = zlib.crc32(int32_at(int(entry["tokens"]), int(entry["prompt_len"])).tobytes())
        counters[:, :, 3] = Stream.TEST
        uniform = philox4x32(counters, self._seed)[..., 0] * 2.0**-32
        passed: npt.NDArray[np.int64] = np.cumprod(uniform < self._probabilities, axis=1).sum(axis=1)
        return passed
