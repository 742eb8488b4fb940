"""The drafter for draft models, draft heads and block drafters: one engine call updates its KV cache and drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import DrafterSpec, nothing_drafted
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.ops.requests.fill_rows import RowFiller
from faser_trtllm.sampling.table import SamplingTable


class ModelDrafter:
    """Drafts for the requests of a plan, which has the number of pending drafts wanted.

    A request's draft KV may be out of date (after a time without speculation, or with a prompt longer than a pass).
    Then the rows that fit are run first, and drafting waits until it has caught up. Without drafting nothing is run.

    A head's rows need the target's hidden row of the previous position, so in a prompt it follows the target. Its rows
    of pending drafts, made from its own output, are run again when the target has run those tokens. A block drafter's
    rows need the target's hidden rows of their own positions. It drafts whole blocks, so only for requests without
    pending drafts.
    """

    spec = DrafterSpec("model", has_kv=True)

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
        self._kind = spec.draft_kind
        self._rows = RowFiller(spec.max_batch_size, spec.max_num_tokens, block_table)

    def propose(self, plan: SchedulerOutput, num_pending: Int32Array) -> DraftResult:
        """See Drafter.propose."""
        if not plan.runs_draft_model:
            return nothing_drafted(plan)
        rows, sampling, kind = plan.scheduled, self._sampling.array, self._kind
        num_drafted, num_computed = np.zeros(len(rows), np.int32), rows.num_draft_computed.copy()
        started_s = self._clock.now_s()
        asked, batch = self._rows.fill_draft(sampling, rows, num_pending, kind)
        if batch.num_rows:
            draft_batch = DraftBatch(
                batch=batch,
                sampling=sampling,
                num_tokens=asked.num_tokens,
                num_drafts=asked.num_pending,
                num_new_drafts=asked.num_new,
                max_draft_len=self._max_draft_len,
                stop=plan.decision.stop,
            )
            drafted = self._engine.draft(draft_batch)
            requests = asked.requests.astype(np.intp)  # numpy is ten times slower with other index types
            num_drafted[requests] = drafted
            # The newest draft has not been run through the model. A head's rows from its own output do not count, and
            # the last committed token is not yet part of a block drafter's context.
            further: Int32Array | int = -1 if kind == native.DRAFT_BLOCK else 0
            if kind == native.DRAFT_MODEL:
                further = drafted - 1
            num_computed[requests] = asked.end + asked.num_logit_rows * further
        draft_ms = 1e3 * (self._clock.now_s() - started_s)
        return DraftResult(num_drafted, num_computed, draft_ms, batch.num_rows, batch.logit_rows.size)

    def end(self, slot: int) -> None:
        """Do nothing: the request's own counter has the length of its draft KV."""
