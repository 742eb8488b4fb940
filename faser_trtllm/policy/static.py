"""Policies that measure nothing: no speculation, one length for all, and a table of lengths by batch size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from faser_trtllm.policy.base import FOREVER, Decision, Mode, StatelessPolicy, StepView


class OffPolicy(StatelessPolicy):
    """A policy that never drafts, but uses up drafts that are still pending."""

    name = "off"

    def plan(self, view: StepView) -> Decision:
        return Decision([0] * len(view.decoding), num_held=FOREVER)


class FixedPolicy(StatelessPolicy):
    """A policy with the same length for every request and step, as in most systems."""

    def __init__(self, num_draft_tokens: int, mode: Mode = Mode.SERIAL) -> None:
        self.name = f"fixed:{num_draft_tokens}"
        self._num_draft_tokens = num_draft_tokens
        self._mode = mode

    def plan(self, view: StepView) -> Decision:
        return Decision([self._num_draft_tokens] * len(view.decoding), mode=self._mode, num_held=FOREVER)


class DraftLenSchedulePolicy(StatelessPolicy):
    """A policy with the length of the largest batch size in its table that does not exceed the number of decoding
    requests, 0 if there is none (TensorRT-LLM's draft_len_schedule)."""

    def __init__(self, name: str, lengths: Mapping[int, int]) -> None:
        """lengths: draft length by batch size, in ascending order of batch sizes."""
        self.name = name
        self._sizes = tuple(lengths)
        self._lengths = (0, *lengths.values())

    def plan(self, view: StepView) -> Decision:
        n = len(view.decoding)
        return Decision([self._lengths[bisect_right(self._sizes, n)]] * n, num_held=FOREVER)
