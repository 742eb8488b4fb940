"""Draft for another system's executor with our policies and engine, also ahead, while the executor verifies.

Requests are known only by id and tokens; nothing is imported from TensorRT-LLM. The caller accepts drafts, so nothing
here can change an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import Decision, Mode, PlanStats, StepView, VerifiedDrafts
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, ScheduledRequests, SchedulerOutput
from faser_trtllm.core.request import Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.drafters.cascade import Cascade
from faser_trtllm.drafters.model import ModelDrafter
from faser_trtllm.engine.base import Engine
from faser_trtllm.executor.draft_worker import Drafting, DraftWorker
from faser_trtllm.policy.base import Policy
from faser_trtllm.sampling.table import SamplingTable

_COMPARED = 16  # tokens at each end of a text that are compared to recognize a request


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for drafts. token_ids: all tokens so far. max_drafts: drafts that its executor has room for."""

    request_id: int
    token_ids: Sequence[int]
    max_new_tokens: int  # tokens that it may still generate
    max_drafts: int


def num_pending_drafts(max_draft_len: int, draft_ahead: bool) -> int:
    """Return the most pending drafts of a request: a proposal, a guess of the target's token, and the next proposal."""
    return 2 * max_draft_len + 1 if draft_ahead else max_draft_len


@dataclass(slots=True)
class _Ahead:
    """A drafting call that runs while the target verifies."""

    plan: SchedulerOutput
    drafting: Drafting


