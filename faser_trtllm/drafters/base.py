"""The interface of a drafter, which proposes tokens for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.plan import DraftResult, SchedulerOutput


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """The properties of a drafter.

    Drafts that Request.draft_sources does not mark as the model's have no distribution q: they were not drawn, and the
    target's own draw verifies them.
    """

    name: str  # in the configuration, one of native.SOURCES
    has_kv: bool  # it has an engine, whose KV cache has the target's block ids
    asked_by: int = 0  # bits of core/counts.py DRAFTERS for which it drafts; 0: the bit of its own source

    @property
    def bits(self) -> int:
        """Bits of core/counts.py DRAFTERS; a request without any of them gets no drafts from this drafter."""
        return self.asked_by or 1 << self.source

    @property
    def source(self) -> int:
        """Mark of its drafts in Request.draft_sources."""
        return native.SOURCES[self.name]


class Drafter(Protocol):
    """Proposes drafts; each call first catches up with the tokens committed since the last one.

    Exactness requires three things (see ARCHITECTURE.md): a proposal depends only on the tokens before it and on
    randomness that verification does not use; a draft that was drawn is never replaced because of its value; and a
    draft that was not drawn is marked so in Request.draft_sources. Everything else costs only speed.
    """

    @property
    def spec(self) -> DrafterSpec: ...

    def propose(self, plan: SchedulerOutput, num_pending: Int32Array) -> DraftResult:
        """Write drafts after each request's pending ones, up to the number in the plan.

        num_pending [num_requests] int32: pending drafts, including those of drafters that ran before.
        """

    def end(self, slot: int) -> None:
        """Forget the request that leaves this slot."""


def nothing_drafted(plan: SchedulerOutput) -> DraftResult:
    """Return the result of a skipped draft call."""
    return DraftResult(np.zeros(len(plan.scheduled), np.int32), plan.scheduled.num_draft_computed)
