"""What a trial really costs: the tokens that the arm in charge would have brought meanwhile, less its own.

Learning from every step of a trial takes the host's time, and the first steps of another way of running find cold
caches, which no prediction knows; where steps are short that is most of what a trial costs.
"""

from __future__ import annotations


class Trial:
    """Of an arm, for some steps, or a probe's single one. rate: tokens per ms that the arm in charge would bring."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._since_s: float | None = None
        self.lost = 0.0  # tokens so far; less than 0 if the trial brings more

    @property
    def lost_ms(self) -> float:
        """The time that the arm in charge would have brought the lost tokens in."""
        return self.lost / self.rate if self.rate else 0.0

    def step(self, now_s: float, *, has_prompts: bool) -> None:
        """A step begins; what prompts take is nobody's."""
        if self._since_s is not None:
            self.lost += self.rate * 1e3 * (now_s - self._since_s)
        self._since_s = None if has_prompts else now_s

    def pause(self) -> None:
        """Nobody decodes; what time goes by is nobody's."""
        self._since_s = None

    def add(self, num_tokens: int) -> None:
        """A step without prompts brought so many."""
        self.lost -= num_tokens
