"""Which steps a policy learns from: all at first, then a few of them, since looking takes the host's time.

What is looked at depends on the number of steps since the last change between drafting and not, and on nothing else.
"""

from __future__ import annotations

IDLE_CYCLE = 32  # steps without drafts, of which LOOKS in a row are looked at
CYCLE = 12  # the same with drafts
LOOKS = 2  # in a row, so that the time from one step to the next is seen
TEST_EVERY = 4  # steps with drafts, of which one more's tested drafts are looked at


class Looks:
    """ask() tells whether the step just verified is looked at at all; weight then, for how many steps its times stand:
    0 if only its tested drafts are of interest."""

    def __init__(self) -> None:
        self.step = 0  # number of the step asked for
        self.weight = 1
        self._place = 0  # steps of the same kind since it began
        self._was_speculative = False

    def ask(self, is_speculative: bool, *, all_steps: bool) -> bool:
        """all_steps: nothing is to be left out, but for the first pass without drafts: it comes after the draft model's
        and takes longer than those that follow."""
        self.step += 1
        self._place = self._place + 1 if is_speculative == self._was_speculative else 0
        self._was_speculative = is_speculative
        self.weight = 1
        if not is_speculative:
            if self._place == 0:
                return False
            if not all_steps:
                self.weight = IDLE_CYCLE // LOOKS
                return (self._place - 1) % IDLE_CYCLE < LOOKS
        elif not all_steps:
            place = self._place % CYCLE
            self.weight = CYCLE // LOOKS if place < LOOKS else 0
            return place < LOOKS or place % TEST_EVERY == 0
        return True
