"""The host's time per step, beside the engines: learnt by number of requests, with and without drafts."""

from __future__ import annotations

import math

MEMORY = 0.95  # per step, of what was seen; the first ones count alike
DRAFTING = 1.8  # a step with drafts over one without, where only that one is known; 1.5 to 2.1 measured
NEW = 0.1  # relative change that is worth new arrays


class _Mean:
    __slots__ = ("ms", "num_seen", "published")

    def __init__(self) -> None:
        self.ms = self.published = 0.0
        self.num_seen = 0


class Overheads:
    def __init__(self, usual_ms: float) -> None:
        """usual_ms: what is believed of a step without drafts until one was seen."""
        self._usual_ms = usual_ms
        self._means: tuple[dict[int, _Mean], dict[int, _Mean]] = ({}, {})

    def ms(self, num_requests: int, is_drafting: bool) -> float:
        """Of the size seen that is nearest."""
        means = self._means[is_drafting]
        if means:
            wanted = _class_of(num_requests)
            return means[min(means, key=lambda seen: abs(seen - wanted))].published
        return DRAFTING * self.ms(num_requests, False) if is_drafting else self._usual_ms

    def learn(self, num_requests: int, is_drafting: bool, ms: float) -> bool:
        """A step took ms beside its engines. True: what ms() tells is new."""
        mean = self._means[is_drafting].setdefault(_class_of(num_requests), _Mean())
        mean.num_seen += 1
        mean.ms += max(1.0 - MEMORY, 1.0 / mean.num_seen) * (ms - mean.ms)
        if mean.num_seen > 1 and abs(mean.ms - mean.published) <= NEW * mean.published:
            return False
        mean.published = mean.ms
        return True


def _class_of(num_requests: int) -> int:
    """Two to the octave."""
    return round(2.0 * math.log2(num_requests))
