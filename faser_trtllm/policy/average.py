"""A mean with exponential forgetting."""

from __future__ import annotations


class Average:
    """A mean whose total weight is limited to memory, so that old values are forgotten. prior: weight of mean."""

    __slots__ = ("_memory", "mean", "weight")

    def __init__(self, memory: float, prior: float = 0.0, mean: float = 0.0) -> None:
        self.mean, self.weight, self._memory = mean, prior, memory

    def add(self, value: float, weight: float) -> None:
        if weight <= 0.0:  # steps within one tick of a coarse clock
            return
        self.weight = min(self.weight + weight, self._memory)
        self.mean += min(1.0, weight / self.weight) * (value - self.mean)
