"""How a golden vector is run on our own scheduler and KV cache manager."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.plan import DraftResult, VerifyResult
from faser_trtllm.core.request import Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.base import Decision, StatelessPolicy
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits
from lab.clock import ManualClock
from lab.trtllm_check.vectors import Schedule, Vector
from tests.support.columns import columns

MAX_DRAFT_LEN = 8


class WantedDrafts(StatelessPolicy):
    """Asks for the vector's drafts."""

    name = "wanted"

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def plan(self, view):
        return Decision([self._vector.requests[int(r.request_id)].drafts for r in view.decoding])


def run_natively(vector: Vector) -> Schedule:
    limits = vector.limits
    kv = KVCacheManager(
        limits.num_blocks,
        limits.tokens_per_block,
        limits.max_batch_size,
        -(-limits.max_seq_len // limits.tokens_per_block),
        enable_block_reuse=False,
    )
    scheduler = Scheduler(
        kv,
        SchedulerLimits(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_draft_len=MAX_DRAFT_LEN,
            capacity_policy=_capacity(limits.capacity),
            enable_chunked_context=limits.chunking is not None,
            chunk_unit_size=limits.chunk_unit_size,
        ),
        WantedDrafts(vector),
        ManualClock(),
    )
    requests = [_add(place, scheduler, kv, vector) for place in range(len(vector.requests))]
    plan = scheduler.schedule()
    rows = {s.request.request_id: s for s in plan.scheduled}
    generating = {str(place) for place, request in enumerate(vector.requests) if request.generated}
    blocks = _held(requests, kv)
    paused = tuple(sorted(r.request_id for r in plan.paused))
    _update(scheduler, plan, vector.accepted)
    scheduler.check_integrity()
    return Schedule(
        {name: s.num_new_tokens for name, s in rows.items() if name not in generating},
        {name: s.max_verified for name, s in rows.items() if name in generating},
        paused,
        blocks,
        _held(requests, kv),
    )


def _capacity(name: str) -> CapacitySchedulerPolicy:
    """STATIC_BATCH is not offered; the default takes its place."""
    known = CapacitySchedulerPolicy.__members__
    return known.get(name, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)


def _add(place, scheduler, kv, vector):
    state = vector.requests[place]
    request = Request(
        str(place),
        np.full(state.prompt, 1 + place),
        SamplingParams(max_tokens=state.max_tokens),
        max_seq_len=vector.limits.max_seq_len,
        max_draft_len=MAX_DRAFT_LEN,
    )
    scheduler.check(request)
    scheduler.add(request)
    if not state.has_started:
        return request
    scheduler._waiting.take(request)
    scheduler._table.enter(scheduler._free_slots.pop(), request)
    request.state = RequestState.RUNNING
    request.num_tokens, request.num_computed_tokens = state.num_tokens, state.num_computed_tokens
    kv.add_sequence(request.slot, request.tokens, request.num_tokens)
    assert kv.allocate(request.slot, request.num_computed_tokens)
    scheduler._running.append(request)
    return request


def _held(requests, kv):
    return {r.request_id: kv.num_held_blocks(r.slot) for r in requests if r.state is RequestState.RUNNING}


def _update(scheduler, plan, accepted_by_name):
    """Commit the step: every draft is drafted, as many are accepted as the vector says, then one token is drawn."""
    rows = plan.scheduled
    accepted = [accepted_by_name.get(request.request_id, 0) for request in rows.requests[: rows.num_sampled]]
    num_tokens, outcome = [a + 1 for a in accepted], [native.BONUS] * len(accepted)
    drafts = DraftResult(rows.num_drafts, np.zeros(len(rows), np.int32))
    ids = np.full((len(accepted), MAX_DRAFT_LEN + 1), 9, np.int32)
    result = VerifyResult(ids, *columns(num_tokens, accepted, outcome, rows.max_verified))
    scheduler.update(plan, drafts, result)
