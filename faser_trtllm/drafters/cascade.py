"""The drafting stage of a step: every drafter in its turn, each behind what those before it proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add, sub

from faser_trtllm.core.clock import Clock
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import Drafter, nothing_drafted
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.requests.check_drafts import check_drafts
from faser_trtllm.sampling.table import SamplingTable


class Cascade:
    """drafters: in order; none for a target alone."""

    def __init__(self, drafters: Sequence[Drafter], sampling: SamplingTable, vocab_size: int, clock: Clock) -> None:
        self.drafters = tuple(drafters)
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._clock = clock

    def draft(self, plan: SchedulerOutput) -> DraftResult:
        if not plan.is_drafting or not self.drafters:
            return nothing_drafted(plan)
        if len(self.drafters) == 1 and self.drafters[0].spec.has_kv:
            return self.drafters[0].propose(plan, ())
        result, taken, num_free = nothing_drafted(plan), [0] * len(plan.scheduled), [0] * len(plan.scheduled)
        free_s = 0.0
        for drafter in self.drafters:
            started_s = self._clock.now_s()
            found = drafter.propose(plan, taken)
            self._check(plan, drafter, taken, found)
            taken = list(map(add, taken, found.num_new_drafts))
            if drafter.spec.has_kv:
                result = found
            else:
                free_s += self._clock.now_s() - started_s
                num_free = list(map(add, num_free, found.num_new_drafts))
        return replace(result, num_new_drafts=taken, num_free=num_free, free_ms=1e3 * free_s)

    def _check(self, plan: SchedulerOutput, drafter: Drafter, taken: Sequence[int], found: DraftResult) -> None:
        """What a drafter says indexes memory: FaserError if it cannot be so. Whether drafts are any good, the target
        tests."""
        rows, counted = plan.scheduled, found.num_new_drafts
        if len(counted) != len(rows):
            raise FaserError(f"the drafter {drafter.spec.name} told of {len(counted)} requests, there are {len(rows)}")
        if not any(counted):
            return
        pending = list(map(add, rows.num_pending, taken))
        first, room = list(map(add, rows.num_tokens, pending)), list(map(sub, rows.num_drafts, pending))
        bad = check_drafts(self._sampling.array, rows.slots, first, counted, room, self._vocab_size)
        if bad is not None:
            raise FaserError(
                f"the drafter {drafter.spec.name} gave {counted[bad]} drafts where {room[bad]} fit, or tokens outside "
                f"the vocabulary of {self._vocab_size}"
            )
