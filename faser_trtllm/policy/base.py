"""The policy interface: how many tokens to draft and how many rows to verify, per request and per step.

Policies take and return host numbers; they import no torch and see no tensors. Exactness rule (DESIGN section 3):
whether a draft or a row of a request exists may depend on that request's tokens up to it, on other requests, and on
older steps, never on a later token of the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faser_trtllm.core.decision import DraftPlan, DraftStop, ExitView, Mode, StepOutcome, StepView

__all__ = [
    "FOREVER",
    "DraftPlan",
    "DraftStop",
    "ExitView",
    "Mode",
    "Policy",
    "StatelessPolicy",
    "StepOutcome",
    "StepView",
]


FOREVER = 1 << 62  # DraftPlan.num_held of a plan that depends on nothing but the number of requests


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def plan(self, view: StepView) -> DraftPlan:
        """Before drafting: how many pending drafts, when to stop, and the mode; for this step, and as many more as the
        plan says that it is held."""

    def frontier_lengths(self, view: StepView, num_pending: Sequence[int]) -> list[int]:
        """After drafting: of num_pending[i] drafts, how many to verify in this pass (0 to num_pending[i])."""

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        """Segment boundaries (indices into EngineSpec.segments) at which this pass looks for rows to drop."""

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        """How many of its first rows each decoding request keeps (1 to num_rows[i]) behind the boundary."""

    def wants_outcome(self, is_speculative: bool) -> bool:
        """Whether to be told the outcome of the step that is just verified; asked once per step that ran rows of
        decoding requests. Gathering an outcome takes the host as long as planning a small step.

        is_speculative: drafts were pending or made.
        """

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step; called once per step whose outcome was wanted."""


class StatelessPolicy:
    """What policies share that neither prune nor learn, and verify all that is pending."""

    def frontier_lengths(self, view: StepView, num_pending: Sequence[int]) -> list[int]:
        return list(num_pending)

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        return ()

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        return list(exit_view.num_rows)

    def wants_outcome(self, is_speculative: bool) -> bool:
        return False

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""
