"""The drafting stage of a step: every drafter in its turn, each behind what those before it proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from faser_trtllm.core.clock import Clock
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.drafters.base import Drafter, nothing_drafted
from faser_trtllm.errors import FaserError


class Cascade:
    """drafters: in order; none for a target alone."""

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, clock: Clock) -> None:
        self.drafters = tuple(drafters)
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
            taken = [before + new for before, new in zip(taken, found.num_new_drafts, strict=True)]
            if drafter.spec.has_kv:
                result = found
            else:
                free_s += self._clock.now_s() - started_s
                num_free = [before + new for before, new in zip(num_free, found.num_new_drafts, strict=True)]
        return replace(result, num_new_drafts=taken, num_free=num_free, free_ms=1e3 * free_s)

    def _check(self, plan: SchedulerOutput, drafter: Drafter, taken: Sequence[int], found: DraftResult) -> None:
        """What a drafter says indexes memory: FaserError if it cannot be so. Whether drafts are any good, the target
        tests."""
        for scheduled, before, new in zip(plan.scheduled, taken, found.num_new_drafts, strict=True):
            if new == 0:
                continue
            request = scheduled.request
            first = request.num_tokens + request.num_drafts + before
            room = scheduled.num_drafts - request.num_drafts - before
            tokens = request.tokens[first : first + new].tolist()
            if not 0 < new <= room or min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise FaserError(
                    f"the drafter {drafter.spec.name} gave {new} drafts where {room} fit, or tokens outside the "
                    f"vocabulary of {self._vocab_size}"
                )
