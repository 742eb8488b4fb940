"""Which way of running (an arm: drafting, off, an overlapped mode) is in charge: the best by what is predicted and what
was measured.

A model predicts each arm's goodput; what its plans brought corrects that, by one mean of log(tokens / promised) per arm
and class of batch sizes. What does not run is not measured, so a small share of the time goes to plans of another arm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from faser_trtllm.policy.average import Average

OFF = "off"
EXPLORED_SHARE = 0.004  # of the time that may be lost to plans of arms that are not in charge
HYSTERESIS = 0.02  # by so much another arm must look better to take over
LEAST_LOSS = 0.25  # of a trial's time, that it is taken to cost at least
ARM_STEPS = 2000.0  # of an arm, after which older ones are forgotten
ARM_PRIOR_STEPS = 16.0  # that the prediction counts as
STALE_STEPS = 20_000.0  # of other arms, after which what was measured of an arm counts 1 / e
MAX_SAVED_PLANS = 2.0  # what is not lost now may be lost later: so many plans' worth of it


class Arms:
    def __init__(self, table_error: float = 0.0) -> None:
        """table_error: share by which predictions may be wrong; an arm that is further behind is no free trial's."""
        self._lead = (1.0 + table_error) ** 2
        self._measured: dict[int, dict[str, Average]] = {}  # by class of batch sizes
        self._in_charge: dict[int, str] = {}
        self._num_trials: Counter[tuple[int, str]] = Counter()
        self._saved_ms = 0.0  # that may be lost

    def choose(
        self,
        batch_size: int,
        predicted: Mapping[str, float],
        plan_ms: float,
        entry_ms: Mapping[str, float],
        probe: str = "",
    ) -> tuple[str, str | None]:
        """-> the arm in charge, and the one to run instead now, if any, for about plan_ms.

        predicted: goodput of every arm that can run now. entry_ms: what beginning with an arm costs beside that.
        probe: an arm that is never in charge.
        """
        size_class = _class_of(batch_size)
        measured = self._measured.setdefault(size_class, {})
        scores = {arm: goodput * math.exp(_mean(measured, arm)) for arm, goodput in predicted.items()}
        last = self._in_charge.get(size_class, "")
        best = max(
            (arm for arm in scores if arm != probe), key=lambda arm: scores[arm] * (1.0 + HYSTERESIS * (arm == last))
        )
        self._in_charge[size_class] = best
        others = [arm for arm in scores if arm != best]
        if others:
            rival = min(others, key=lambda arm: self._num_trials[size_class, arm])
            loss_ms = max(0.0, 1.0 - scores[rival] / scores[best]) * plan_ms
            loss_ms = max(loss_ms + min(entry_ms.get(rival, 0.0), plan_ms), LEAST_LOSS * plan_ms)
            self._saved_ms = min(self._saved_ms, MAX_SAVED_PLANS * loss_ms)
            is_free = (  # once for nothing: the table may be wrong
                best in measured
                and not self._num_trials[size_class, rival]
                and scores[rival] * self._lead > scores[best]
            )
            if is_free or self._saved_ms >= loss_ms:
                self._saved_ms -= 0.0 if is_free else loss_ms
                self._num_trials[size_class, rival] += 1
                return best, rival
        return best, None

    def record(self, batch_size: int, arm: str, steps: int, ms: float, num_tokens: float, promised: float) -> None:
        """Steps of the arm took ms at the usual speed and committed num_tokens, where so many were promised."""
        self._saved_ms += EXPLORED_SHARE * ms
        measured = self._measured.setdefault(_class_of(batch_size), {})
        measured.setdefault(arm, Average(ARM_STEPS, ARM_PRIOR_STEPS)).add(math.log(num_tokens / promised), steps)
        for other, average in measured.items():
            if other != arm:
                average.mean *= math.exp(-steps / STALE_STEPS)


def _mean(measured: Mapping[str, Average], arm: str) -> float:
    return measured[arm].mean if arm in measured else 0.0


def _class_of(batch_size: int) -> int:
    """Two to the octave: what pays at 4 requests may not at 7."""
    return round(2.0 * math.log2(batch_size))
