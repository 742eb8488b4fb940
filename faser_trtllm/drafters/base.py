"""The interface of a drafter: whoever proposes tokens for the target to test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.plan import DraftResult, SchedulerOutput


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """name: in the configuration, one of native.SOURCES. has_kv: it has an engine, whose KV shares the target's block
    ids. asked_by: bits of core/counts.py DRAFTERS for which it drafts, 0: that of its own source.

    Drafts that Request.draft_sources does not mark as the model's were not drawn: they have no distribution q, and the
    target's own draw tests them.
    """

    name: str
    has_kv: bool
    asked_by: int = 0

    @property
    def bits(self) -> int:
        """Bits of core/counts.py DRAFTERS: a request without one of them gets no drafts of it."""
        return self.asked_by or 1 << self.source

    @property
    def source(self) -> int:
        """How its drafts are marked in Request.draft_sources."""
        return native.SOURCES[self.name]


class Drafter(Protocol):
    """Catches up with what was committed by itself, when it is asked.

    Exactness asks three things of a drafter (ARCHITECTURE.md has why): what it proposes at a position hangs on nothing
    but the tokens before it and on randomness that the target's test does not use; a draft that was drawn is not
    replaced for what it is; and one that was not drawn is marked so in Request.draft_sources. All else costs speed.
    """

    @property
    def spec(self) -> DrafterSpec: ...

    def propose(self, plan: SchedulerOutput, num_pending: Int32Array) -> DraftResult:
        """Write drafts after the pending ones of each request, up to the plan's number of them.

        num_pending [num_requests] int32: pending drafts, those that drafters before this one made included.
        """

    def end(self, slot: int) -> None:
        """The request of this slot leaves it."""


def nothing_drafted(plan: SchedulerOutput) -> DraftResult:
    """The result of a skipped draft call."""
    return DraftResult(np.zeros(len(plan.scheduled), np.int32), plan.scheduled.num_draft_computed)
