"""Which way of running (an arm: price, uniform, off, an overlapped mode) is in charge, proven by measured goodput.

A model predicts each arm's goodput; measurement corrects it by one factor per arm and batch-size class. The incumbent
is kept until a challenger's corrected prediction is better by a margin; then the challenger runs a short trial and
stays only if it measured better. A failed trial is not repeated for a while, twice as long each time. Since `off` and
the best uniform length are arms, the incumbent cannot stay below either by more than the margins for longer than a
trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW = 32  # steps of a trial, at least
WINDOW_REQUESTS = 1024  # request-steps of a trial: the tokens of a step scatter, their mean is known to some 2% then
DOUBT = 0.25  # of a window's worth of tokens, as if they had come as predicted: few steps move a factor little
WARM_UP = 2  # steps of a trial that are not measured: the draft's KV catches up, pipelines fill
FIRST_BACKOFF = 4  # trials' lengths
MAX_BACKOFF = 256
SCATTER = 0.5  # of the tokens of a request and step, over their mean: doubts that a challenge must overcome, too


@dataclass
class _ArmState:
    tokens: float = 0.0  # discounted
    expected: float = 0.0  # tokens that the prediction promised for the time measured, discounted
    last_step: int = 0  # step in which it last ran
    not_before: int = 0
    backoff: int = FIRST_BACKOFF

    def factor(self, doubt: float) -> float | None:
        return (self.tokens + doubt) / (self.expected + doubt) if self.expected > 0.0 else None


@dataclass
class _ClassState:
    incumbent: str
    arms: dict[str, _ArmState] = field(default_factory=dict)
    step: int = 0
    since: int = 0  # step at which the incumbent took over or was last challenged
    trial: str | None = None
    trial_step: int = 0
    trial_length: int = WINDOW
    doubt: float = 0.0  # tokens


class Controller:
    """margins: how much better each arm must be predicted, as a share, to get a trial, and at least half of it measured
    to stay. The first arm is the default."""

    def __init__(self, margins: Mapping[str, float], *, window: int = WINDOW) -> None:
        self._margins = dict(margins)
        self._default = next(iter(margins))
        self._window = window
        self._classes: dict[int, _ClassState] = {}

    def choose(self, batch_size: int, predicted: Mapping[str, float]) -> str:
        """The arm for the next step; predicted: goodput of every arm that can run now (the default always can)."""
        state = self._state(batch_size)
        if state.trial is not None:
            if state.trial not in predicted:
                state.trial = None
            elif state.trial_step < self._steps(batch_size) + WARM_UP:
                return state.trial
            else:
                self._conclude(state, predicted)
        if state.incumbent not in predicted:
            state.incumbent = self._default
        since = state.step - state.since
        if since < self._window:
            return state.incumbent
        doubt = SCATTER / math.sqrt(min(since, self._steps(batch_size)) * batch_size)
        challenger = self._challenger(state, predicted, doubt)
        if challenger is not None:
            state.trial, state.trial_step = challenger, 0
            state.arms[challenger].tokens = state.arms[challenger].expected = 0.0
            return challenger
        return state.incumbent

    def record(self, batch_size: int, arm: str, num_tokens: int, predicted: float, ms: float) -> None:
        """A step of the arm committed num_tokens in ms, where predicted tokens per ms were promised."""
        state = self._state(batch_size)
        state.step += 1
        if arm == state.trial:
            state.trial_step += 1
            if state.trial_step <= WARM_UP:
                return
        measured = state.arms.setdefault(arm, _ArmState())
        measured.last_step = state.step
        memory = 1.0 - 1.0 / self._steps(batch_size)
        measured.tokens = memory * measured.tokens + num_tokens
        measured.expected = memory * measured.expected + predicted * ms
        state.doubt = DOUBT * self._steps(batch_size) * batch_size

    def factor(self, batch_size: int, arm: str) -> float | None:
        """Measured over predicted goodput of an arm; None if it never ran."""
        state = self._state(batch_size)
        return state.arms[arm].factor(state.doubt) if arm in state.arms else None

    def in_trial(self, batch_size: int) -> bool:
        return self._state(batch_size).trial is not None

    def _steps(self, batch_size: int) -> int:
        return max(self._window, WINDOW_REQUESTS // batch_size)

    def _state(self, batch_size: int) -> _ClassState:
        key = batch_size.bit_length()
        state = self._classes.get(key)
        if state is None:
            state = self._classes[key] = _ClassState(self._default)
            state.trial_length = self._steps(batch_size)
        return state

    def _estimate(self, state: _ClassState, arm: str, predicted: Mapping[str, float]) -> float:
        """Corrected prediction; an arm that did not run for long is corrected like the incumbent, but never upwards."""
        state_of_arm = state.arms.setdefault(arm, _ArmState())
        measured = state_of_arm.factor(state.doubt)
        stale = (
            arm not in (state.incumbent, state.trial)
            and state.step - state_of_arm.last_step > FIRST_BACKOFF * state.trial_length
        )
        if measured is None or stale:
            own = state.arms.setdefault(state.incumbent, _ArmState()).factor(state.doubt)
            # Half of the incumbent's shortfall is taken to be the table's, which every arm shares; the other half is
            # its own, so that an arm that disappoints is challenged.
            measured = 1.0 if own is None else min(1.0, 0.5 + 0.5 * own)
        return predicted[arm] * measured

    def _challenger(self, state: _ClassState, predicted: Mapping[str, float], doubt: float) -> str | None:
        best, best_gain = None, 0.0
        own = self._estimate(state, state.incumbent, predicted)
        for arm, margin in self._margins.items():
            if arm == state.incumbent or arm not in predicted:
                continue
            measured = state.arms.setdefault(arm, _ArmState())
            if measured.not_before > state.step:
                continue
            gain = self._estimate(state, arm, predicted) / max(own, 1e-9) - 1.0 - margin - doubt
            if gain > best_gain:
                best, best_gain = arm, gain
        return best

    def _conclude(self, state: _ClassState, predicted: Mapping[str, float]) -> None:
        arm = state.trial
        assert arm is not None
        state.trial = None
        state.since = state.step
        before = self._estimate(state, state.incumbent, predicted)
        after = self._estimate(state, arm, predicted)
        loser = state.arms[arm]
        if after > before * (1.0 + 0.5 * self._margins[arm]):
            loser = state.arms[state.incumbent]
            state.incumbent = arm
        loser.not_before = state.step + loser.backoff * state.trial_length
        loser.backoff = min(2 * loser.backoff, MAX_BACKOFF)
