"""How much slower than a table says things turn out to be, learnt step by step."""

from __future__ import annotations

import math

import numpy as np

from faser_trtllm.policy.goodput import FloatArray

FEW = 8
STEP = 1.02  # of a scale, per value looked at
MAX_SCALE = 16.0  # of a table that is wrong altogether
PUBLISH = 0.05  # relative change of a scale that is worth new arrays
_PER_OCTAVE = 2  # scales by rows


class Scale:
    """Measured over predicted time: the mean of the first few, then small steps towards the median."""

    def __init__(self) -> None:
        self._value = self.published = 1.0
        self._num_seen = 0

    def learn(self, measured_ms: float, predicted_ms: float) -> bool:
        """A pass with a late prompt or a busy neighbour moves it no further than any other. True: published is new."""
        if measured_ms <= 0.0 or predicted_ms <= 0.0:
            return False
        self._num_seen += 1
        ratio = min(measured_ms / predicted_ms, MAX_SCALE)
        if self._num_seen <= FEW:
            self._value += (min(ratio, 2.0 * self._value) - self._value) / (1.0 + self._num_seen)  # 1 counts as seen
        elif ratio > STEP * self._value:
            self._value *= STEP
        elif ratio < self._value / STEP:
            self._value /= STEP
        if abs(self._value / self.published - 1.0) <= PUBLISH:
            return False
        self.published = self._value
        return True


class ScalesByRows:
    """Scales of passes by their number of rows, two to the octave.

    What passes of some rows teach holds for passes of about as many, and fades within octaves: a table may be right
    where rows wait for memory and wrong where they compute. Where nothing was learnt the table is believed, so that
    what it promises is tried.
    """

    def __init__(self) -> None:
        self._scales: dict[int, Scale] = {}
        self._curve = np.ones(1)

    def learn(self, num_rows: int, measured_ms: float, predicted_ms: float) -> bool:
        """True: the curve is new."""
        scale = self._scales.setdefault(round(_PER_OCTAVE * math.log2(num_rows)), Scale())
        if not scale.learn(measured_ms, predicted_ms):
            return False
        self._curve = np.ones(1)
        return True

    def curve(self, max_rows: int) -> FloatArray:
        """By what the table's passes of 0 to max_rows rows are multiplied."""
        if self._curve.size <= max_rows:
            place = _PER_OCTAVE * np.log2(np.maximum(np.arange(max(max_rows, 64) + 1), 1))
            known = np.array(list(self._scales), np.float64)
            excess = np.array([scale.published - 1.0 for scale in self._scales.values()])
            weight = np.exp(-np.abs(place[:, None] - known) / _PER_OCTAVE)
            self._curve = 1.0 + (weight @ excess) / np.maximum(weight.sum(axis=1), 1.0)
        return self._curve[: max_rows + 1]
