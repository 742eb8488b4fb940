"""The draft model, or an EAGLE-3 head: its KV is brought up to date and it drafts, in one engine call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.batch import BatchBuilder
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.sampling.table import SamplingTable


class ModelDrafter:
    """Drafts for the requests of a plan, which gives the number of pending drafts wanted.

    A request's draft KV may lag behind (after a time without speculation, or with a prompt longer than a pass): then
    the rows that fit are run first, and drafting waits until it has caught up. Without drafting nothing is run.

    A head's rows need the target's hidden row of the position before. So in a prompt it stays behind the target, and
    its rows of pending drafts, made from its own output, count for nothing: they are run again when the target has run
    those tokens.
    """

    spec = DrafterSpec("model", native.BY_MODEL, has_kv=True)

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
        self._is_head = spec.is_head
        self._builder = BatchBuilder(spec.max_batch_size, spec.max_num_tokens, spec.max_seq_len, block_table)
        self._num_tokens = np.zeros(spec.max_batch_size, np.int32)
        self._num_drafts = np.zeros(spec.max_batch_size, np.int32)
        self._num_new = np.zeros(spec.max_batch_size, np.int32)
        self._count_views = self._num_tokens.data, self._num_drafts.data, self._num_new.data

    def propose(self, plan: SchedulerOutput, taken: Sequence[int] = ()) -> DraftResult:
        """As Drafter.propose."""
        if not plan.runs_draft_model:
            return nothing_drafted(plan)
        lengths = plan.model_lengths
        builder, is_head = self._builder, self._is_head
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
            if request.max_draft_len == 0 or not request.may_draft(self.spec.name):
                continue
            num_new = 0
            num_drafts = request.num_drafts + (taken[index] if taken else 0)
            if request.is_decoding:
                num_new = scheduled.num_drafts - num_drafts
                if lengths is not None:
                    num_new = min(num_new, lengths.get(request.slot, 0) - num_drafts)
                if num_new <= 0:
                    continue
                end = request.num_tokens + (0 if is_head else num_drafts)
            elif is_head:
                end = request.num_computed_tokens + 1 if request.num_computed_tokens else 0
            else:
                end = request.num_computed_tokens + scheduled.num_new_tokens
            if end - computed > budget:
                end, num_new = computed + budget, 0
            if end <= computed or (is_head and end < 2):  # a head has no hidden row before the first token
                continue
            budget -= end - computed
            entry = len(planned)
            builder.add(request.slot, request.tokens, computed, end, 1 if num_new else 0)
            num_tokens_view[entry] = request.num_tokens
            num_drafts_view[entry] = num_drafts
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
                    if is_head:
                        continue
                    num_computed[index] += num_found - 1  # the newest draft has not been run through the model
        draft_ms = 1e3 * (self._clock.now_s() - started)
        return DraftResult(num_drafted, num_computed, draft_ms, builder.num_rows, num_asked)

    def end(self, slot: int) -> None:
        """The request's own counter says how far its KV reaches."""

    def _run(self, n: int, stop: DraftStop | None) -> list[int]:
        draft_batch = DraftBatch(
            batch=self._builder.build(),
            sampling=self._sampling.array,
            num_tokens=self._num_tokens[:n],
            num_drafts=self._num_drafts[:n],
            num_new_drafts=self._num_new[:n],
            max_draft_len=self._max_draft_len,
            stop=stop,
        )
        drafted: list[int] = self._engine.draft(draft_batch).tolist()
        return drafted
