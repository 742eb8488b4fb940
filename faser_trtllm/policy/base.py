"""The policy interface: how many tokens to draft and how many rows to verify, per request and per step.

Policies take and return host numbers; they import no torch and see no tensors. Decisions may depend on anything known,
also on a request's later drafts, because drafts without a row stay pending: a decision affects when a draft is
verified, never whether (docs/policies.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faser_trtllm.core.decision import Decision, Mode, PlanStats, StepView
from faser_trtllm.core.request import Request

__all__ = ["FOREVER", "Decision", "Mode", "PlanStats", "Policy", "StepView"]

FOREVER = 1 << 62  # Decision.num_held of a plan that depends only on the number of requests
HELD_STEPS = 16  # minimum steps between plans: estimates change no faster
TRIAL_STEPS = 4  # of a candidate while drafting is in charge; the first two after a change are not counted
HELD_MS = 100.0  # minimum time between plans, so that planning takes less than 1 % of the time of short steps
MAX_HELD_STEPS = 1024


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def plan(self, view: StepView) -> Decision:
        """Decide before drafting what the next step runs, and the steps after it for which the decision is held."""

    def observe(self, stats: PlanStats) -> None:
        """Learn from the steps since the last plan; called before plan() if there were any."""


class StatelessPolicy:
    """A policy that learns nothing."""

    def observe(self, stats: PlanStats) -> None: ...


def mean_context(decoding: Sequence[Request]) -> float:
    """Return the mean number of tokens per request."""
    return sum(request.num_tokens for request in decoding) / len(decoding)
