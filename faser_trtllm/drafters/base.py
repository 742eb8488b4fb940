"""The interface of a drafter: whoever proposes tokens for the target to test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from faser_trtllm.core.plan import DraftResult, SchedulerOutput


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """name: in the configuration. source: how its drafts are marked in Request.draft_sources.

    Drafts that are not marked as the model's were not drawn: they have no distribution q, and the target's own draw
    tests them. has_kv: it has an engine, whose KV shares the target's block ids.
    """

    name: str
    source: int
    has_kv: bool


class Drafter(Protocol):
    """Catches up with what was committed by itself, when it is asked.

    Exactness asks three things of a drafter (ARCHITECTURE.md has why): what it proposes at a position hangs on nothing
    but the tokens before it and on randomness that the target's test does not use; a draft that was drawn is not
    replaced for what it is; and one that was not drawn is marked so in Request.draft_sources. All else costs speed.
    """

    @property
    def spec(self) -> DrafterSpec: ...

    def propose(self, plan: SchedulerOutput, taken: Sequence[int]) -> DraftResult:
        """Write drafts behind the pending ones of each request, up to the plan's number of them.

        taken: pending drafts of this step by drafters before this one, by index of plan.scheduled; empty: none.
        """

    def end(self, slot: int) -> None:
        """The request of this slot leaves it."""


def nothing_drafted(plan: SchedulerOutput) -> DraftResult:
    """The result of a skipped draft call."""
    return DraftResult((0,) * len(plan.scheduled), plan.scheduled.num_draft_computed)
