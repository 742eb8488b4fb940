"""One length per batch size, from a table that was written by hand (TensorRT-LLM's draft_len_schedule)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from faser_trtllm.policy.base import FOREVER, DraftPlan, StatelessPolicy, StepView


class DraftLenSchedulePolicy(StatelessPolicy):
    """All decoding requests get the length of the largest table entry that is at most their number; none: 0."""

    def __init__(self, name: str, lengths: Mapping[int, int]) -> None:
        """lengths: batch size -> draft length, batch sizes rising."""
        self.name = name
        self._sizes = tuple(lengths)
        self._lengths = (0, *lengths.values())

    def plan(self, view: StepView) -> DraftPlan:
        n = len(view.decoding)
        return DraftPlan([self._lengths[bisect_right(self._sizes, n)]] * n, num_held=FOREVER)
