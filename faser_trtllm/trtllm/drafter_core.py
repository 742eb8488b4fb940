"""Drafting for another executor's requests: lengths by our policies, drafts by our engine, ahead while it verifies.

Knows requests by id and tokens only; imports nothing of TensorRT-LLM. Whoever asks decides what is accepted, so nothing
that happens here can change an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import DraftPlan, Mode, StepOutcome, StepView
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, SchedulerOutput
from faser_trtllm.core.request import Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import Engine
from faser_trtllm.executor.drafter import Drafter
from faser_trtllm.executor.lanes import Drafting, DraftLane
from faser_trtllm.policy.base import Policy
from faser_trtllm.sampling.table import SamplingTable

_COMPARED = 16  # tokens at each end of a request, to know it again


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that wants drafts. token_ids: all of it so far. max_drafts: what its executor has room for."""

    request_id: int
    token_ids: Sequence[int]
    max_new_tokens: int  # that it may still generate
    max_drafts: int


def num_pending_drafts(max_draft_len: int, draft_ahead: bool) -> int:
    """At most, per request: what is proposed, the guess of the target's own token behind it, and the next proposal."""
    return 2 * max_draft_len + 1 if draft_ahead else max_draft_len


@dataclass(slots=True)
class _Ahead:
    """Drafting that goes on while the target verifies."""

    plan: SchedulerOutput
    drafting: Drafting


