"""Policies that measure nothing: no speculation, one length for all, and a length per batch size from a table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from faser_trtllm.policy.base import FOREVER, Decision, Mode, StatelessPolicy, StepView


class OffPolicy(StatelessPolicy):
    """Never drafts, and uses up what is still pending."""

    name = "off"

    def plan(self, view: StepView) -> Decision:
        return Decision([0] * len(view.decoding), num_held=FOREVER)


class FixedPolicy(StatelessPolicy):
    """The same length for every request and every step, as most systems do it."""

    def __init__(self, num_draft_tokens: int, mode: Mode = Mode.SERIAL) -> None:
        self.name = f"fixed:{num_draft_tokens}"
        self._num_draft_tokens = num_draft_tokens
        self._mode = mode

    def plan(self, view: StepView) -> Decision:
        return Decision([self._num_draft_tokens] * len(view.decoding), mode=self._mode, num_held=FOREVER)


class DraftLenSchedulePolicy(StatelessPolicy):
    """The length of the largest table entry that is at most the number of decoding requests; none: 0 (TensorRT-LLM's
    draft_len_schedule)."""

    def __init__(self, name: str, lengths: Mapping[int, int]) -> None:
        """lengths: batch size -> draft length, batch sizes rising."""
        self.name = name
        self._sizes = tuple(lengths)
        self._lengths = (0, *lengths.values())

    def plan(self, view: StepView) -> Decision:
        n = len(view.decoding)
        return Decision([self._lengths[bisect_right(self._sizes, n)]] * n, num_held=FOREVER)
