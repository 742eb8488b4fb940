"""The drafting half of a step: brings the draft model's KV up to date and drafts, in one engine call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.engine.base import Engine
from faser_trtllm.sampling.table import SamplingTable


class Drafter:
    """Drafts for the requests of a plan; it decides nothing, the plan says how many pending drafts it wants.

    A request's draft KV may lag behind (speculation was off for a while, or its prompt is longer than a pass): then the
    rows that fit are run first, and drafting waits until the lag is gone. While nothing is drafted, nothing is run.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingTable,
        block_table: npt.NDArray[np.int32],
        max_draft_len: int,
        clock: Clock,
    ) -> None:
        spec = engine.spec
        self._engine = engine
        self._sampling = sampling
        self._max_draft_len = max_draft_len
        self._clock = clock
        self._max_num_tokens = spec.max_num_tokens
        self._builder = BatchBuilder(spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len, block_table)
        self._num_tokens = np.zeros(spec.max_batch_size, np.int32)
        self._num_drafts = np.zeros(spec.max_batch_size, np.int32)
        self._num_new = np.zeros(spec.max_batch_size, np.int32)
        self._count_views = self._num_tokens.data, self._num_drafts.data, self._num_new.data

    def draft(self, plan: SchedulerOutput) -> DraftResult:
        if not plan.is_drafting:
            return nothing_drafted(plan)
        builder = self._builder
        builder.clear()
        num_tokens_view, num_drafts_view, num_new_view = self._count_views
        planned: list[int] = []
        num_computed: list[int] = []
        num_asked = 0
        budget = self._max_num_tokens
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            computed = request.num_draft_computed_tokens
            num_computed.append(computed)
            if request.max_draft_len == 0:
                continue
            num_new = 0
            if request.is_decoding:
                num_new = scheduled.num_drafts - request.num_drafts
                if num_new <= 0:
                    continue
                end = request.num_tokens + request.num_drafts
            else:
                end = request.num_computed_tokens + scheduled.num_new_tokens
            if end - computed > budget:
                end, num_new = computed + budget, 0
            if end <= computed:
                continue
            budget -= end - computed
            entry = len(planned)
            builder.add(request.slot, request.tokens, computed, end, 1 if num_new else 0)
            num_tokens_view[entry] = request.num_tokens
            num_drafts_view[entry] = request.num_drafts
            num_new_view[entry] = num_new
            if num_new:
                num_asked += 1
            planned.append(index)
            num_computed[index] = end
        num_drafted = [0] * len(plan.scheduled)
        started = self._clock.now_s()
        if planned:
            drafted = self._run(len(planned), plan.stop)
            for index, num_new, num_found in zip(planned, num_new_view, drafted, strict=False):
                if num_new:
                    num_drafted[index] = num_found
                    num_computed[index] += num_found - 1  # the newest draft has not been run through the model
        draft_ms = 1e3 * (self._clock.now_s() - started)
        return DraftResult(num_drafted, num_computed, draft_ms, builder.num_rows, num_asked)

    def _run(self, n: int, stop: DraftStop | None) -> list[int]:
        drafted: list[int] = self._engine.draft(
            self._builder.build(),
            self._sampling.array,
            self._num_tokens[:n],
            self._num_drafts[:n],
            self._num_new[:n],
            self._max_draft_len,
            stop,
        ).tolist()
        return drafted


class NoDrafter:
    """Stands in where speculation is off for good: no draft engine is loaded."""

    def draft(self, plan: SchedulerOutput) -> DraftResult:
        return nothing_drafted(plan)


def nothing_drafted(plan: SchedulerOutput) -> DraftResult:
    """What a draft call gives that is not made."""
    return DraftResult((0,) * len(plan.scheduled), [s.request.num_draft_computed_tokens for s in plan.scheduled])
