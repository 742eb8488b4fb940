"""The first steps after a change of what runs: they say nothing of those that follow.

Between drafting and not, a pass finds its weights pushed out of the caches, and it takes several passes until they are
back; a draft model that begins makes up for what it has missed.
"""

from __future__ import annotations

STEPS = 2  # at least
S = 0.007  # and so long: on two cores of a shared EPYC passes of 0.2 to 0.4 ms take up to 1.7 times as long before


class WarmUp:
    """Begins with the first step that it is asked for."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._until_s = 0.0

    def lasts(self, now_s: float) -> bool:
        """Whether the step that begins now is one of the first."""
        if self._num_steps == 0:
            self._until_s = now_s + S
        self._num_steps += 1
        return self._num_steps <= STEPS or now_s < self._until_s