class DraftCore:
    """Drafts for successive batches. One caller at a time; close() waits for drafting ahead.

    A request is tracked by its id. Its draft KV is in a slot. If no slot is free, a new request takes the least
    recently used one, so end() is optional; it frees a slot before the next propose() needs one.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        clock: Clock,
        *,
        max_draft_len: int,
        draft_ahead: bool = True,
        draft_window: int | None = None,
    ) -> None:
        """Use a draft engine with KV blocks for max_batch_size requests of max_seq_len tokens.

        draft_window: drafts only for requests of at most so many tokens; None: for all.
        """
        spec = engine.spec
        blocks = -(-spec.max_seq_len // spec.tokens_per_block)
        if spec.num_blocks < spec.max_batch_size * blocks:
            raise ValueError(f"the engine has {spec.num_blocks} KV blocks, {spec.max_batch_size} x {blocks} are needed")
        block_table = np.arange(spec.max_batch_size * blocks, dtype=np.int32).reshape(spec.max_batch_size, blocks)
        self.max_draft_len = max_draft_len
        self._capacity = num_pending_drafts(max_draft_len, draft_ahead)
        self._spec = spec
        self._policy = policy
        self._clock = clock
        self._sampling = SamplingTable(spec.max_batch_size, spec.vocab_size, self._capacity)
        model = ModelDrafter(engine, self._sampling, block_table, max_draft_len, clock)
        self._drafter = Cascade([model], self._sampling, spec.vocab_size, clock, draft_window)
        self._draft_ahead = draft_ahead
        ahead = ModelDrafter(engine, self._sampling, block_table, self._capacity, clock)
        self._ahead_worker = DraftWorker(Cascade([ahead], self._sampling, spec.vocab_size, clock, draft_window))
        self._ahead: _Ahead | None = None
        self._is_drafting = policy.name != "off"  # the last step wanted drafts
        self._known: OrderedDict[int, Request] = OrderedDict()  # most recently used last
        self._free_slots = list(range(spec.max_batch_size))
        self._ended: list[int] = []  # since the last call, while their drafting ahead may still run
        self._last: _LastStep | None = None
        self.num_reused_drafts = 0  # proposed without drafting in the step
        self.num_dropped_drafts = 0  # dropped because the target chose other tokens

    def propose(self, asked: Sequence[Asked], coming: Sequence[Asked] = ()) -> list[list[int]]:
        """Return the drafts for each request, at most max_drafts and max_draft_len; [] if drafting is not worthwhile.

        coming: requests whose prompts the target runs in this step; the draft model runs them at the same time.
        """
        self._take_ahead()
        self._observe(asked)
        self._forget_ended()
        followed = self._follow_all([*asked, *coming])
        requests = [request for request in followed[: len(asked)] if request is not None]
        readers = [request for request in followed[len(asked) :] if request is not None]
        proposals: list[list[int]] = [[] for _ in asked]
        planned: Sequence[int] = ()
        proposed: Sequence[int] = ()
        if requests:
            num_coming = sum(len(one.token_ids) for one in coming)
            view = StepView(requests, num_coming, 0, self._clock.now_s())
            plan = self._policy.plan(view)
            planned = plan.lengths
            drafts = self._draft(view, plan)
            pending = [request.num_drafts for request in requests]
            wanted = pending
            if plan.verification is not None:
                columns = ([r.slot for r in requests], [r.num_tokens for r in requests], pending)
                wanted = plan.verification.lengths(self._sampling.array, *np.array(columns, np.int32)).tolist()
            lengths = dict(zip(map(id, requests), wanted, strict=True))
            for place, request in enumerate(followed[: len(asked)]):
                if request is not None:
                    length = min(lengths[id(request)], request.num_drafts, asked[place].max_drafts)
                    proposals[place] = _pending(request)[:length].tolist()
                    lengths[id(request)] = length
            proposed = [lengths[id(request)] for request in requests]
            self._last = _LastStep(view, plan.tested, proposed, drafts, self._clock.now_s())
            self._is_drafting = any(planned)
        if self._draft_ahead and self._is_drafting:
            self._start_ahead(requests, proposed, planned, readers)
        return proposals

    def end(self, request_id: int) -> None:
        """Free the slot of a request that ended or was paused, from the next call on. Unknown ids are ignored."""
        self._ended.append(request_id)

    def close(self) -> None:
        """Wait for drafting ahead and end its thread; the caller owns the engine."""
        self._ahead_worker.close()

    def _follow_all(self, asked: Sequence[Asked]) -> list[Request | None]:
        """Return our request for each, None where the draft model cannot follow it or has no slot."""
        for one in asked:
            if one.request_id in self._known:
                self._known.move_to_end(one.request_id)  # so that no new request takes its slot
        room = self._spec.max_batch_size
        return [self._follow(one) if place < room else None for place, one in enumerate(asked)]

    def _follow(self, one: Asked) -> Request | None:
        """Return our request with its new tokens; None if the draft model cannot follow it."""
        request = self._known.get(one.request_id)
        num_tokens = len(one.token_ids)
        if request is not None and not _continues(request, one.token_ids):
            self._forget(one.request_id)  # the id is now a different request's
            request = None
        room = self._spec.max_seq_len - self._capacity - 1
        if num_tokens > room or (request is not None and num_tokens >= request.max_num_tokens):
            self._forget(one.request_id)
            return None
        first_new = 0 if request is None else request.num_tokens
        new = np.asarray(one.token_ids[first_new:], np.int64)
        if new.size and not 0 <= new.min() <= new.max() < self._spec.vocab_size:
            self._forget(one.request_id)
            return None
        if request is None:
            request = self._begin(one)
        else:
            self._commit(request, new.astype(np.int32))
        self._known.move_to_end(one.request_id)
        return request

    def _begin(self, one: Asked) -> Request:
        if not self._free_slots:
            self._forget(next(iter(self._known)))
        request = Request(
            str(one.request_id),
            one.token_ids,
            SamplingParams(max_tokens=max(1, one.max_new_tokens)),
            max_seq_len=self._spec.max_seq_len,
            max_draft_len=self._capacity,
            arrival_s=self._clock.now_s(),
        )
        request.max_draft_len = self.max_draft_len
        request.num_computed_tokens = request.num_tokens - 1  # computed by the executor's target
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        self._sampling.bind(request.slot, request)
        self._known[one.request_id] = request
        return request

    def _commit(self, request: Request, new: npt.NDArray[np.int32]) -> None:
        """Append the target's new tokens; pending drafts after them are kept if all new tokens were drafted."""
        agreed = _num_agreed(request, new)
        first = request.num_tokens
        request.num_tokens = first + new.size
        request.num_computed_tokens = request.num_tokens - 1
        if agreed == new.size:
            left = min(request.num_drafts - new.size, self.max_draft_len)
            self.num_reused_drafts += left if new.size else 0
        else:
            left = 0
            self.num_dropped_drafts += request.num_drafts - agreed
            request.tokens[first : first + new.size] = new
        request.num_drafts = left
        valid = request.num_tokens + left if agreed == new.size else first + agreed
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, valid)

    def _forget(self, request_id: int) -> None:
        request = self._known.pop(request_id, None)
        if request is not None:
            self._sampling.release(request.slot)
            self._free_slots.append(request.slot)

    def _forget_ended(self) -> None:
        ended, self._ended = self._ended, []
        for request_id in ended:
            self._forget(request_id)

    def _draft(self, view: StepView, plan: Decision) -> DraftResult:
        wanted = [min(length, request.draft_limit) for length, request in zip(plan.lengths, view.decoding, strict=True)]
        rows, decision = ScheduledRequests.of(_scheduled(view.decoding, wanted)), Decision(wanted, plan.stop)
        drafts = self._drafter.draft(SchedulerOutput(rows, view, decision, is_drafting=any(wanted)))
        _take(view.decoding, drafts)
        return drafts

    def _start_ahead(
        self, requests: Sequence[Request], lengths: Sequence[int], planned: Sequence[int], readers: Sequence[Request]
    ) -> None:
        """Draft past the proposal: a guess of the target's token after it, and the next drafts.

        readers: requests whose prompts are run.
        """
        wanted = []
        for request, length, next_length in zip(requests, lengths, planned, strict=True):
            left = request.max_num_tokens - request.num_tokens - 1
            next_length = min(next_length, self.max_draft_len)
            wanted.append(min(length + 1 + next_length, left) if length and next_length else request.num_drafts)
        for request in readers:
            request.num_computed_tokens = 0
        reading = tuple(ScheduledRequest(request, request.num_tokens, 0, 0) for request in readers)
        if not reading and wanted == [request.num_drafts for request in requests]:
            return
        view = StepView(requests, 0, 0, self._clock.now_s())
        plan = SchedulerOutput(
            ScheduledRequests.of([*_scheduled(requests, wanted), *reading]),
            view,
            Decision(wanted, mode=Mode.DRAFT_AHEAD),
        )
        self._ahead = _Ahead(plan, self._ahead_worker.draft(plan))

    def _take_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            _take(ahead.plan.scheduled.requests, ahead.drafting.result())

    def _observe(self, asked: Sequence[Asked]) -> None:
        """Report the outcome of the last proposals to the policy; requests that ended or paused are left out."""
        last, self._last = self._last, None
        if last is None:
            return
        now = {one.request_id: one for one in asked}
        rows: list[tuple[Request, int, int, int]] = []  # with the numbers of new tokens, proposed and accepted drafts
        for request, length in zip(last.view.decoding, last.lengths, strict=True):
            one = now.get(int(request.request_id))
            if one is None or self._known.get(one.request_id) is not request or not _continues(request, one.token_ids):
                continue
            new = np.asarray(one.token_ids[request.num_tokens :], np.int64)
            if new.size:
                rows.append((request, new.size, length, min(length, _num_agreed(request, new), new.size - 1)))
        if not rows:
            return
        requests, num_new, lengths, accepted = zip(*rows, strict=True)
        if last.tested is not None:
            rejected = [a < length for a, length in zip(accepted, lengths, strict=True)]
            last.tested.add(
                self._sampling.array,
                np.array([request.slot for request in requests], np.int32),
                np.array([request.num_tokens for request in requests], np.int32),
                np.array(accepted, np.int32),
                np.where(rejected, native.RECOVERED, native.BONUS).astype(np.int32),
            )
        drafts, n = last.drafts, len(rows)
        if last.view.num_context_rows or drafts.num_rows > 2 * n:
            return
        verify_ms = 1e3 * (self._clock.now_s() - last.proposed_s)
        self._policy.observe(
            PlanStats(
                num_steps=1,
                ms=verify_ms + drafts.draft_ms,
                draft_ms=drafts.draft_ms,
                verify_ms=verify_ms,
                num_tokens=sum(num_new),
                num_requests=n,
                num_rows=n + sum(lengths),
                num_verified=sum(lengths),
                num_accepted=sum(accepted),
                num_draft_calls=int(drafts.num_asked > 0),
                num_draft_rows=drafts.num_rows,
                num_draft_steps=int(drafts.num_new_drafts.max()),
                num_drafted=int(drafts.num_new_drafts.sum()),
            )
        )


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The last proposals. lengths: in the order of view.decoding."""

    view: StepView
    tested: VerifiedDrafts | None
    lengths: Sequence[int]
    drafts: DraftResult
    proposed_s: float


def _scheduled(requests: Sequence[Request], wanted: Sequence[int]) -> tuple[ScheduledRequest, ...]:
    return tuple(
        ScheduledRequest(request, 1, max(length, request.num_drafts), 0)
        for request, length in zip(requests, wanted, strict=True)
    )


def _take(requests: Sequence[Request], drafts: DraftResult) -> None:
    columns = drafts.num_new_drafts.tolist(), drafts.num_draft_computed.tolist()
    for request, num_new, computed in zip(requests, *columns, strict=True):
        request.num_drafts += num_new
        request.num_draft_computed_tokens = computed


def _pending(request: Request) -> npt.NDArray[np.int32]:
    return request.tokens[request.num_tokens : request.num_tokens + request.num_drafts]


def _num_agreed(request: Request, new: npt.NDArray[Any]) -> int:
    """Return how many of the first new tokens equal the pending drafts."""
    both = min(new.size, request.num_drafts)
    differ = np.flatnonzero(_pending(request)[:both] != new[:both])
    return int(differ[0]) if differ.size else both


def _continues(request: Request, token_ids: Sequence[int]) -> bool:
    """Return True if these tokens continue the request.

    Only both ends are compared, since comparing all tokens would take longer than drafting. If an id is reused for a
    text with the same ends, drafts get worse and nothing else changes.
    """
    n = request.num_tokens
    tail = max(0, n - _COMPARED)
    return (
        len(token_ids) >= n
        and request.tokens[: min(n, _COMPARED)].tolist() == list(token_ids[: min(n, _COMPARED)])
        and request.tokens[tail:n].tolist() == list(token_ids[tail:n])
    )
