"""The draft model, or a draft head: its KV is brought up to date and it drafts, in one engine call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.ops.fill_rows import RowFiller
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
        self._rows = RowFiller(spec.max_batch_size, spec.max_num_tokens, block_table)
        self._counts = np.zeros((3, spec.max_batch_size), np.int32)
        self._count_views = [column.data for column in self._counts]

    def propose(self, plan: SchedulerOutput, taken: Sequence[int] = ()) -> DraftResult:
        """As Drafter.propose."""
        if not plan.runs_draft_model:
            return nothing_drafted(plan)
        rows, lengths, is_head = plan.scheduled, plan.model_lengths, self._is_head
        pending = list(map(add, rows.num_pending, taken)) if taken else rows.num_pending
        planned: list[int] = []
        entries: list[int] = []  # _run's columns, request by request: tuples would keep the garbage collector busy
        num_computed = list(rows.num_draft_computed)
        budget = self._max_num_tokens
        progress = rows.num_tokens, rows.num_computed, num_computed
        for index, (request, slot, num_tokens, target, computed, drafts, wanted) in enumerate(
            zip(rows.requests, rows.slots, *progress, pending, rows.num_drafts, strict=True)
        ):
            if request.max_draft_len == 0 or not request.may_draft(self.spec.name):
                continue
            num_new = 0
            if target == num_tokens - 1:  # it decodes
                num_new = wanted - drafts
                if lengths is not None:
                    num_new = min(num_new, lengths.get(slot, 0) - drafts)
                if num_new <= 0:
                    continue
                end = num_tokens + (0 if is_head else drafts)
            elif is_head:
                end = target + 1 if target else 0
            else:
                end = target + rows.num_new_tokens[index]
            if end - computed > budget:
                end, num_new = computed + budget, 0
            if end <= computed or (is_head and end < 2):  # a head has no hidden row before the first token
                continue
            budget -= end - computed
            planned.append(index)
            entries += (slot, computed, end, 1 if num_new else 0, num_tokens, drafts, num_new)
        num_drafted = [0] * len(rows)
        started = self._clock.now_s()
        num_asked = 0
        if planned:
            columns = [entries[place::7] for place in range(7)]
            _, _, ends, num_logits, _, _, num_wanted = columns
            num_asked = sum(num_logits)
            drafted = self._run(columns, plan.stop)
            for index, end, num_new, num_found in zip(planned, ends, num_wanted, drafted, strict=True):
                num_computed[index] = end
                if num_new:
                    num_drafted[index] = num_found
                    if is_head:
                        continue
                    num_computed[index] += num_found - 1  # the newest draft has not been run through the model
        draft_ms = 1e3 * (self._clock.now_s() - started)
        return DraftResult(num_drafted, num_computed, draft_ms, self._max_num_tokens - budget, num_asked)

    def end(self, slot: int) -> None:
        """The request's own counter says how far its KV reaches."""

    def _run(self, columns: Sequence[Sequence[int]], stop: DraftStop | None) -> list[int]:
        """columns: slots, first, end and num_logit_rows as RowFiller.fill has them, then committed tokens, pending
        drafts, and drafts wanted."""
        counts = self._counts[:, : len(columns[0])]
        for view, column in zip(self._count_views, columns[4:], strict=True):
            view[: len(column)] = array("i", column)
        draft_batch = DraftBatch(
            batch=self._rows.fill(self._sampling.array, *columns[:4]),
            sampling=self._sampling.array,
            num_tokens=counts[0],
            num_drafts=counts[1],
            num_new_drafts=counts[2],
            max_draft_len=self._max_draft_len,
            stop=stop,
        )
        drafted: list[int] = self._engine.draft(draft_batch).tolist()
        return drafted
