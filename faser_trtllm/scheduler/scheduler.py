"""In-flight batching by TensorRT-LLM's rules. Only the scheduler writes requests.

There are no phases: a request is scheduled until its computed tokens catch up with its tokens and pending drafts, so
one rule covers prompt chunks, prefix hits, resumption after preemption and verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import Decision, Mode, StepView
from faser_trtllm.core.plan import (
    DraftResult,
    RequestOutput,
    ScheduledRequest,
    ScheduledRequests,
    SchedulerOutput,
    StepRecord,
    VerifyResult,
)
from faser_trtllm.core.request import FinishReason, Request, RequestState
from faser_trtllm.kvcache.base import BlockListener, KVCache, kv_gauges
from faser_trtllm.ops.requests.commit import BLOCK_FULL, BLOCK_SPARE, Committer
from faser_trtllm.ops.requests.table import RequestTable
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.deadlines import Deadlines
from faser_trtllm.scheduler.guide_budget import GuideBudget
from faser_trtllm.scheduler.held_plan import HeldPlan
from faser_trtllm.scheduler.limits import SchedulerLimits, check_room
from faser_trtllm.scheduler.plan_meter import PlanMeter
from faser_trtllm.scheduler.queue import WaitingQueue
from faser_trtllm.scheduler.roles import Role, Roles
from faser_trtllm.scheduler.rows import RowsLeft, runs_whole, share_draft_rows, split_running
from faser_trtllm.scheduler.slots import slot_to_free
from faser_trtllm.scheduler.update import apply_results

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Schedules steps on the executor's thread. Not thread-safe, except check()."""

    def __init__(
        self, kv: KVCache, limits: SchedulerLimits, policy: Policy, clock: Clock, waiting: WaitingQueue | None = None
    ) -> None:
        self._kv = kv
        self._limits = limits
        self._policy = policy
        self._clock = clock
        self._waiting = WaitingQueue() if waiting is None else waiting
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._table = RequestTable(limits.max_batch_size)
        self._committer = Committer(self._table, kv.bounds)
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._price = 0.0  # tokens per ms that the policy expects
        self._meter = PlanMeter(limits.max_draft_rows)  # of the steps since the last plan
        self._deadlines = Deadlines()
        self._guides = GuideBudget()
        self._num_held = 0  # steps that need no new plan, unless requests join or leave
        self._held: HeldPlan | None = None

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold slots, in order of admission."""
        return tuple(self._running)

    def check(self, request: Request) -> None:
        """Raise InvalidArgumentError if the request could never run. Thread-safe."""
        check_room(request, self._limits, self._kv)

    def add(self, request: Request) -> None:
        """Queue a request that check() accepted."""
        self._num_held = 0
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        self._waiting.push(request)

    def cancel(self, request_id: str) -> Request | None:
        """End a request with CANCELLED and return it; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.CANCELLED)
        return request

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request and free its slot and blocks; nothing here refers to it any more."""
        self._num_held, self._held = 0, None
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._give_up_slot(request)
        elif request.state is RequestState.WAITING:
            self._waiting.note_removed(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        request.num_drafts = 0
        self._waiting.forget(request)
        del self._requests[request.request_id]
        self._deadlines.compact(len(self._requests))
        if not self._requests:
            self._meter.rest()

    def has_work(self) -> bool:
        return bool(self._requests)

    def gauges(self) -> dict[str, float]:
        """Return the state of the queue and the cache."""
        return {
            "price_tokens_per_ms": self._price,
            "max_batch_size": self._limits.max_batch_size,
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
        } | kv_gauges(self._kv)

    def watch_cache(self, listener: BlockListener) -> bool:
        """Report prefix cache insertions and evictions to the listener; return False if that is not supported."""
        return self._kv.watch(listener)

    def forget_draft_kv(self) -> None:
        """Discard the KV of the draft model, because it may have NaN or another draft model takes its place."""
        for request in self._running:
            request.num_draft_computed_tokens = 0
        self._kv.forget_draft()

    def check_integrity(self) -> None:
        """Check slots and blocks between steps; raise AssertionError if they are inconsistent."""
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._limits.max_batch_size)), "a slot leaked"
        self._kv.check_integrity()

    def schedule(self) -> SchedulerOutput:
        """Plan one step, with the rows of each request, and allocate their blocks."""
        now_s = self._clock.now_s()
        is_late = self._deadlines.is_due(now_s)
        if self._num_held and self._held is not None and not is_late and self._has_ample_blocks():
            self._num_held -= 1
            self._meter.begin_step(now_s)
            return self._steady_step(self._held)
        finished = self._expire() if is_late else ()
        shared = self._share_slots() if self._waiting else []
        decoding, contexts = split_running(self._running)
        view = self._view(decoding, contexts, self._waiting.first(len(self._free_slots)) if self._waiting else ())
        decision = self._decide(view)
        roles = self._guides.assign_roles(self._running, decoding, decision)
        is_whole = Role.NONE not in roles.values() and not contexts and not self._waiting
        if is_whole and decision.mode is Mode.SERIAL and self._has_ample_blocks():
            self._num_held = decision.num_held
            self._held = HeldPlan(view, decision)
            for request in decoding:
                request.was_drafted = False
            return self._steady_step(self._held, finished)
        self._num_held = 0
        paused = list(shared)
        scheduled = self._schedule_running(decoding, contexts, decision, roles, paused)
        admitted = self._admit(scheduled) if paused == shared else []
        return self._mixed_step(scheduled, decision, admitted, paused, finished)

    def _mixed_step(
        self,
        scheduled: Sequence[ScheduledRequest],
        decision: Decision,
        admitted: Sequence[Request],
        paused: Sequence[Request],
        finished: tuple[Request, ...],
    ) -> SchedulerOutput:
        rows = ScheduledRequests.of(scheduled, decision.model_lengths)
        decoding, others = rows.requests[: rows.num_decoding], rows.requests[rows.num_decoding :]
        return SchedulerOutput(
            scheduled=rows,
            view=self._view(decoding, [request for request in others if not request.is_decoding]),
            decision=decision,
            admitted=tuple(admitted),
            paused=tuple(paused),
            is_drafting=any(decision.lengths),
            finished=finished,
        )

    def _decide(self, view: StepView) -> Decision:
        """Report the outcome of the last plan to the policy and ask it for the next one."""
        self._meter.begin_step(view.now_s)
        stats = self._meter.take()
        if stats.num_steps:
            self._policy.observe(stats)
        decision = self._policy.plan(view)
        self._price = decision.price
        return decision

    def update(self, plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> list[RequestOutput]:
        """Commit the results of the pass and return the requests that have new tokens or ended."""
        rows = plan.scheduled
        outputs, due = apply_results(self._committer, rows, drafts, result, self._clock.now_s())
        errors = {rows.requests[index]: end.error for index, end in result.ended.items() if end.error is not None}
        for request in [rows.requests[index] for index, end in result.ended.items() if end.is_kv_wrong]:
            self._kv.discard(request.slot)
        marked = [(request, bits) for request, bits in zip(rows.requests, due, strict=True) if bits]
        for request, bits in marked:
            if bits & BLOCK_FULL:
                counts = request.num_computed_tokens, request.num_draft_computed_tokens
                self._kv.commit(request.slot, request.tokens, *counts)
        for output in outputs:
            if output.finish_reason is not None:
                self.finish(output.request, output.finish_reason, errors.get(output.request))
        self._rewind(rows, [request for request, bits in marked if bits & BLOCK_SPARE])
        return outputs

    def observe(self, record: StepRecord) -> None:
        """Note that a step is over; the policy learns from it before its next plan."""
        self._meter.note(record)
        if not self._requests:
            self._meter.rest()

    def note_guides(self, plan: SchedulerOutput, costs: Mapping[int, tuple[float, int]]) -> None:
        """Record the time of a step's masks, before its update. costs: by slot, (ms, number of masks)."""
        if self._guides.note(plan.scheduled, costs):
            self._num_held = 0

    def _rewind(self, rows: ScheduledRequests, spare: Sequence[Request]) -> None:
        """Free the blocks of rejected rows. spare: the requests that have empty blocks."""
        for request in spare:
            if request.slot >= 0:
                self._kv.rewind(request.slot, request.num_tokens + request.num_drafts)

    def _expire(self) -> tuple[Request, ...]:
        late = self._deadlines.take(self._clock.now_s())
        for request in late:
            self.finish(request, FinishReason.TIMEOUT)
        return tuple(late)

    def _view(
        self, decoding: Sequence[Request], contexts: Sequence[Request], joining: Sequence[Request] = ()
    ) -> StepView:
        """Return the policy's view. joining: waiting requests with free slots, whose prompts run in the same pass."""
        num_context_rows = sum([r.num_tokens - r.num_computed_tokens for r in (*contexts, *joining)])
        num_waiting, num_rows = len(self._waiting), self._limits.max_num_tokens - len(decoding)
        return StepView(
            decoding=decoding,
            num_context_rows=min(num_context_rows, num_rows),
            num_waiting=num_waiting,
            now_s=self._clock.now_s(),
            num_joining=len(contexts) + min(num_waiting, len(self._free_slots)),
            num_free_rows=max(0, num_rows - num_context_rows),
        )

    def _has_ample_blocks(self) -> bool:
        """Return True if every request can get all blocks it may want in this step, in any order."""
        blocks_per_request = 2 + self._limits.max_draft_len // self._kv.tokens_per_block
        return self._kv.num_free_blocks >= blocks_per_request * len(self._running)

    def _steady_step(self, held: HeldPlan, finished: tuple[Request, ...] = ()) -> SchedulerOutput:
        """Schedule a step in which all requests decode, none waits and blocks are ample."""
        counts = self._table.counts.take(held.slots, 0)
        rows = held.schedule(counts, self._limits.max_num_tokens - len(counts))
        allocated = self._kv.allocate_many(held.slots, rows.num_tokens + rows.num_drafts)
        assert allocated, "blocks were ample"
        return SchedulerOutput(rows, held.view, held.decision, is_drafting=held.is_drafting, finished=finished)

    def _schedule_running(
        self, decoding: list[Request], contexts: list[Request], decision: Decision, roles: Roles, paused: list[Request]
    ) -> list[ScheduledRequest]:
        """Schedule rows and blocks for requests with slots; preempt the latest requests if blocks run out."""
        joining = self._waiting.first(1) if self._free_slots else []
        shares = share_draft_rows(decoding, decision.lengths, roles, contexts or joining, self._limits)
        num_others = sum(not context.lacks_context_log_probs for context in contexts) + len(joining)
        left = RowsLeft(self._limits, len(shares) + sum(shares.values()), num_others=num_others)
        scheduled: list[ScheduledRequest] = []
        for request in list(self._running):
            if request.state is not RequestState.RUNNING:
                continue  # preempted for an earlier request
            if request.slot in shares:
                item = self._place_decoding(request, shares[request.slot], roles[request.slot], paused)
                if item is not None:
                    scheduled.append(item)
            elif roles.get(request.slot) is not Role.NONE:
                item = self._place_context(request, left, paused)
                if item is not None:
                    left.take(item)
                    scheduled.append(item)
        # Drafts come after all other rows, so that no request is preempted for them.
        for index, item in enumerate(scheduled):
            request, share = item.request, shares.get(item.request.slot, 0)
            role = roles.get(request.slot, Role.VERIFY)
            wants_drafts = role is not Role.VERIFY and share > item.num_drafts
            if wants_drafts and self._kv.allocate(request.slot, request.num_tokens + share):
                max_verified = share if role is Role.BOTH else item.max_verified
                scheduled[index] = ScheduledRequest(request, item.num_new_tokens, share, max_verified)
            elif role is Role.DRAFT:  # nothing to draft with: run its row instead, so that it progresses
                scheduled[index] = ScheduledRequest(request, 1, item.num_drafts, min(share, item.num_drafts))
            request.was_drafted = scheduled[index].num_new_tokens == 0
        return scheduled

    def _place_decoding(
        self, request: Request, share: int, role: Role, paused: list[Request]
    ) -> ScheduledRequest | None:
        """Allocate blocks for the last committed token and the pending drafts; None if the request does not run."""
        pending = request.num_drafts
        if not self._make_room(request, request.num_tokens + pending, paused):
            return None
        num_new = 0 if role is Role.DRAFT else 1
        return ScheduledRequest(request, num_new, pending, num_new * min(share, pending))

    def _place_context(self, request: Request, left: RowsLeft, paused: list[Request]) -> ScheduledRequest | None:
        length = left.chunk_length(request)
        if length == 0 or not self._make_room(request, request.num_computed_tokens + length, paused):
            return None
        return ScheduledRequest(request, length, 0, 0)

    def _make_room(self, request: Request, num_tokens: int, paused: list[Request]) -> bool:
        """Allocate, preempting the latest requests as needed; return False if the request itself was the latest."""
        while not self._kv.allocate(request.slot, num_tokens):
            assert self._limits.capacity_policy is CapacitySchedulerPolicy.MAX_UTILIZATION, (
                "GUARANTEED_NO_EVICT reserved too few blocks"
            )
            victim = self._running[-1]
            self._preempt(victim)
            paused.append(victim)
            if victim is request:
                return False
        return True

    def _share_slots(self) -> list[Request]:
        """Preempt a request of a client that holds many slots, for one with fewer, which may be admitted next."""
        self._waiting.charge()
        request = None if self._free_slots else slot_to_free(self._running, self._waiting, self._kv)
        if request is None:
            return []
        self._preempt(request)
        return [request]

    def _preempt(self, request: Request) -> None:
        """Preempt a request. Its pending drafts stay, since their number affects which requests are preempted and when:
        dropping them would favor some drafts over others."""
        self._running.remove(request)
        self._give_up_slot(request)
        request.state = RequestState.WAITING
        request.num_computed_tokens = request.num_draft_computed_tokens = 0
        request.stats.num_preemptions += 1
        self._waiting.push(request)

    def _admit(self, scheduled: list[ScheduledRequest]) -> list[Request]:
        """Give slots to waiting requests, in order; stop at the first that does not fit."""
        kv = self._kv
        admitted: list[Request] = []
        placed = {item.request.slot for item in scheduled}
        if any(r.slot not in placed and not r.is_decoding and runs_whole(r, self._limits) for r in self._running):
            return admitted  # a whole prompt, admitted without a mask, could wait forever for rows that others take
        left = RowsLeft(self._limits, scheduled=scheduled)
        while self._free_slots and left.num_rows > 0:
            request = self._waiting.peek()
            if request is None or not self._fits(request, admitted):
                break
            slot = self._free_slots[-1]
            prefix = kv.add_sequence(slot, request.tokens, request.num_tokens_to_look_up, request.params.salt)
            request.num_computed_tokens = prefix.num_cached_tokens
            request.num_draft_computed_tokens = prefix.num_draft_cached_tokens
            length = left.chunk_length(request) if (runs := self._guides.admits(request)) else 0
            if runs and (length == 0 or not kv.allocate(slot, request.num_computed_tokens + length)):
                kv.free(slot)
                request.num_computed_tokens = request.num_draft_computed_tokens = 0
                break
            self._free_slots.pop()
            self._waiting.pop()
            self._table.enter(slot, request)
            kv.num_reused_blocks += prefix.num_cached_tokens // kv.tokens_per_block
            request.state = RequestState.RUNNING
            if request.stats.first_scheduled_s is None:
                request.stats.first_scheduled_s = self._clock.now_s()
                request.stats.num_cached_tokens = prefix.num_cached_tokens
            self._running.append(request)
            admitted.append(request)
            if runs:
                scheduled.append(ScheduledRequest(request, length, 0, 0))
                left.take(scheduled[-1])
        return admitted

    def _fits(self, request: Request, admitted: Sequence[Request]) -> bool:
        """Return True if the cache has room for the request and all running ones to their ends. With MAX_UTILIZATION:
        room for its next tokens, next to those of contexts and of requests admitted in this step."""
        kv, running = self._kv, self._running
        if self._limits.capacity_policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
            starting = [r for r in running if not r.is_decoding or r in admitted]
            reserved = sum(kv.num_blocks_for(r.num_tokens + 1) - kv.num_held_blocks(r.slot) for r in starting)
            return kv.num_blocks_for(request.num_tokens + 1) <= kv.num_free_blocks - reserved
        reserved = sum(kv.num_blocks_for(r.max_num_tokens) - kv.num_held_blocks(r.slot) for r in running)
        return kv.num_blocks_for(request.max_num_tokens) <= kv.num_free_blocks - reserved

    def _give_up_slot(self, request: Request) -> None:
        self._kv.free(request.slot)
        self._free_slots.append(request.slot)
        self._table.leave(request)
