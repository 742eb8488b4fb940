"""No speculation: never draft, and use up what is still pending."""

from __future__ import annotations

from faser_trtllm.policy.base import FOREVER, DraftPlan, StatelessPolicy, StepView


class OffPolicy(StatelessPolicy):
    name = "off"

    def plan(self, view: StepView) -> DraftPlan:
        return DraftPlan([0] * len(view.decoding), num_held=FOREVER)
