"""In-flight batching by TensorRT-LLM's schedulers, which admit, chunk and pause requests.

We set each request's draft length before they run, so that they count its rows and blocks; after the pass we give back
the blocks after the accepted tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.config import CapacitySchedulerPolicy, ContextChunkingPolicy
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.plan import (
    DraftResult,
    RequestOutput,
    ScheduledRequest,
    ScheduledRequests,
    SchedulerOutput,
    VerifyResult,
)
from faser_trtllm.core.request import FinishReason, Request, RequestState
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.queue import WaitingQueue
from faser_trtllm.scheduler.roles import Role, Roles
from faser_trtllm.scheduler.rows import share_draft_rows
from faser_trtllm.scheduler.scheduler import Scheduler
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager

_BEAM = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """The context tokens to run and the requests that decode, by our request ids, and the requests to pause."""

    chunks: dict[str, int]
    generations: set[str]
    paused: list[Request]


class TrtllmScheduler(Scheduler):
    """A Scheduler with TensorRT-LLM's classes. bindings: see trtllm/gate.py.

    TensorRT-LLM is given the running requests in order of admission, then as many of the queue as slots are free.
    """

    def __init__(
        self,
        bindings: Any,
        kv: TrtllmKVCacheManager,
        limits: SchedulerLimits,
        policy: Policy,
        clock: Clock,
        chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
    ) -> None:
        super().__init__(kv, limits, policy, clock, WaitingQueue(is_fair=False))
        self._bindings = bindings
        self._blocks = kv
        self._llm_requests: dict[str, Any] = {}
        self._ids = itertools.count()
        self._capacity = bindings.CapacityScheduler(
            max_num_requests=limits.max_batch_size,
            capacity_scheduler_policy=getattr(bindings.CapacitySchedulerPolicy, limits.capacity_policy.value),
            has_kv_cache_manager=True,
        )
        chunking = None
        if limits.enable_chunked_context:
            policy_of_chunks = getattr(bindings.ContextChunkingPolicy, chunking_policy.value)
            chunking = bindings.ContextChunkingConfig(policy_of_chunks, limits.chunk_unit)
        self._micro_batch = bindings.MicroBatchScheduler(
            ctx_chunk_config=chunking, max_context_length=limits.max_num_tokens
        )

    def check(self, request: Request) -> None:
        super().check(request)
        if request.params.return_context_log_probs:
            raise InvalidArgumentError(
                "was sent, but TensorRT-LLM's scheduler does not know how few rows of a pass have logits; leave it "
                "out, or serve with scheduler: native",
                "return_context_log_probs",
            )
        limits = self._limits
        may_grow = limits.capacity_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        if may_grow and not limits.enable_chunked_context and request.max_num_tokens > limits.max_num_tokens:
            raise InvalidArgumentError(
                f"and prompt are {request.max_num_tokens} tokens, max_num_tokens is {limits.max_num_tokens}, and "
                "enable_chunked_context is off, so that TensorRT-LLM could not resume the request after a pause; lower "
                "max_tokens or turn it on",
                "max_tokens",
                request.max_num_tokens,
                limits.max_num_tokens,
            )

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        super().finish(request, reason, error)
        self._llm_requests.pop(request.request_id, None)

    def schedule(self) -> SchedulerOutput:
        """Decide the rows of each request in one step, and allocate their blocks."""
        finished = self._expire()
        candidates = self._running + self._waiting.first(len(self._free_slots))
        contexts = [request for request in candidates if self._in_context(request)]
        decoding = [request for request in self._running if not self._in_context(request)]
        started = [request for request in contexts if request.state is RequestState.RUNNING]
        decision = self._decide(self._view(decoding, started))
        roles = self._guides.assign_roles(self._running, decoding, decision)
        shares = share_draft_rows(decoding, decision.lengths, {}, contexts, self._limits)  # also of those that rest
        choice = self._ask(candidates, shares, roles)
        for request in choice.paused:
            self._pause(request)
        admitted = [r for r in candidates if r.request_id in choice.chunks and r.state is RequestState.WAITING]
        for request in admitted:
            self._admit_request(request)
        scheduled = self._place_chosen(choice, shares, roles)
        return self._mixed_step(scheduled, decision, admitted, choice.paused, finished)

    def update(self, plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> list[RequestOutput]:
        outputs = super().update(plan, drafts, result)
        for request in plan.scheduled.requests:
            if not request.is_finished:
                self._follow(request)
        return outputs

    def _rewind(self, rows: ScheduledRequests, spare: Sequence[Request]) -> None:
        """Give back the blocks of rejected rows; the draft model recomputes its KV in them later."""
        for request in rows.requests:
            if request.is_finished or self._in_context(request):
                continue  # a request in its context holds exactly its prompt's blocks
            self._blocks.rewind(request.slot, request.num_computed_tokens)
            held = self._blocks.num_held_blocks(request.slot) * self._blocks.tokens_per_block
            request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, held)

    def _ask(self, candidates: Sequence[Request], shares: dict[int, int], roles: Roles) -> _Choice:
        """Run TensorRT-LLM's two schedulers, which choose by free blocks and then by the rows of a pass."""
        requests = {self._llm_request(request).request_id: request for request in candidates}
        for request in candidates:
            self._llm_request(request).draft_tokens = [0] * shares.get(request.slot, 0)
        fitting, _, paused = self._capacity([self._llm_request(r) for r in candidates], self._blocks.impl)
        contexts, generations = self._micro_batch(
            fitting, self._resting(roles), self._limits.max_batch_size, self._limits.max_num_tokens
        )
        return _Choice(
            {requests[c.request_id].request_id: int(c.context_chunk_size) for c in contexts},
            {requests[g.request_id].request_id for g in generations},
            [requests[p.request_id] for p in paused],
        )

    def _resting(self, roles: Roles) -> Any:
        """Return the ids of requests that rest in this step, which TensorRT-LLM treats as a separate micro batch."""
        resting = self._bindings.ReqIdsSet()
        for request in self._running:
            if roles.get(request.slot) is Role.NONE:
                resting.insert(self._llm_request(request).request_id)
        return resting

    def _place_chosen(self, choice: _Choice, shares: dict[int, int], roles: Roles) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        for request in self._running:
            request.was_drafted = False
            if request.request_id in choice.chunks:
                scheduled.append(ScheduledRequest(request, choice.chunks[request.request_id], 0, 0))
            elif request.request_id in choice.generations:
                scheduled.append(self._place(request, shares[request.slot], roles[request.slot]))
        # Pending drafts that TensorRT-LLM did not count get blocks last, or wait.
        for item in scheduled:
            request, share = item.request, shares.get(item.request.slot, 0)
            if item.num_drafts > share and not self._blocks.allocate(
                request.slot, request.num_tokens + item.num_drafts
            ):
                # They stay pending without rows; the draft model recomputes their KV later.
                newest = request.num_tokens + share - 1
                request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, newest)
        return scheduled

    def _place(self, request: Request, share: int, role: Role) -> ScheduledRequest:
        allocated = self._blocks.allocate(request.slot, request.num_tokens + share)
        assert allocated, "TensorRT-LLM's capacity scheduler counted other blocks than its cache"
        pending = request.num_drafts
        wanted = pending if role is Role.VERIFY else max(pending, share)
        if role is Role.DRAFT and wanted > pending:
            request.was_drafted = True
            return ScheduledRequest(request, 0, wanted, 0)
        return ScheduledRequest(request, 1, wanted, share if role is Role.BOTH else min(share, pending))

    def _admit_request(self, request: Request) -> None:
        """Assign a slot and the blocks of the whole context."""
        self._waiting.take(request)
        self._table.enter(self._free_slots.pop(), request)
        request.state = RequestState.RUNNING
        if request.stats.first_scheduled_s is None:
            request.stats.first_scheduled_s = self._clock.now_s()
        self._running.append(request)
        self._blocks.hold(request.slot, self._llm_request(request))
        self._blocks.add_sequence(request.slot, request.tokens, request.num_tokens)

    def _pause(self, request: Request) -> None:
        self._preempt(request)
        self._llm_request(request).pause(self._limits.max_seq_len)

    def _llm_request(self, request: Request) -> Any:
        """Return TensorRT-LLM's view of a request, created on first use."""
        known = self._llm_requests.get(request.request_id)
        if known is None:
            known = self._llm_requests[request.request_id] = self._bindings.LlmRequest(
                request_id=next(self._ids),
                max_new_tokens=request.max_num_tokens - request.prompt_len,
                input_tokens=request.tokens[: request.prompt_len].tolist(),
                sampling_config=self._bindings.SamplingConfig(1),
                is_streaming=False,
            )
        return known

    def _in_context(self, request: Request) -> bool:
        """Return True in TensorRT-LLM's context phase, which includes a prompt's last chunk of one token."""
        return bool(self._llm_request(request).is_context_init_state)

    def _follow(self, request: Request) -> None:
        """Update TensorRT-LLM's view after a pass: the finished chunk and new tokens."""
        llm_request = self._llm_request(request)
        if self._in_context(request):
            llm_request.move_to_next_context_chunk()
            if llm_request.context_remaining_length == 0:
                llm_request.state = self._bindings.LlmRequestState.GENERATION_IN_PROGRESS
        for token in request.tokens[llm_request.get_num_tokens(_BEAM) : request.num_tokens].tolist():
            llm_request.add_new_token(token, _BEAM)
