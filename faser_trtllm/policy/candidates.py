"""The choice between candidates for the next plan: drafting, off, or an overlapped mode.

A model predicts each candidate's goodput. The prediction is corrected by what its plans achieved: a mean of
log(tokens / promised) per candidate and class of batch sizes. A candidate that does not run is not measured, so a small
share of the time is spent on plans of the others. The candidate in charge is the one that runs otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from faser_trtllm.policy.average import Average

OFF = "off"
EXPLORED_SHARE = 0.004  # of the time that may be lost to plans of candidates that are not in charge
HYSTERESIS = 0.02  # lead that another candidate needs to take over
LEAST_LOSS = 0.25  # minimum cost assumed for a trial, as a share of its time
CANDIDATE_STEPS = 2000.0  # of a candidate, after which older ones are forgotten
PRIOR_STEPS = 16.0  # weight of the prediction, in steps
STALE_STEPS = 20_000.0  # of other candidates, after which measurements of a candidate weigh 1 / e
MAX_SAVED_PLANS = 2.0  # limit on time saved for trials, in plans
KNOWN_STEPS = 200.0  # of a candidate, after which its mean is trusted
PAUSED = math.log(3.0)  # a plan that achieved less than its candidate's others by so much was paused with the machine


class Candidates:
    def __init__(self, table_error: float = 0.0) -> None:
        """table_error: relative error that predictions may have; a candidate that is worse by more gets no first trial
        for free."""
        self._lead = (1.0 + table_error) ** 2
        self._measured: dict[int, dict[str, Average]] = {}  # by class of batch sizes
        self._in_charge: dict[int, str] = {}
        self._num_trials: Counter[tuple[int, str]] = Counter()
        self._saved_ms = 0.0  # time that trials may lose

    def choose(
        self,
        batch_size: int,
        predicted: Mapping[str, float],
        plan_ms: float,
        entry_ms: Mapping[str, float],
        probe: str = "",
    ) -> tuple[str, str | None]:
        """Return the candidate in charge, and the one that runs in its place for about plan_ms, if any.

        predicted: goodput of every candidate that can run now. entry_ms: additional cost of starting with a candidate.
        probe: a candidate that is never in charge.
        """
        size_class = _class_of(batch_size)
        measured = self._measured.setdefault(size_class, {})
        scores = {name: goodput * math.exp(_mean(measured, name)) for name, goodput in predicted.items()}
        last = self._in_charge.get(size_class, "")
        kept = {name: score * (1.0 + HYSTERESIS * (name == last)) for name, score in scores.items() if name != probe}
        best = max(kept, key=lambda name: kept[name])
        self._in_charge[size_class] = best
        others = [name for name in scores if name != best]
        if others:
            rival = min(others, key=lambda name: self._num_trials[size_class, name])
            loss_ms = max(0.0, 1.0 - scores[rival] / scores[best]) * plan_ms
            loss_ms = max(loss_ms + min(entry_ms.get(rival, 0.0), plan_ms), LEAST_LOSS * plan_ms)
            self._saved_ms = min(self._saved_ms, MAX_SAVED_PLANS * loss_ms)
            is_free = (  # one trial is not charged: the table may be wrong
                best in measured
                and not self._num_trials[size_class, rival]
                and scores[rival] * self._lead > scores[best]
            )
            if is_free or self._saved_ms >= loss_ms:
                self._saved_ms -= 0.0 if is_free else loss_ms
                self._num_trials[size_class, rival] += 1
                return best, rival
        return best, None

    def record(self, batch_size: int, name: str, steps: int, ms: float, num_tokens: float, promised: float) -> None:
        """Record steps that took ms at the usual speed and committed num_tokens, against the tokens promised."""
        self._saved_ms += EXPLORED_SHARE * ms
        measured = self._measured.setdefault(_class_of(batch_size), {})
        average = measured.setdefault(name, Average(CANDIDATE_STEPS, PRIOR_STEPS))
        achieved = math.log(num_tokens / promised)
        if average.weight > KNOWN_STEPS and achieved < average.mean - PAUSED:
            return
        average.add(achieved, steps)
        for other, average in measured.items():
            if other != name:
                average.mean *= math.exp(-steps / STALE_STEPS)


def _mean(measured: Mapping[str, Average], name: str) -> float:
    return measured[name].mean if name in measured else 0.0


def _class_of(batch_size: int) -> int:
    """Return the class of a batch size, two per octave: what pays at 4 requests may not at 7."""
    return round(2.0 * math.log2(batch_size))
