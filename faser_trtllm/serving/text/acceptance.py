"""How many drafts each step of a request tested, and how many of them became tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.core.plan import OutputEnd
from faser_trtllm.core.request import RequestStats


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The drafts of a request by step; a step without drafts is left out.

    histogram [max_draft_len + 1]: steps by the number of drafts that became tokens. drafted, accepted: of each step.
    A draft that waits for a later step counts there, and one that follows a rejected draft counts with it.
    """

    histogram: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]

    @property
    def max_draft_len(self) -> int:
        """Drafts of a step at most."""
        return len(self.histogram) - 1


class AcceptanceLog:
    """Collects the steps of one request."""

    def __init__(self) -> None:
        self._drafted, self._accepted = array("i"), array("i")
        self._before = (0, 0, 0)

    def add(self, stats: RequestStats, num_kept: int, end: OutputEnd | None = None) -> None:
        """Count a step, if there was one since the last call. num_kept: its tokens that are output: a stop word or an
        end token cuts off the others. end: what counts up to a stop word that ended the output."""
        now = (stats.num_steps, stats.num_settled_drafts, stats.num_accepted_tokens)
        if end is not None:
            now = (stats.num_steps, end.num_draft_tokens, end.num_accepted_tokens)
        num_steps, num_drafted, num_accepted = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        if num_steps and num_drafted:
            self._drafted.append(num_drafted)
            self._accepted.append(min(num_accepted, num_kept))

    def result(self, max_draft_len: int) -> Acceptance:
        histogram = [0] * (max_draft_len + 1)
        for length in self._accepted:
            histogram[length] += 1
        return Acceptance(histogram, self._drafted, self._accepted)
