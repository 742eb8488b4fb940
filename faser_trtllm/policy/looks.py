"""Which steps a policy learns from: all at first, then a few of them, since looking takes the host's time.

What is looked at depends on the number of steps since the last change between drafting and not, and on how much of the
time learning has taken so far: where steps are short, fewer of them are looked at. Steps are never timed right behind
one that was looked at, nor while a change between drafting and not is felt: their caches are cold.
"""

from __future__ import annotations

from faser_trtllm.policy.warm_up import WarmUp

IDLE_CYCLE = 16  # steps without drafts, of which one is timed
CYCLE = 6  # the same with drafts
TEST_EVERY = 4  # steps with drafts, times the stretch, of which one's tested drafts are looked at
MAX_STRETCH = 16  # of the cycles
MAX_SHARE = 0.0015  # of the time, for learning; planning anew behind it takes about three times as long
PACE_S = 0.1


class Looks:
    """plan() and num_held() while a step is planned; ask(), once it is verified, tells whether it is looked at at all;
    is_timed then, whether its times are of interest, or its tested drafts only."""

    def __init__(self) -> None:
        self.step = 0  # number of the step asked for
        self.is_timed = False  # the step asked for last
        self._since = 0  # steps of the same kind since the first that was timed, or since the cycles were stretched
        self._warm_up: WarmUp | None = WarmUp()
        self._was_speculative = False
        self._now_s = 0.0  # when the last step was planned
        self._stretch = self._wanted_stretch = 1
        self._paced_s = 0.0
        self._learning_s = 0.0

    def plan(self, now_s: float) -> None:
        """A step is planned."""
        self._now_s = now_s

    def num_held(self, is_speculative: bool, at_most: int) -> int:
        """So many steps behind the one that is planned now need no planning: up to the next one that is looked at,
        which is thus as most steps are."""
        if self._warm_up is not None or is_speculative != self._was_speculative:
            return 0
        since = self._since + 1
        num_left = -since % self._cycle
        if is_speculative:
            num_left = min(num_left, -since % (TEST_EVERY * self._stretch))
        return min(num_left, at_most)

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

    def pass_over(self) -> None:
        """A step without drafts, as ask(), where none of those is ever looked at."""
        self.step += 1
        self.is_timed = self._was_speculative = False

    def ask(self, is_speculative: bool, *, all_tests: bool) -> bool:
        """all_tests: no tested drafts of a step that was planned are to be left out."""
        self.step += 1
        self._since += 1
        self.is_timed = False
        if is_speculative != self._was_speculative:
            self._was_speculative, self._warm_up = is_speculative, WarmUp()
        if self._warm_up is not None:
            if self._warm_up.lasts(self._now_s):
                return is_speculative and all_tests
            self._warm_up, self._since = None, 0
        self.is_timed = self._since % self._cycle == 0
        if self.is_timed and self._stretch != self._wanted_stretch:
            self._stretch, self._since = self._wanted_stretch, 0
        return self.is_timed or (is_speculative and (all_tests or self._since % (TEST_EVERY * self._stretch) == 0))

    @property
    def _cycle(self) -> int:
        return (CYCLE if self._was_speculative else IDLE_CYCLE) * self._stretch
