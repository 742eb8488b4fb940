"""The drafting stage of a step: each drafter in turn continues from what the drafters before it proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from faser_trtllm.core.clock import Clock
from faser_trtllm.core.counts import DRAFTERS, Int32Array
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import Drafter, nothing_drafted
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.requests.check_drafts import check_drafts
from faser_trtllm.sampling.table import SamplingTable


class Cascade:
    """Runs drafters in order; there are none for a target alone."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        sampling: SamplingTable,
        vocab_size: int,
        clock: Clock,
        window: int | None = None,
    ) -> None:
        """window: longest context that the draft model drafts for; None: no limit."""
        self.drafters = tuple(drafters)
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._clock = clock
        self._window = window

    def draft(self, plan: SchedulerOutput) -> DraftResult:
        if not plan.is_drafting or not self.drafters:
            return nothing_drafted(plan)
        if self._window is not None:
            plan = replace(plan, scheduled=plan.scheduled.within(self._window))
        pending = plan.scheduled.num_pending
        asked = int(np.bitwise_or.reduce(plan.scheduled.counts[DRAFTERS]))
        drafters = [drafter for drafter in self.drafters if drafter.spec.has_kv or drafter.spec.bits & asked]
        if len(drafters) == 1 and drafters[0].spec.has_kv:
            return drafters[0].propose(plan, pending)
        result = nothing_drafted(plan)
        num_free, free_s = result.num_new_drafts, 0.0
        for drafter in drafters:
            started_s = self._clock.now_s()
            found = drafter.propose(plan, pending)
            self._check(plan, drafter, pending, found.num_new_drafts)
            pending = pending + found.num_new_drafts
            if drafter.spec.has_kv:
                result = found
            else:
                free_s += self._clock.now_s() - started_s
                num_free = num_free + found.num_new_drafts
        num_new = pending - plan.scheduled.num_pending
        return replace(result, num_new_drafts=num_new, num_free=num_free, free_ms=1e3 * free_s)

    def _check(self, plan: SchedulerOutput, drafter: Drafter, pending: Int32Array, counted: Int32Array) -> None:
        """Raise FaserError if a drafter's counts, which index memory, or tokens are out of range."""
        rows = plan.scheduled
        if counted.shape != pending.shape:
            raise FaserError(f"the drafter {drafter.spec.name} returned {counted.size} counts for {len(rows)} requests")
        room = rows.num_drafts - pending
        bad = check_drafts(self._sampling.array, rows.slots, rows.num_tokens + pending, counted, room, self._vocab_size)
        if bad is not None:
            raise FaserError(
                f"the drafter {drafter.spec.name} gave {counted[bad]} drafts where {room[bad]} fit, or tokens outside "
                f"the vocabulary of {self._vocab_size}"
            )
