"""The policy interface: how many tokens to draft and how many rows to verify, per request and per step.

Policies take and return host numbers; they import no torch and see no tensors. What they decide may depend on anything
that is known, later drafts of a request included, because drafts that get no row stay pending: a decision says when a
draft is tested, never whether (docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faser_trtllm.core.decision import Decision, Mode, PlanStats, StepView
from faser_trtllm.core.request import Request

__all__ = ["FOREVER", "Decision", "Mode", "PlanStats", "Policy", "StepView"]

FOREVER = 1 << 62  # Decision.num_held of a plan that depends on nothing but the number of requests
HELD_STEPS = 16  # at least: what a plan rests on is learnt no faster
TRIAL_STEPS = 4  # of a candidate, where drafting is in charge; the first two after a change are not counted
HELD_MS = 100.0  # and about so long, so that planning takes less than 1 % of short steps' time
MAX_HELD_STEPS = 1024


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def plan(self, view: StepView) -> Decision:
        """Before drafting: all that the next step needs, and as many more as the decision is held for."""

    def observe(self, stats: PlanStats) -> None:
        """Learn from the steps since the last plan; called before plan(), where there were such steps."""


class StatelessPolicy:
    """A policy that learns nothing."""

    def observe(self, stats: PlanStats) -> None: ...


def mean_context(decoding: Sequence[Request]) -> float:
    """Tokens per request."""
    return sum(request.num_tokens for request in decoding) / len(decoding)
