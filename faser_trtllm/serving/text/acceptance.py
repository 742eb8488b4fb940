"""Counts of the draft tokens that each step of a request tested and accepted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.core.plan import OutputEnd
from faser_trtllm.core.request import RequestStats


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Draft tokens of a request, for each step that tested any.

    A draft counts in the step that tests it. Drafts after a rejected one count in the step that rejected it.
    """

    histogram: Sequence[int]  # [max_draft_len + 1]: steps by their number of accepted drafts
    drafted: Sequence[int]  # per step
    accepted: Sequence[int]  # per step

    @property
    def max_draft_len(self) -> int:
        return len(self.histogram) - 1


class AcceptanceLog:
    """Collects the counts of one request."""

    def __init__(self) -> None:
        self._drafted, self._accepted = array("i"), array("i")
        self._before = (0, 0, 0)

    def add(self, stats: RequestStats, num_kept: int, end: OutputEnd | None = None) -> None:
        """Count a step, if there was one since the last call.

        num_kept: the step's tokens that are output, which end before a stop word or end token. end: the counts up to
        the stop word, if one ended the output.
        """
        now = (stats.num_steps, stats.num_settled_drafts, stats.num_accepted_tokens)
        if end is not None:
            now = (stats.num_steps, end.num_draft_tokens, end.num_accepted_tokens)
        num_steps, num_drafted, num_accepted = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        if num_steps and num_drafted:
            self._drafted.append(num_drafted)
            self._accepted.append(min(num_accepted, num_kept))

    def result(self, max_draft_len: int) -> Acceptance:
        """Return the counts so far. max_draft_len: no step accepted more drafts."""
        histogram = [0] * (max_draft_len + 1)
        for length in self._accepted:
            histogram[length] += 1
        return Acceptance(histogram, self._drafted, self._accepted)
