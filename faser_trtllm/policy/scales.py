"""How much slower than a table says things turn out to be, learnt pass by pass, on a machine whose speed changes.

log(measured / predicted) = mood + scale of that kind of pass + noise. The mood is the machine's, for all passes alike,
and no choice depends on it: a swing, which neighbours and clock rates move within milliseconds and which returns (an
Ornstein-Uhlenbeck process), about a level, which drifts within minutes. Since swings return, two ways to run can be
compared by what they took in the mean, not only where they change. The scales are the table's errors, which hold still.
All are followed by one Kalman filter, with what is known of each together with the others: a pass after a rest tells of
the mood and hardly of its scale; two kinds of passes one after the other tell how their scales compare. Scales are
expected to be near 1 and like those of passes of about as many rows, so that a pass of a size that was never seen is
believed to be as its neighbours are, and far from those, as the table says.
"""

from __future__ import annotations

import math

import numpy as np

from faser_trtllm.policy.goodput import FloatArray

# Variances of logs.
NOISE, SHORT_NOISE = 0.005, 0.025  # of one pass; the second if it is short, halved at 1 ms
SWING = 0.02
SWING_MS = 200.0  # after so long a swing is 1 / e of what it was
FIRST_LEVEL = 0.1
LEVEL_PER_MS = 1e-6  # a random walk of 0.1 within ten seconds
TARGET_SCALE, DRAFT_SCALE = 0.04, 0.5  # before anything is known, and long after it was
FORGET_MS = 200_000.0  # after so long a scale is as unknown as ever, but for 1 / e
SETTLE_MS = 2000.0  # time goes by for scales in such steps
LIKENESS_OCTAVES = 2.0  # of rows, over which the correlation of scales falls to 1 / e
LIKENESS_WAYS = 0.5  # correlation of the scales of passes of the same size with drafts and without
RESTLESS_GAIN = 0.05
MAX_RESTLESSNESS = 16.0
MAX_DEVIATION = 2.5  # in standard deviations; what is further off moves things no further
MAX_GAP_MS = 10_000.0
PUBLISH = 0.04  # change of a log that is worth new arrays
CHECK_EVERY = 64  # passes
NUM_OCTAVES = 13  # 1 to 4096 rows


class Scale:
    """Of one kind of pass, or of one between two kinds: log scale = (1 - share) x state[index] + share x the next."""

    __slots__ = ("index", "share")

    def __init__(self, index: int, share: float = 0.0) -> None:
        self.index = index
        self.share = share


