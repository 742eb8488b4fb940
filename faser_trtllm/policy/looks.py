"""Which steps a policy learns from: all at first, then a few of them, since looking takes the host's time.

What is looked at depends on the number of steps since the last change between drafting and not, and on how much of the
time learning has taken so far: where steps are short, fewer of them are looked at. Steps are never timed right behind
one that was looked at: its caches are cold, which costs a short pass 10 to 40 %.
"""

from __future__ import annotations

IDLE_CYCLE = 16  # steps without drafts, of which one is timed
CYCLE = 6  # the same with drafts
WARM_UP = 2  # steps of a kind before the first of it that is timed
TEST_EVERY = 4  # steps with drafts, times the stretch, of which one's tested drafts are looked at
MAX_STRETCH = 16  # of the cycles
MAX_SHARE = 0.005  # of the time, for learning
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

    def ask(self, is_speculative: bool, *, all_tests: bool) -> bool:
        """all_tests: no step's tested drafts are to be left out."""
        self.step += 1
        self._place += 1
        if is_speculative != self._was_speculative:
            self._place = self._began = 0
        self._was_speculative = is_speculative
        cycle = (CYCLE if is_speculative else IDLE_CYCLE) * self._stretch
        place = self._place - self._began - WARM_UP
        is_timed = place >= 0 and place % cycle == 0
        if is_timed and self._stretch != self._wanted_stretch:
            cycle = cycle // self._stretch * self._wanted_stretch
            self._stretch = self._wanted_stretch
            self._began = self._place - WARM_UP
        self.weight = cycle if is_timed else 0
        return is_timed or (is_speculative and (all_tests or place % (TEST_EVERY * self._stretch) == 0))
