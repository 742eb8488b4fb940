"""The same speculative length for every request and every step, as most systems do it."""

from __future__ import annotations

from faser_trtllm.policy.base import FOREVER, DraftPlan, Mode, StatelessPolicy, StepView


class FixedPolicy(StatelessPolicy):
    def __init__(self, num_draft_tokens: int, mode: Mode = Mode.SERIAL) -> None:
        self.name = f"fixed:{num_draft_tokens}"
        self._num_draft_tokens = num_draft_tokens
        self._mode = mode

    def plan(self, view: StepView) -> DraftPlan:
        return DraftPlan([self._num_draft_tokens] * len(view.decoding), mode=self._mode, num_held=FOREVER)
