"""Engines without models, where a random process decides acceptance, to run a scheduler at scale.

The executor, its scheduler and its policies are the real ones; all tokens are 0.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_table import ExitModel
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.ops.accept import AcceptResult, Outcome
from faser_trtllm.ops.arrays import Int32Array, SamplingArray
from faser_trtllm.ops.log_probs import LogProbs, TokenRows
from faser_trtllm.ops.prune_rows import PruneBatch
from faser_trtllm.sampling.draft_probs import DraftProbs, HostDraftProbs
from faser_trtllm.sampling.rejection import BranchTokens, VerificationRows
from lab.planner.load.acceptance import AcceptanceProcess
from lab.reference.draft_stop import next_worth

VOCAB_SIZE = 2
MARGIN_OFFSET, MAX_MARGIN = 4.0, 14.0  # margin = log-odds + offset, clipped to 0 and maximum


class PendingDrafts:
    """Margins and acceptance of pending drafts, by slot and place."""

    def __init__(self, process: AcceptanceProcess, max_batch_size: int, max_draft_len: int) -> None:
        shape = max_batch_size, max_draft_len + 1
        self.margins = np.zeros(shape, np.float32)
        self.passes = np.zeros(shape, bool)
        self.process = process

    def shift(self, slots: Int32Array, counts: npt.NDArray[np.int64]) -> None:
        """Remove the first counts[i] drafts of slots[i], which are committed."""
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            for array in (self.margins, self.passes):
                array[slot, :-count] = array[slot, count:].copy()


class SyntheticSampler:
    """A RejectionSampler that accepts the drafts chosen by the process; requests are greedy."""

    def __init__(self, drafts: PendingDrafts, max_draft_len: int) -> None:
        self.draft_probs: DraftProbs = HostDraftProbs(drafts.passes.shape[0], 0, VOCAB_SIZE)
        self._drafts = drafts
        self._max_draft_len = max_draft_len

    def take(self, logits: object, rows: npt.NDArray[np.int64]) -> object:
        return logits

    def log_probs(self, logits: object, asked: TokenRows) -> LogProbs:
        raise NotImplementedError("nobody asks for log probs in a load")

    def pass_ms(self, forward_ms: float, sample_ms: float) -> float:
        return forward_ms

    def sample(
        self, sampling: SamplingArray, logits: object, rows: VerificationRows, branches: BranchTokens | None = None
    ) -> AcceptResult:
        slots, num_rows = rows.slots, rows.num_rows
        tests = np.minimum(num_rows, rows.num_drafts)
        most = int(tests.max(initial=0))
        passes = self._drafts.passes[slots, :most] & (np.arange(most) < tests[:, None])
        accepted = np.cumprod(passes, axis=1, dtype=np.int64).sum(axis=1)
        pending = accepted == num_rows
        outcome = np.where(pending, Outcome.STILL_PENDING, np.where(accepted < tests, Outcome.RECOVERED, Outcome.BONUS))
        moved = pending & (accepted > 0)
        if moved.any():
            self._drafts.shift(slots[moved], accepted[moved])
        token_ids = np.zeros((slots.size, self._max_draft_len + 1), np.int32)
        counts = (accepted + ~pending, accepted, outcome, np.zeros(slots.size))
        return AcceptResult(token_ids, *(np.asarray(values, np.int32) for values in counts))


class _SyntheticEngine(Closing):
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        """Do nothing; no rows are kept."""

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        raise NotImplementedError("only a target exits early")

    def close(self) -> None: ...


class SyntheticTarget(_SyntheticEngine):
    """A target without a model.

    exit_signal: rates of its early exit, which ranks a draft 1 (doubt) or 0 among two candidates.
    routing: of a mixture, whose passes read the expected number of experts.
    """

    def __init__(
        self,
        spec: EngineSpec,
        drafts: PendingDrafts,
        exit_signal: DoubtRates | None,
        seed: int,
        routing: Routing | None = None,
    ) -> None:
        super().__init__(spec)
        self._routing = routing
        self._counts: list[float] = []  # distinct experts in each segment of the pass so far
        self._drafts = drafts
        self._exit = exit_signal
        self._random = np.random.default_rng(seed)
        self._logits = np.zeros((spec.max_num_tokens, VOCAB_SIZE), np.float32)
        self._batch: RaggedBatch | None = None

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._counts = []
        self._count(batch)
        return self._logits[: batch.logit_rows.size]

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        self._batch = batch
        self._counts = self._counts[:segment]
        self._count(batch)
        return self._logits[: batch.logit_rows.size] if segment == len(self.spec.segments) - 2 else None

    @property
    def distinct_experts(self) -> float:
        counts, layers = self._counts, np.diff(self.spec.segments)[: len(self._counts)]
        return float(np.average(counts, weights=layers)) if counts else 0.0

    def _count(self, batch: RaggedBatch) -> None:
        if self._routing is not None:
            self._counts.append(self._routing.distinct(np.diff(batch.cu_rows)))

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Score two candidates; the second is better if the exit doubts the draft, which is the first."""
        assert self._batch is not None
        assert self._exit is not None, "a target without an exit signal has one segment"
        entries = np.searchsorted(self._batch.cu_rows, rows, side="right") - 1
        passes = self._drafts.passes[self._batch.slots[entries], rows - self._batch.cu_rows[entries]]
        doubted = self._random.random(rows.size) < np.where(passes, self._exit.false, self._exit.recall)
        scores = np.full(candidates.shape, -1.0, np.float32)
        scores[:, 0], scores[:, 1] = 0.0, np.where(doubted, 1.0, -1.0)
        return scores

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        raise NotImplementedError("the wrapper that takes the time prunes by early_exit()")

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        raise NotImplementedError("a target does not draft")


