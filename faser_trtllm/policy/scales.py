"""How much slower than a table says things turn out to be, learnt pass by pass, on a machine whose speed changes.

log(measured / predicted) = mood + scale of that kind of pass + noise. The mood is the machine's: neighbours, clock
rates and temperature move it within seconds, for all passes alike, and no choice depends on it. The scales are the
table's errors, which hold still. Both are followed by a Kalman filter of one value each, which shares what a pass
teaches by how little is known of either: what changes while the same kind of pass runs on and on is mood; what differs
between two kinds that take turns, or when one follows the other, is scale. What the target's scales share is mood too:
a pass of a size that was never seen is believed to be as the table says, compared with the others.
"""

from __future__ import annotations

import math

import numpy as np

from faser_trtllm.policy.goodput import FloatArray

# Variances of logs.
NOISE = 0.01  # of one pass
MOOD_PER_MS = 2e-4  # a random walk of 0.3 within half a second
SCALE_PER_MS = 2e-7  # of 0.1 within a minute
FIRST_MOOD, FIRST_SCALE = 1.0, 0.05
MAX_DEVIATION = 3.0  # in standard deviations; what is further off moves things no further
MAX_GAP_MS = 10_000.0
PUBLISH = 0.04  # change of a log that is worth new arrays
CENTRE_EVERY = 64  # passes
_PER_OCTAVE = 2  # scales by rows


class Scale:
    """Of one kind of pass; published is what costs are multiplied by."""

    __slots__ = ("log", "published", "seen_ms", "variance")

    def __init__(self) -> None:  # use Mood.new_scale
        self.log = 0.0
        self.variance = FIRST_SCALE
        self.seen_ms = 0.0
        self.published = 1.0


class Mood:
    """Of the machine; the one writer of the scales."""

    def __init__(self) -> None:
        self._log = 0.0
        self._variance = FIRST_MOOD
        self._now_ms = 0.0
        self._scales: list[Scale] = []
        self._target_scales: list[Scale] = []
        self._num_passes = 0

    def new_scale(self, *, is_target: bool = False) -> Scale:
        """is_target: of passes of the target model."""
        scale = Scale()
        self._scales.append(scale)
        if is_target:
            self._target_scales.append(scale)
        return scale

    @property
    def factor(self) -> float:
        """How much slower than usual everything is just now."""
        return math.exp(self._log)

    def pass_time(self, ms: float) -> None:
        """Time goes by, so things may have changed."""
        gap_ms = min(max(ms, 0.0), MAX_GAP_MS)
        self._now_ms += gap_ms
        self._variance = min(self._variance + MOOD_PER_MS * gap_ms, FIRST_MOOD)

    def learn(self, scale: Scale, measured_ms: float, predicted_ms: float, *, moves: bool = True) -> bool:
        """A pass of the scale's kind took measured_ms, where the table predicts predicted_ms. True: published is new.

        moves: whether it tells of the mood, as the target's passes do; drafting may have been partly hidden.
        """
        if measured_ms <= 0.0 or predicted_ms <= 0.0:
            return False
        variance = min(scale.variance + SCALE_PER_MS * (self._now_ms - scale.seen_ms), FIRST_SCALE)
        total = variance + self._variance + NOISE
        limit = MAX_DEVIATION * math.sqrt(total)
        excess = math.log(measured_ms / predicted_ms) - scale.log - self._log
        excess = min(max(excess, -limit), limit)
        share, mood_share = variance / total, self._variance / total
        scale.log += share * excess
        scale.variance = variance * (1.0 - share)
        scale.seen_ms = self._now_ms
        if moves:
            self._log += mood_share * excess
            self._variance *= 1.0 - mood_share
        self._num_passes += 1
        if self._num_passes % CENTRE_EVERY == 0:
            self._centre()
        is_new = False
        for each in self._scales if self._num_passes % CENTRE_EVERY == 0 else (scale,):
            if abs(each.log - math.log(each.published)) > PUBLISH:
                each.published = math.exp(each.log)
                is_new = True
        return is_new

    def _centre(self) -> None:
        weights = [1.0 / scale.variance for scale in self._target_scales]
        if not weights:
            return
        mean = sum(w * s.log for w, s in zip(weights, self._target_scales, strict=True)) / sum(weights)
        for scale in self._scales:
            if scale.variance < FIRST_SCALE:
                scale.log -= mean
        self._log += mean


class ScalesByRows:
    """Scales of passes by their number of rows, two to the octave: a table may be right where rows wait for memory and
    wrong where they compute. Between sizes that were seen they are interpolated; beyond, what was learnt fades within
    octaves and the table is believed, so that what it promises is tried.
    """

    def __init__(self, mood: Mood) -> None:
        self._mood = mood
        self._scales: dict[int, Scale] = {}
        self._curve = np.ones(1)

    def learn(self, num_rows: int, measured_ms: float, predicted_ms: float) -> bool:
        """True: published scales are new, perhaps others' too."""
        return self._mood.learn(self._scale(round(_PER_OCTAVE * math.log2(num_rows))), measured_ms, predicted_ms)

    def forget_curve(self) -> None:
        self._curve = np.ones(1)

    def _scale(self, place: int) -> Scale:
        found = self._scales.get(place)
        if found is None:
            found = self._scales[place] = self._mood.new_scale(is_target=True)
        return found

    def curve(self, max_rows: int) -> FloatArray:
        """By what the table's passes of 0 to max_rows rows are multiplied."""
        if self._curve.size <= max_rows:
            place = _PER_OCTAVE * np.log2(np.maximum(np.arange(max(max_rows, 64) + 1), 1))
            known = sorted(self._scales)
            logs = np.interp(place, known, [math.log(self._scales[k].published) for k in known]) if known else 0 * place
            beyond = np.maximum(place - known[-1], known[0] - place) if known else 0 * place
            self._curve = np.exp(logs * np.exp(-np.maximum(beyond, 0.0) / _PER_OCTAVE))
        return self._curve[: max_rows + 1]