class DraftCore:
    """Drafts for one batch after another. One caller at a time; close() waits for what is drafted ahead.

    A request is followed by its id from the first time it is asked for. Its draft KV lives in a slot; the slot of whom
    was not asked for longest goes to a newcomer, so that nobody has to say when a request ends.
    """

    def __init__(
        self, engine: Engine, policy: Policy, clock: Clock, *, max_draft_len: int, draft_ahead: bool = True
    ) -> None:
        """engine: the draft model's, with KV blocks for max_batch_size requests of max_seq_len tokens."""
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
        self._drafter = Drafter(engine, self._sampling, block_table, max_draft_len, clock)
        self._draft_ahead = draft_ahead
        self._lane = DraftLane(Drafter(engine, self._sampling, block_table, self._capacity, clock))
        self._ahead: _Ahead | None = None
        self._is_drafting = policy.name != "off"  # the last step had drafts, or would have
        self._known: OrderedDict[int, Request] = OrderedDict()  # who was asked for last is at the end
        self._free_slots = list(range(spec.max_batch_size))
        self._last: _LastStep | None = None
        self._num_generated = 0  # tokens of requests that were asked for again
        self.num_reused_drafts = 0  # proposed without drafting in the step, as they had been drafted ahead
        self.num_dropped_drafts = 0  # drafted ahead behind what was then rejected

    def propose(self, asked: Sequence[Asked], coming: Sequence[Asked] = ()) -> list[list[int]]:
        """The drafts of each, at most max_drafts and max_draft_len long; [] where nothing is worth it.

        coming: whose prompts the target reads in this step; the draft model reads them beside it.
        """
        self._take_ahead()
        self._observe(asked)
        followed = self._follow_all([*asked, *coming])
        requests = [request for request in followed[: len(asked)] if request is not None]
        readers = [request for request in followed[len(asked) :] if request is not None]
        proposals: list[list[int]] = [[] for _ in asked]
        planned: Sequence[int] = ()
        proposed: Sequence[int] = ()
        if requests:
            num_coming = sum(len(one.token_ids) for one in coming)
            view = StepView(requests, num_coming, 0, self._clock.now_s(), num_generated=self._num_generated)
            plan = self._policy.plan(view)
            planned = plan.lengths
            drafts = self._draft(view, plan)
            pending = [request.num_drafts for request in requests]
            lengths = dict(zip(map(id, requests), self._policy.frontier_lengths(view, pending), strict=True))
            for place, request in enumerate(followed[: len(asked)]):
                if request is not None:
                    length = min(lengths[id(request)], request.num_drafts, asked[place].max_drafts)
                    proposals[place] = _pending(request)[:length].tolist()
                    lengths[id(request)] = length
            proposed = [lengths[id(request)] for request in requests]
            self._last = _LastStep(view, proposed, pending, drafts, self._clock.now_s())
            self._is_drafting = any(planned)
        if self._draft_ahead and self._is_drafting:
            self._start_ahead(requests, proposed, planned, readers)
        return proposals

    def close(self) -> None:
        """Wait for what is drafted ahead and end its thread; the engine stays the caller's."""
        self._lane.close()

    def _follow_all(self, asked: Sequence[Asked]) -> list[Request | None]:
        """The requests of as many as there are slots; None of the others."""
        for one in asked:
            if one.request_id in self._known:
                self._known.move_to_end(one.request_id)  # so that no newcomer takes its slot
        room = self._spec.max_batch_size
        return [self._follow(one) if place < room else None for place, one in enumerate(asked)]

    def _follow(self, one: Asked) -> Request | None:
        """The request brought up to date; None if the draft model cannot follow it."""
        request = self._known.get(one.request_id)
        num_tokens = len(one.token_ids)
        if request is not None and not _continues(request, one.token_ids):
            self._forget(one.request_id)  # the id belongs to another request now
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
        request.num_computed_tokens = request.num_tokens - 1  # by the other executor's target
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        self._sampling.bind(request.slot, request)
        self._known[one.request_id] = request
        return request

    def _commit(self, request: Request, new: npt.NDArray[np.int32]) -> None:
        """Take over the target's tokens; pending drafts stay if all of them were foreseen."""
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

    def _draft(self, view: StepView, plan: DraftPlan) -> DraftResult:
        wanted = [min(length, request.draft_limit) for length, request in zip(plan.lengths, view.decoding, strict=True)]
        scheduled = _scheduled(view.decoding, wanted)
        drafts = self._drafter.draft(SchedulerOutput(scheduled, view, stop=plan.stop, is_drafting=any(wanted)))
        _take(view.decoding, drafts)
        return drafts

    def _start_ahead(
        self, requests: Sequence[Request], lengths: Sequence[int], planned: Sequence[int], readers: Sequence[Request]
    ) -> None:
        """Go on behind what was proposed: the target's own token if all of it is accepted, and the next drafts.

        readers: requests whose prompts are read.
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
        plan = SchedulerOutput((*_scheduled(requests, wanted), *reading), view, mode=Mode.DRAFT_AHEAD)
        self._ahead = _Ahead(plan, self._lane.draft(plan))

    def _take_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            _take([s.request for s in ahead.plan.scheduled], ahead.drafting.result())

    def _observe(self, asked: Sequence[Asked]) -> None:
        """Tell the policy what became of the last proposals; a request that ended or rested says nothing."""
        last, self._last = self._last, None
        if last is None:
            return
        now = {one.request_id: one for one in asked}
        rows: list[tuple[Request, int, int, int, int]] = []
        for request, length, pending in zip(last.view.decoding, last.lengths, last.pending, strict=True):
            one = now.get(int(request.request_id))
            if one is None or self._known.get(one.request_id) is not request or not _continues(request, one.token_ids):
                continue
            new = np.asarray(one.token_ids[request.num_tokens :], np.int64)
            if new.size:
                self._num_generated += new.size
                accepted = min(length, _num_agreed(request, new), new.size - 1)
                rows.append((request, pending, length, accepted + (accepted < length), accepted))
        if not rows:
            return
        now_s = self._clock.now_s()
        verify_ms = 1e3 * (now_s - last.proposed_s)
        if not self._policy.wants_outcome(any(last.pending)):
            return
        requests, pending_, lengths, tested, accepted_ = zip(*rows, strict=True)
        self._policy.observe(
            StepOutcome(
                requests,
                pending_,
                lengths,
                [0] * len(rows),
                tested,
                accepted_,
                sum(last.drafts.num_new_drafts),
                last.view.num_context_rows + len(rows) + sum(lengths),
                last.view.num_context_rows,
                last.drafts.num_rows,
                0,
                last.drafts.draft_ms,
                verify_ms,
                verify_ms + last.drafts.draft_ms,
                Mode.SERIAL,
                now_s,
            )
        )


@dataclass(frozen=True, slots=True)
class _LastStep:
    """What was proposed, in the order of view.decoding."""

    view: StepView
    lengths: Sequence[int]
    pending: Sequence[int]
    drafts: DraftResult
    proposed_s: float


def _scheduled(requests: Sequence[Request], wanted: Sequence[int]) -> tuple[ScheduledRequest, ...]:
    return tuple(
        ScheduledRequest(request, 1, max(length, request.num_drafts), 0)
        for request, length in zip(requests, wanted, strict=True)
    )


def _take(requests: Sequence[Request], drafts: DraftResult) -> None:
    for request, num_new, computed in zip(requests, drafts.num_new_drafts, drafts.num_draft_computed, strict=True):
        request.num_drafts += num_new
        request.num_draft_computed_tokens = computed


def _pending(request: Request) -> npt.NDArray[np.int32]:
    return request.tokens[request.num_tokens : request.num_tokens + request.num_drafts]


def _num_agreed(request: Request, new: npt.NDArray[Any]) -> int:
    """How many of the new tokens were foreseen."""
    both = min(new.size, request.num_drafts)
    differ = np.flatnonzero(_pending(request)[:both] != new[:both])
    return int(differ[0]) if differ.size else both


def _continues(request: Request, token_ids: Sequence[int]) -> bool:
    """Whether these are the request's tokens and perhaps more.

    Its two ends are compared: all of it would take longer than drafting. An id that is used twice for texts with the
    same ends gets worse drafts, nothing else.
    """
    n = request.num_tokens
    tail = max(0, n - _COMPARED)
    return (
        len(token_ids) >= n
        and request.tokens[: min(n, _COMPARED)].tolist() == list(token_ids[: min(n, _COMPARED)])
        and request.tokens[tail:n].tolist() == list(token_ids[tail:n])
    )