@dataclass(frozen=True)
class DoubtRates:
    """Shares of drafts that an early exit doubts, among those that will be rejected (recall) and others (false)."""

    recall: float
    false: float

    @staticmethod
    def of(model: ExitModel) -> DoubtRates:
        """Return the rates that a model of two ranks implies by Bayes' rule."""
        calm, doubt = np.exp(model.intercept), np.exp(model.intercept + model.rank)
        recall = (1.0 - calm) / (doubt - calm)
        return DoubtRates(float(recall), float(recall * doubt))


class SyntheticDraft(_SyntheticEngine):
    """A draft engine that drafts from the process until the policy's rule stops it."""

    distinct_experts = 0.0  # it has no experts

    def __init__(self, spec: EngineSpec, drafts: PendingDrafts) -> None:
        super().__init__(spec)
        self._drafts = drafts

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        raise NotImplementedError("a draft model drafts")

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        raise NotImplementedError("a draft model drafts")

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        raise NotImplementedError("a draft model drafts")

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        """Write margins where the native loop writes them; tokens are 0 already."""
        wanted, pending = draft_batch.num_new_drafts, draft_batch.num_drafts
        most = int(wanted.max(initial=0))
        if most == 0:
            return np.zeros_like(wanted)
        slots, sampling, drafts = draft_batch.batch.slots, draft_batch.sampling, self._drafts
        places = pending[:, None] + np.arange(most)
        in_reach = np.minimum(places, draft_batch.max_draft_len - 1)
        entries = sampling[slots]
        positions = (draft_batch.num_tokens - entries["prompt_len"])[:, None] + places
        log_odds, passes = drafts.process.draft(slots, positions, in_reach)
        margins = np.clip(log_odds + MARGIN_OFFSET, 0.0, MAX_MARGIN)
        drafts.passes[slots[:, None], np.minimum(places, draft_batch.max_draft_len)] = passes
        drafts.margins[slots[:, None], np.minimum(places, draft_batch.max_draft_len)] = margins
        found: npt.NDArray[np.int32] = wanted.copy()
        if draft_batch.stop is not None:
            found = stopped_drafts(draft_batch.stop, drafts.margins[slots], entries["mode"], pending, wanted)
        targets = entries["draft_margins"].astype(np.int64) + 4 * (draft_batch.num_tokens + pending)
        source, stride = margins.ctypes.data, margins.strides[0]
        for row, (address, count) in enumerate(zip(targets.tolist(), found.tolist(), strict=True)):
            if count:
                ctypes.memmove(address, source + row * stride, 4 * count)
        return found


def stopped_drafts(
    stop: DraftStop,
    margins: npt.NDArray[np.float32],
    modes: npt.NDArray[np.int32],
    pending: npt.NDArray[np.int32],
    wanted: npt.NDArray[np.int32],
) -> npt.NDArray[np.int32]:
    """Return drafts made per request by ops/draft_stop.py. margins [n, places]: all that are or may be pending."""
    num_places = stop.slope.shape[1]
    logits = stop.slope[modes] * margins[:, :num_places] + stop.intercept[modes]
    survival = np.cumprod(1.0 / (1.0 + np.exp(-logits.astype(np.float64))), axis=1)
    made = np.minimum(wanted, 1)
    going = np.flatnonzero(wanted > 1)
    while going.size:
        place = pending[going] + made[going]
        worth = next_worth(stop, modes[going], place, survival[going, place - 1].astype(np.float64))
        pays = worth >= 0.0
        going = going[pays]
        if not going.size or worth[pays].sum() < float(stop.step_price[going.size]):
            break
        made[going] += 1
        going = going[made[going] < wanted[going]]
    return made
