"""The verifying half of a step: one target pass over drafts and prompts, then rejection sampling."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import Ended, KeptRows, ScheduledRequests, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import FinishReason
from faser_trtllm.engine.base import Engine
from faser_trtllm.executor.branches import BranchRows
from faser_trtllm.executor.draft_worker import Drafting
from faser_trtllm.executor.kept_rows import ContextRows, Kept, keep_rows
from faser_trtllm.executor.pruner import Pruner
from faser_trtllm.native import FAILED, ROW_EMPTY
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.requests.fill_rows import RowFiller
from faser_trtllm.sampling.rejection import BranchTokens, RejectionSampler, VerificationRows
from faser_trtllm.sampling.table import SamplingTable

NAN_LOGITS = Ended(
    FinishReason.ERROR,
    "the target model returned NaN or infinite logits for this request; check the checkpoint's weights",
    is_kv_wrong=True,
)
_NOTHING = np.zeros(0, np.int32)


class Verifier:
    """Runs the rows that the plan assigns to each request, and samples the tokens that follow from them."""

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingTable,
        block_table: Int32Array,
        clock: Clock,
        sampler: RejectionSampler,
        branches: BranchRows | None = None,
    ) -> None:
        """sampler: for the logits of `engine`. branches: adds branches to passes that verify drafts made before them
        and are not pruned."""
        spec = engine.spec
        self._sampling = sampling
        self._clock = clock
        self._rows = RowFiller(spec.max_batch_size, spec.max_num_tokens, block_table)
        self._engine = engine
        self._pruner = Pruner(engine, sampling)
        self.tokens_per_block = spec.tokens_per_block
        self._vocab_size = spec.vocab_size
        self._branches = branches
        self._sampler = sampler

    def verify(self, plan: SchedulerOutput, drafting: Drafting) -> VerifyResult:
        """Run the pass and sample. Unless the mode is serial, the pass runs while drafting goes on: it verifies drafts
        that were pending before, and the sampler also sees those drafted meanwhile."""
        started_s, rows = self._clock.now_s(), plan.scheduled
        is_serial = plan.mode is Mode.SERIAL
        pending = rows.num_pending + drafting.result().num_new_drafts if is_serial else rows.num_pending
        num_verified = self._lengths(plan, pending)
        branches: BranchTokens | None = None
        if self._branches is not None and is_serial and _may_branch(plan):
            branches = self._branches.pick(rows, pending, num_verified, plan.decision.verification)
        batch, num_context = self._fill(rows, num_verified)
        if self._branches is not None and branches is not None:
            batch = self._branches.add(batch, rows, branches)
        begun_s = self._clock.now_s()
        logits, num_pruned = self._pruner.forward(plan, batch, num_verified) if batch.num_requests else (None, None)
        forward_ms = 1e3 * (self._clock.now_s() - begun_s)
        drafts = drafting.result()
        step_ms = 1e3 * (self._clock.now_s() - started_s) + (drafts.draft_ms if is_serial else 0.0)
        kept: dict[int, KeptRows] = {}
        if num_context:
            context = ContextRows.split(rows, num_verified, num_context)
            kept = context.keep(logits, self._sampler)
            logits = self._sampler.take(logits, np.array(context.sampled_rows, np.int64))
        ended = {index: NAN_LOGITS for index, part in kept.items() if np.isnan(part.context_log_probs).any()}
        if not rows.num_sampled:
            nothing = (np.zeros((0, 0), np.int32), _NOTHING, _NOTHING, _NOTHING)
            return VerifyResult(*nothing, num_verified, num_pruned, forward_ms, step_ms, ended, kept)
        begun_s = self._clock.now_s()
        if not is_serial:
            pending = rows.num_pending + drafts.num_new_drafts
        found = self._sample(plan, num_verified, pending, logits, branches)
        if self._branches is not None and branches is not None:
            self._branches.copy_followed(rows, branches, found.followed)
        sample_ms = 1e3 * (self._clock.now_s() - begun_s)
        return VerifyResult(
            token_ids=found.token_ids,
            num_tokens=found.num_tokens,
            num_accepted=found.num_accepted,
            outcome=found.outcome,
            num_verified=num_verified,
            num_pruned=num_pruned,
            verify_ms=self._sampler.pass_ms(forward_ms, sample_ms),
            step_ms=step_ms + sample_ms,
            ended=self._ended(rows, found) | ended if FAILED in found.outcome.tolist() else ended,
            kept_rows=self._keep_rows(rows, num_verified, found, logits, kept),
            num_branches=0 if branches is None else branches.requests.size,
            num_followed=found.followed.size,
            num_experts=self._engine.distinct_experts,
        )

    def _lengths(self, plan: SchedulerOutput, pending: Int32Array) -> Int32Array:
        """Return how many of the pending drafts to verify, [num_requests]."""
        rows, rule = plan.scheduled, plan.decision.verification
        lengths: Int32Array = np.minimum(pending, rows.max_verified)
        if rule is not None and any(lengths.tolist()):
            n = rows.num_decoding
            wanted = rule.lengths(self._sampling.array, rows.slots[:n], rows.num_tokens[:n], pending[:n])
            np.minimum(lengths[:n], wanted, out=lengths[:n])
        return lengths

    def _fill(self, rows: ScheduledRequests, num_verified: Int32Array) -> tuple[RaggedBatch, dict[int, int]]:
        """Return the batch, and by index how many logit rows for prompt log probs precede a request's own."""
        n = rows.num_running
        num_logits, num_context = num_verified + 1, {}
        if rows.num_decoding < len(rows):
            num_logits[rows.num_sampled :] = 0
            for index in range(rows.num_decoding, n):
                request = rows.requests[index]
                if request.lacks_context_log_probs:
                    first = int(rows.num_computed[index])
                    end = min(first + int(rows.num_new_tokens[index]), int(rows.num_tokens[index]) - 1)
                    count = end - max(first, len(request.context_log_probs))
                    if count > 0:
                        num_context[index] = count
                        num_logits[index] += count
        end = rows.num_computed + rows.num_new_tokens + num_verified
        columns = (rows.slots[:n], rows.num_computed[:n], end[:n], num_logits[:n])
        return self._rows.fill(self._sampling.array, *columns), num_context

    def _sample(
        self,
        plan: SchedulerOutput,
        num_verified: Int32Array,
        pending: Int32Array,
        logits: Any,
        branches: BranchTokens | None,
    ) -> AcceptResult:
        n, sampling, guided = plan.scheduled.num_sampled, self._sampling.array, self._sampling.guided
        slots, known, pending = plan.scheduled.slots[:n], plan.scheduled.num_tokens[:n], pending[:n]
        rows = VerificationRows(slots, num_verified[:n] + 1, known, pending)
        if guided.slots:
            for slot, num_tokens, count in zip(slots.tolist(), known.tolist(), rows.num_rows.tolist(), strict=True):
                if slot in guided.slots:
                    guided.prepare(slot, num_tokens, count)
        found = self._sampler.sample(sampling, logits, rows, branches)
        if plan.decision.tested is not None and any(pending.tolist()):
            plan.decision.tested.add(sampling, slots, known, found.num_accepted, found.outcome)
        return found

    def _ended(self, rows: ScheduledRequests, found: AcceptResult) -> dict[int, Ended]:
        """Return the requests that end because one of their rows failed, by index."""
        ended = {}
        for index in np.flatnonzero(found.outcome == FAILED).tolist():
            request, guided = rows.requests[index], self._sampling.guided
            if found.row_status[index] != ROW_EMPTY:
                ended[index] = NAN_LOGITS
                continue
            ended[index] = Ended(FinishReason.LENGTH)  # no token was allowed
            if request.params.guide is not None:
                position = request.num_tokens + int(found.num_tokens[index])
                error = guided.error(request.slot, position)
                if error:
                    ended[index] = Ended(FinishReason.ERROR, error)
                elif guided.is_complete(request.slot, position):
                    ended[index] = Ended(FinishReason.STOP)
        return ended

    def _keep_rows(
        self,
        rows: ScheduledRequests,
        num_verified: Int32Array,
        found: AcceptResult,
        logits: Any,
        context: dict[int, KeptRows],
    ) -> dict[int, KeptRows]:
        """Return what requests keep, by index."""
        requests = rows.requests[: rows.num_sampled]
        if True not in [request.keeps_rows for request in requests]:
            return context
        first_rows = accumulate((1 + length for length in num_verified.tolist()), initial=0)
        keeping = [
            Kept(index, request, first_row, found.token_ids[index, : found.num_tokens[index]].tolist())
            for index, (request, first_row) in enumerate(zip(requests, first_rows, strict=False))
            if request.keeps_rows
        ]
        return keep_rows(keeping, self._sampling.array, logits, self._vocab_size, self._sampler, context)


def _may_branch(plan: SchedulerOutput) -> bool:
    """Return False if rows of the pass may be dropped, or if it has logits of prompt rows."""
    exits = plan.decision.exits
    if exits and exits.boundaries:
        return False
    return not any(request.lacks_context_log_probs for request in plan.scheduled.requests)
