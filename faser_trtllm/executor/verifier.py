"""The verifying half of a step: one target pass over all frontiers and context chunks, then rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add, le
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, KeptRows, ScheduledRequests, SchedulerOutput, VerifyResult
from faser_trtllm.engine.base import Engine
from faser_trtllm.executor.branches import Added, BranchRows
from faser_trtllm.executor.kept_rows import ContextRows, Kept, keep_rows
from faser_trtllm.executor.lanes import Drafting
from faser_trtllm.executor.pruner import Pruner
from faser_trtllm.ops import accept
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.fill_rows import RowFiller
from faser_trtllm.sampling.rejection import BranchTokens, RejectionSampler, VerificationRows
from faser_trtllm.sampling.table import SamplingTable

# Comparing enums takes ten times as long.
STILL_PENDING, FAILED = int(accept.Outcome.STILL_PENDING), int(accept.Outcome.FAILED)
NAN_LOGITS = "the target model returned NaN or infinite logits for this request; check the checkpoint's weights"

T = TypeVar("T")


class Verifier:
    """Runs the rows that the plan assigns to each request, and samples the tokens that follow from them."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingTable,
        block_table: npt.NDArray[np.int32],
        clock: Clock,
        sampler: RejectionSampler,
        branches: BranchRows | None = None,
    ) -> None:
        """sampler: for the logits of `engine`. branches: adds them where drafts are verified after they were made, in a
        pass that is not pruned."""
        spec = engine.spec
        self._sampling = sampling
        self._clock = clock
        self._rows = RowFiller(spec.max_batch_size, spec.max_num_tokens, block_table)
        self._pruner = Pruner(engine, sampling)
        self.tokens_per_block = spec.tokens_per_block
        self._vocab_size = spec.vocab_size
        self._branches = branches
        self._sampler = sampler

    def verify(self, plan: SchedulerOutput, drafting: Drafting) -> VerifyResult:
        """Run the pass and sample. Unless the mode is serial, the pass runs while drafting goes on: the frontier is
        then what was pending before, and the sampler already sees what was drafted meanwhile."""
        started = self._clock.now_s()
        drafts = drafting.result() if plan.mode is Mode.SERIAL else None
        rows, verified = plan.scheduled, plan.verified
        frontiers = self._frontiers(plan, verified, drafts)
        picked, added = None, None
        if self._branches is not None and drafts is not None and _may_branch(plan):
            pending = list(map(add, rows.num_pending, drafts.num_new_drafts))
            picked = self._branches.pick(rows, verified, pending, frontiers, plan.frontier)
        lengths = _spread(frontiers, verified, len(rows), 0)
        batch, tested, num_context = self._fill(rows, verified, lengths)
        if self._branches is not None and picked is not None:
            batch, added = self._branches.add(batch, rows, tested, picked)
        begun = self._clock.now_s()
        logits = None
        num_pruned: Sequence[int] = []
        if batch.num_requests:
            logits, num_pruned = self._pruner.forward(plan, batch, frontiers)
        verify_ms = 1e3 * (self._clock.now_s() - begun)
        if num_pruned:
            lengths = _spread(frontiers, verified, len(rows), 0)
            num_pruned = _spread(num_pruned, verified, len(rows), 0)
        overlapped = drafts is None
        drafts = drafting.result()
        step_ms = 1e3 * (self._clock.now_s() - started) + (0.0 if overlapped else drafts.draft_ms)
        context: dict[int, KeptRows] = {}
        if num_context:
            context_rows = ContextRows.split(rows, lengths, tested, num_context)
            context = context_rows.keep(logits, self._sampler)
            logits = self._sampler.take(logits, np.array(context_rows.test_rows, np.int64))
        logit_rows, num_pending = self._logit_rows(rows, lengths, drafts.num_new_drafts, tested)
        times_ms = verify_ms, step_ms
        return self._collect(
            plan, lengths, num_pruned, num_pending, tested, logit_rows, logits, times_ms, added, context
        )

    def _frontiers(self, plan: SchedulerOutput, verified: Sequence[int], drafts: DraftResult | None) -> list[int]:
        """Drafts to verify per decoding request of the plan's view."""
        rows = plan.scheduled
        pending: Sequence[int] = rows.num_pending
        if drafts is not None and any(drafts.num_new_drafts):
            pending = list(map(add, pending, drafts.num_new_drafts))
        pending, slots, known, limits = (
            _pick(column, verified) for column in (pending, rows.slots, rows.num_tokens, rows.max_verified)
        )
        if not any(pending):
            return list(pending)
        if plan.frontier is None:
            return list(map(min, pending, limits))
        wanted = plan.frontier.lengths(self._sampling.array, slots, known, pending)
        return list(wanted if all(map(le, wanted, limits)) else map(min, wanted, limits))

    def _fill(
        self, rows: ScheduledRequests, verified: Sequence[int], lengths: Sequence[int]
    ) -> tuple[RaggedBatch, Sequence[int], dict[int, int]]:
        """-> the batch, indices of the requests that reach their end, and by index how many rows of logits come before
        theirs for the log probs of prompts. lengths: drafts to run rows for."""
        if len(verified) == len(rows):
            num_logits = [1 + length for length in lengths]
            ends = list(map(add, rows.num_tokens, lengths))
            return self._rows.fill(self._sampling.array, rows.slots, rows.num_computed, ends, num_logits), verified, {}
        num_context: dict[int, int] = {}
        tested: list[int] = []
        columns: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        slots, first, end, num_logits = columns
        for index, (slot, num_new, computed, known, length) in enumerate(
            zip(rows.slots, rows.num_new_tokens, rows.num_computed, rows.num_tokens, lengths, strict=True)
        ):
            if not num_new:
                continue
            stop, wanted = computed + num_new, 0
            if stop == known:
                stop, wanted = known + length, 1 + length
                tested.append(index)
            if rows.requests[index].lacks_context_log_probs:
                first_wanted = max(computed, len(rows.requests[index].context_log_probs))
                count = min(computed + num_new, known - 1) - first_wanted
                if count > 0:
                    num_context[index] = count
                    wanted += count
            slots.append(slot)
            first.append(computed)
            end.append(stop)
            num_logits.append(wanted)
        return self._rows.fill(self._sampling.array, *columns), tested, num_context

    def _logit_rows(
        self, rows: ScheduledRequests, lengths: Sequence[int], num_new: Sequence[int], tested: Sequence[int]
    ) -> tuple[VerificationRows, Sequence[int]]:
        """-> the rows of those that are sampled, and their pending drafts, 0 for the others."""
        pending = _pick(list(map(add, rows.num_pending, num_new)), tested)
        slots, known, num_verified = (_pick(column, tested) for column in (rows.slots, rows.num_tokens, lengths))
        num_rows = [1 + length for length in num_verified]
        guided = self._sampling.guided
        if guided.slots:
            for slot, num_tokens, count in zip(slots, known, num_rows, strict=True):
                if slot in guided.slots:
                    guided.prepare(slot, num_tokens, count)
        return VerificationRows.of(slots, num_rows, known, pending), _spread(pending, tested, len(rows), 0)

    def _collect(
        self,
        plan: SchedulerOutput,
        lengths: Sequence[int],
        num_pruned: Sequence[int],
        num_pending: Sequence[int],
        tested: Sequence[int],
        logit_rows: VerificationRows,
        logits: npt.NDArray[np.float32] | None,
        times_ms: tuple[float, float],
        added: Added | None,
        context: dict[int, KeptRows],
    ) -> VerifyResult:
        rows, n = plan.scheduled, len(plan.scheduled)
        zeros, falses, empty = (0,) * n, (False,) * n, ("",) * n
        verify_ms, step_ms = times_ms
        failed: Sequence[str] = empty
        if context:
            failed = [NAN_LOGITS if _has_nan(context.get(index)) else "" for index in range(n)]
        if not tested:
            return VerifyResult(
                token_ids=np.zeros((n, 0), np.int32),
                num_tokens=zeros,
                num_accepted=zeros,
                num_verified=lengths,
                carried=falses,
                failed=failed,
                exhausted=falses,
                num_pruned=num_pruned,
                verify_ms=verify_ms,
                step_ms=step_ms,
                kept_rows=context,
            )
        assert logits is not None
        begun = self._clock.now_s()
        branches: BranchTokens | None = None if added is None else added.tokens
        found = self._sampler.sample(self._sampling.array, logits, logit_rows, branches)
        if plan.tested is not None and any(num_pending):
            slots, known = _pick(rows.slots, tested), _pick(rows.num_tokens, tested)
            plan.tested.add(self._sampling.array, slots, known, found.num_accepted, found.outcome)
        num_branches = num_followed = 0
        if added is not None and self._branches is not None:
            num_branches, num_followed = len(added.slots), found.followed.size
            self._branches.copy_followed(added, found.followed.tolist())
        sample_ms = 1e3 * (self._clock.now_s() - begun)
        verify_ms = self._sampler.pass_ms(verify_ms, sample_ms)
        token_ids = found.token_ids
        if len(tested) < n:
            token_ids = np.zeros((n, found.token_ids.shape[1]), np.int32)
            token_ids[tested] = found.token_ids
        num_tokens = _spread(found.num_tokens.tolist(), tested, n, 0)
        num_accepted = _spread(found.num_accepted.tolist(), tested, n, 0)
        outcomes: list[int] = found.outcome.tolist()
        carried: Sequence[bool] = falses
        if STILL_PENDING in outcomes:
            carried = _spread([outcome == STILL_PENDING for outcome in outcomes], tested, n, False)
        exhausted: Sequence[bool] = falses
        completed: frozenset[int] = frozenset()
        if FAILED in outcomes:
            of_test, exhausted, completed = self._failures(plan, tested, found)
            failed = [one or other for one, other in zip(failed, of_test, strict=True)]
        return VerifyResult(
            token_ids=token_ids,
            num_tokens=num_tokens,
            num_accepted=num_accepted,
            num_verified=lengths,
            carried=carried,
            failed=failed,
            exhausted=exhausted,
            num_pruned=num_pruned,
            verify_ms=verify_ms,
            step_ms=step_ms + sample_ms,
            kept_rows=self._keep_rows(plan, tested, lengths, num_tokens, token_ids, logits, context),
            completed=completed,
            num_pending=num_pending,
            num_branches=num_branches,
            num_followed=num_followed,
        )

    def _failures(
        self, plan: SchedulerOutput, tested: Sequence[int], found: AcceptResult
    ) -> tuple[list[str], list[bool], frozenset[int]]:
        """The failed, exhausted and completed fields of VerifyResult when some row failed."""
        failed, exhausted = [""] * len(plan.scheduled), [False] * len(plan.scheduled)
        completed = set()
        for row, index in enumerate(tested):
            if found.outcome[row] != FAILED:
                continue
            if found.row_status[row] != accept.RowStatus.EMPTY:
                failed[index] = NAN_LOGITS
                continue
            exhausted[index] = True
            request, guided = plan.scheduled.requests[index], self._sampling.guided
            if request.params.guide is not None:
                position = request.num_tokens + int(found.num_tokens[row])
                failed[index] = guided.error(request.slot, position)
                if guided.is_complete(request.slot, position):
                    completed.add(index)
        return failed, exhausted, frozenset(completed)

    def _keep_rows(
        self,
        plan: SchedulerOutput,
        tested: Sequence[int],
        lengths: Sequence[int],
        num_tokens: Sequence[int],
        token_ids: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        context: dict[int, KeptRows],
    ) -> dict[int, KeptRows]:
        """By index, for the requests that keep rows."""
        requests = plan.scheduled.requests
        if True not in [request.keeps_rows for request in requests]:
            return context
        first_rows = accumulate((1 + lengths[i] for i in tested), initial=0)
        keeping = [
            Kept(index, requests[index], first_row, token_ids[index, : num_tokens[index]].tolist())
            for index, first_row in zip(tested, first_rows, strict=False)
            if requests[index].keeps_rows
        ]
        return keep_rows(keeping, self._sampling.array, logits, self._vocab_size, self._sampler, context)


def _may_branch(plan: SchedulerOutput) -> bool:
    """Not if rows of the pass may be dropped, or are those of a prompt that have logits."""
    if plan.exits and plan.exits.boundaries:
        return False
    return not any(request.lacks_context_log_probs for request in plan.scheduled.requests)


def _has_nan(kept: KeptRows | None) -> bool:
    return kept is not None and bool(np.isnan(kept.context_log_probs).any())


def _pick(values: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """The values at ascending indices."""
    return values if len(indices) == len(values) else [values[index] for index in indices]


def _spread(values: Sequence[T], indices: Sequence[int], num_places: int, missing: T) -> Sequence[T]:
    """values[k] at the ascending indices[k], and `missing` elsewhere."""
    if len(indices) == num_places:
        return values
    places = [missing] * num_places
    for index, value in zip(indices, values, strict=True):
        places[index] = value
    return places
