"""Which steps a policy learns from: all at first, then a few of them, since looking takes the host's time.

What is looked at depends on the number of steps since the last change between drafting and not, and on how much of the
time learning has taken so far: where steps are short, fewer of them are looked at.
"""

from __future__ import annotations

IDLE_CYCLE = 32  # steps without drafts, of which LOOKS in a row are looked at
CYCLE = 12  # the same with drafts
LOOKS = 2  # in a row, so that the time from one step to the next is seen
TEST_EVERY = 4  # steps with drafts, times the stretch, of which one more's tested drafts are looked at
MAX_STRETCH = 8  # of the cycles
MAX_SHARE = 0.01  # of the time, for learning
PACE_S = 0.1


class Looks:
    """ask() tells whether the step just verified is looked at at all; weight then, for how many steps its times stand:
    0 if only its tested drafts are of interest."""

    def __init__(self) -> None:
        self.step = 0  # number of the step asked for
        self.weight = 1
        self._place = 0  # steps of the same kind since it began
        self._began = 0  # its place when the cycles were stretched
        self._was_speculative = False
        self._stretch = self._wanted_stretch = 1
        self._paced_s = 0.0
        self._learning_s = 0.0

    def pace(self, now_s: float, learning_s: float) -> None:
        """learning_s: what learning has taken until now_s, both since the start."""
        passed_s = now_s - self._paced_s
        if passed_s < PACE_S:
            return
        share = (learning_s - self._learning_s) / passed_s
        self._paced_s, self._learning_s = now_s, learning_s
        if share > MAX_SHARE:
            self._wanted_stretch = min(2 * self._stretch, MAX_STRETCH)
        elif share < MAX_SHARE / 3:
            self._wanted_stretch = max(self._stretch // 2, 1)

    @property
    def is_warm(self) -> bool:
        """Whether the step before was of the same kind: otherwise its passes take longer than those that follow."""
        return self._place > 0

    def ask(self, is_speculative: bool, *, all_steps: bool) -> bool:
        """all_steps: nothing is to be left out, but for the first pass without drafts: it comes after the draft model's
        and takes longer than those that follow."""
        self.step += 1
        self._place += 1
        if is_speculative != self._was_speculative:
            self._place = self._began = 0
        self._was_speculative = is_speculative
        self.weight = 1
        if not is_speculative and self._place == 0:
            return False
        if all_steps:
            return True
        first = 0 if is_speculative else 1
        cycle = (CYCLE if is_speculative else IDLE_CYCLE) * self._stretch
        place = (self._place - self._began - first) % cycle
        if place == 0 and self._stretch != self._wanted_stretch:
            cycle = cycle // self._stretch * self._wanted_stretch
            self._stretch = self._wanted_stretch
            self._began = self._place - first
        self.weight = cycle // LOOKS if place < LOOKS else 0
        return place < LOOKS or (is_speculative and place % (TEST_EVERY * self._stretch) == 0)