class Mood:
    """Of the machine, with all scales; the one writer of both."""

    def __init__(self) -> None:
        self.factor = 1.0  # how much slower than usual everything is just now
        self._log = np.zeros(2)  # the swing, the level, then the scales
        self._covariance = np.diag([SWING, FIRST_LEVEL])
        self._prior = np.zeros((2, 2))  # the scales' covariance, nothing known
        self._published = np.zeros(2)
        self._unsettled_ms = 0.0
        self._num_passes = 0
        self._restlessness = 1.0  # how many times all variances of the machine's, not the scales', are as above

    def new_scale(self, variance: float) -> Scale:
        return Scale(self.new_scales(np.full((1, 1), variance)))

    def new_scales(self, covariance: FloatArray) -> int:
        """Scales that are expected to go together as covariance [n, n] says -> index of the first."""
        first = len(self._log)
        size = first + len(covariance)
        for name in ("_covariance", "_prior"):
            grown = np.zeros((size, size))
            grown[:first, :first] = getattr(self, name)
            grown[first:, first:] = covariance
            setattr(self, name, grown)
        self._log = np.concatenate([self._log, np.zeros(len(covariance))])
        self._published = np.concatenate([self._published, np.zeros(len(covariance))])
        return first

    def published(self, scale: Scale) -> float:
        """What costs are multiplied by."""
        return math.exp(_mix(self._published, scale))

    def published_logs(self, first: int, count: int) -> FloatArray:
        return self._published[first : first + count]

    def pass_time(self, ms: float) -> None:
        """Time goes by, so things may have changed."""
        gap_ms = min(max(ms, 0.0), MAX_GAP_MS)
        covariance = self._covariance
        kept = math.exp(-gap_ms / SWING_MS)
        self._log[0] *= kept
        covariance[0] *= kept
        covariance[1:, 0] = covariance[0, 1:]
        covariance[0, 0] = kept * covariance[0, 0] + (1.0 - kept * kept) * SWING * self._restlessness
        covariance[1, 1] = min(covariance[1, 1] + LEVEL_PER_MS * self._restlessness * gap_ms, FIRST_LEVEL)
        self._unsettled_ms += gap_ms
        if self._unsettled_ms >= SETTLE_MS:
            kept = math.exp(-self._unsettled_ms / FORGET_MS)
            self._unsettled_ms = 0.0
            self._log[2:] *= kept
            covariance[2:] *= kept
            covariance[:, 2:] *= kept
            covariance += (1.0 - kept * kept) * self._prior
        self._note_factor()

    def learn(
        self, scale: Scale, measured_ms: float, predicted_ms: float, *, moves: bool = True, num_passes: int = 1
    ) -> bool:
        """Passes of the scale's kind took measured_ms in the mean, where the table predicts predicted_ms. True:
        published is new.

        moves: whether it tells of all else, as the target's passes do; drafting may have been partly hidden.
        """
        if measured_ms <= 0.0 or predicted_ms <= 0.0:
            return False
        covariance = self._covariance
        with_pass = covariance[0] + covariance[1] + _mix(covariance, scale)
        total = float(with_pass[0] + with_pass[1] + _mix(with_pass, scale))
        total += self._restlessness * (NOISE + SHORT_NOISE / (1.0 + num_passes * measured_ms))
        limit = MAX_DEVIATION * math.sqrt(total)
        excess = math.log(measured_ms / predicted_ms) - float(self._log[0] + self._log[1] + _mix(self._log, scale))
        excess = min(max(excess, -limit), limit)
        if moves:
            self._note_surprise(excess * excess / total)
            self._log += (excess / total) * with_pass
            covariance -= np.multiply.outer(with_pass / total, with_pass)
            self._note_factor()
        else:
            self._learn_alone(scale.index, excess, with_pass, total)
        self._num_passes += 1
        return self._publish(scale)

    def _note_surprise(self, ratio: float) -> None:
        """ratio: of a square to what was expected of it. What is more restless than was thought is so in its passes and
        in its swings; the scales hold still nevertheless."""
        restlessness = self._restlessness * (1.0 + RESTLESS_GAIN * (ratio - 1.0))
        self._restlessness = min(max(restlessness, 1.0), MAX_RESTLESSNESS)

    def _note_factor(self) -> None:
        self.factor = math.exp(self._log[0] + self._log[1])

    def _learn_alone(self, index: int, excess: float, with_pass: FloatArray, total: float) -> None:
        """A gain for this scale only; the covariance is Joseph's form for it."""
        gain = float(with_pass[index]) / total
        self._log[index] += gain * excess
        row = self._covariance[index] - gain * with_pass
        row[index] += gain * (gain * total - float(with_pass[index]))
        self._covariance[index] = row
        self._covariance[:, index] = row

    def _publish(self, scale: Scale) -> bool:
        if self._num_passes % CHECK_EVERY:
            change = abs(float(_mix(self._log, scale)) - float(_mix(self._published, scale)))
        else:
            change = float(np.abs(self._log - self._published)[2:].max())
        if change <= PUBLISH:
            return False
        self._published = self._log.copy()
        return True


class ScalesByRows:
    """Scales of the target's passes by their number of rows, one to the octave and interpolated: a table may be right
    where rows wait for memory and wrong where they compute."""

    def __init__(self, mood: Mood, first: int) -> None:
        """first: index of its first scale."""
        self._mood = mood
        self._first = first
        self._curve = np.ones(1)

    @classmethod
    def pair(cls, mood: Mood) -> tuple[ScalesByRows, ScalesByRows]:
        """Of two ways to run the same passes, behind the draft model's and behind each other."""
        places = np.arange(NUM_OCTAVES)
        by_rows = np.exp(-np.abs(places[:, None] - places) / LIKENESS_OCTAVES)
        by_way = np.array([[1.0, LIKENESS_WAYS], [LIKENESS_WAYS, 1.0]])
        first = mood.new_scales(TARGET_SCALE * np.kron(by_way, by_rows))
        return cls(mood, first), cls(mood, first + NUM_OCTAVES)

    def learn(self, num_rows: int, measured_ms: float, predicted_ms: float, num_passes: int = 1) -> bool:
        """As Mood.learn(). True: published scales are new, perhaps others' too."""
        share, place = math.modf(min(math.log2(num_rows), NUM_OCTAVES - 1))
        scale = Scale(self._first + int(place), share)
        return self._mood.learn(scale, measured_ms, predicted_ms, num_passes=num_passes)

    def forget_curve(self) -> None:
        self._curve = np.ones(1)

    def curve(self, max_rows: int) -> FloatArray:
        """By what the table's passes of 0 to max_rows rows are multiplied."""
        if self._curve.size <= max_rows:
            place = np.log2(np.maximum(np.arange(max(max_rows, 64) + 1), 1))
            logs = self._mood.published_logs(self._first, NUM_OCTAVES)
            self._curve = np.exp(np.interp(place, np.arange(NUM_OCTAVES), logs))
        return self._curve[: max_rows + 1]


def _mix(values: FloatArray, scale: Scale) -> FloatArray:
    """The scale's row of an array by state."""
    if scale.share == 0.0:
        return np.asarray(values[scale.index])
    return np.asarray((1.0 - scale.share) * values[scale.index] + scale.share * values[scale.index + 1])
