"""Which way of running (an arm: price, uniform, off, an overlapped mode) is in charge, proven by measured goodput.

A model predicts each arm's goodput; what was measured corrects it by one factor per arm and batch-size class. The arm
with the best corrected prediction runs. log(factor) is a sum of normal beliefs: how wrong the model is of all drafting
arms, how wrong beyond that of this one, and beyond that at this batch size. Each plan's measurement moves them by what
is known of them and of its own noise. A machine that is faster than it is taken to be makes every plan look good for a
while, so that is believed too, of all arms alike and not for long: arms are compared plan by plan, as they follow each
other. What is not measured for a while is forgotten, so an arm that was unlucky, or that the machine has become kinder
to, is tried again. And a share of the tokens is spent on trials: a plan's time for another arm, once early and then the
more often the closer it looks, so that a rival that nothing but a misfortune speaks against gets its chance; what a
trial turns out to have lost is charged to that share. Since `off` and the best uniform length are arms, what runs
cannot stay below either of them for longer than its factor takes to tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Up to FEW_REQUESTS at once; with more, as many times more, since a step then brings so many tokens and all are as slow
# as it is.
FEW_REQUESTS = 8
FADING_TOKENS = 131072.0  # after which what was believed counts 1 / e
DWELL_TOKENS = 512.0  # between two changes of the incumbent, and before the first trials
HYSTERESIS = 0.01
TRIAL_SHARE = 0.01  # of the tokens may be lost in trials, as far as rivals are likely to be better
MIN_LIKELIHOOD = 0.05  # of an arm's being better, for its trials
TRIAL_STEPS = 16
TOKENS_PER_STEP = 2.0  # of a request, about
MIN_TRIAL_LOSS = 0.02  # of a trial's tokens, though the arm may look better than that
MAX_SAVED_TRIALS = 2.0
MAX_TRIAL_LOSS = 1.0  # of a trial's tokens: more is somebody else's work in between
# Variances of log(measured / promised).
OF_DRAFTING, OF_ARM, OF_CLASS = 0.03, 0.02, 0.005  # before anything is known
OF_MOOD = 0.05  # of how wrong the machine's speed is taken to be, for plans one after the other alike
MOOD_KEPT = 0.8  # of that, from one plan to the next
OF_PLAN = 0.02  # of a plan, whose mood is known so well
OF_TOKEN = 0.3  # of the number of tokens with drafts, over its mean
OF_REQUEST = 0.06  # of how well a request is drafted
REQUEST_TOKENS = 96.0  # by which it is another request, about
MAX_DEVIATION = 3.0  # in standard deviations; what is further off was somebody else's work


@dataclass
class _Belief:
    """That something is normal about 0, until it was measured."""

    prior: float  # variance
    mean: float = 0.0
    variance: float = field(init=False)

    def __post_init__(self) -> None:
        self.variance = self.prior

    def fade(self, kept: float) -> None:
        self.mean *= kept
        self.variance += (1.0 - kept * kept) * (self.prior - self.variance)


def _learn(beliefs: list[_Belief], measured: float, noise: float) -> None:
    """Their sum was measured; each takes the part of the surprise that its variance has in all."""
    total = sum(belief.variance for belief in beliefs) + noise
    limit = MAX_DEVIATION * math.sqrt(total)
    surprise = min(max(measured - sum(belief.mean for belief in beliefs), -limit), limit)
    for belief in beliefs:
        gain = belief.variance / total
        belief.mean += gain * surprise
        belief.variance -= gain * belief.variance


@dataclass
class _Class:
    incumbent: str
    crowd: float  # requests over FEW_REQUESTS, 1 at least
    arms: dict[str, _Belief] = field(default_factory=dict)
    taken_over: float = -math.inf  # when the incumbent did, in tokens of all classes
    num_unspent: float = 0.0  # tokens of which no share is saved for trials yet
    saved: dict[str, float] = field(default_factory=dict)  # tokens that trials of an arm may lose


class Controller:
    """margins: how much better than measured and predicted each arm must look, as a share; the default is first."""

    def __init__(self, margins: Mapping[str, float]) -> None:
        self._margins = dict(margins)
        self._default = next(iter(margins))
        self._classes: dict[int, _Class] = {}
        self._overall = {arm: _Belief(OF_ARM) for arm in margins}  # of all classes
        self._drafting = _Belief(OF_DRAFTING)  # all arms but off
        self._mood = _Belief(OF_MOOD)  # every arm, just now
        self._tried: set[str] = set()
        self._num_tokens = 0.0
        self.is_trial = False  # whether the last choice is for TRIAL_STEPS only
        self.rate = 0.0  # tokens per ms that the best arm is believed to bring, by the last choice
        self._trial_of: tuple[_Class, str] | None = None  # whose last trial is not charged yet
        self._trial_tokens = self._trial_loss = 0.0  # of it, as expected

    def choose(
        self,
        batch_size: int,
        predicted: Mapping[str, float],
        entry_tokens: Mapping[str, float] | None = None,
        *,
        may_try: bool = True,
    ) -> str:
        """The arm for the next steps.

        predicted: goodput of every arm that can run now, one at least. entry_tokens: what it costs to begin
        with an arm, in tokens that could be generated meanwhile. may_try: whether it may be a trial.
        """
        self.is_trial = False
        state = self._class(_class_of(batch_size))
        incumbent = state.incumbent
        if incumbent in predicted and self._num_tokens < state.taken_over + state.crowd * DWELL_TOKENS:
            return incumbent
        scores = {arm: predicted[arm] * self._factor(state, arm) for arm in self._margins if arm in predicted}
        best, best_score = incumbent, scores.get(incumbent, 0.0) * (1.0 + HYSTERESIS)
        for arm, score in scores.items():
            handicap = self._margins[arm] - self._margins[incumbent]
            if arm != incumbent and score * (1.0 - handicap) > best_score:
                best, best_score = arm, score * (1.0 - handicap)
        self.rate = scores[best]
        if best != incumbent and incumbent in scores:
            state.incumbent, state.taken_over = best, self._num_tokens
            return best
        # The incumbent is in charge, or would be: where it can run again, it is in charge again.
        return (self._trial(state, best, batch_size, scores, entry_tokens or {}) if may_try else None) or best

    def _trial(
        self,
        state: _Class,
        best: str,
        batch_size: int,
        scores: Mapping[str, float],
        entry_tokens: Mapping[str, float],
    ) -> str | None:
        """An arm to be tried now instead of the best one: each saves for its own trials, so that cheap ones do not eat
        up dear ones' share."""
        trial_tokens = TRIAL_STEPS * TOKENS_PER_STEP * batch_size
        rivals = {arm: self._likelihood(state, arm, best, scores) for arm in scores if arm != best}
        share = TRIAL_SHARE / max(1.0, sum(rivals.values()))
        found, found_ratio = None, 1.0
        for arm, likelihood in rivals.items():
            score = scores[arm]
            gap = max(1.0 - score / scores[best], MIN_TRIAL_LOSS)
            loss = gap * trial_tokens + entry_tokens.get(arm, 0.0)
            saved = state.saved.get(arm, 0.0) + share * likelihood * state.num_unspent
            saved = min(saved, MAX_SAVED_TRIALS * loss)
            if arm not in self._tried and self._num_tokens >= state.crowd * DWELL_TOKENS:
                saved = loss
            state.saved[arm] = saved
            if saved / loss >= found_ratio:
                found, found_ratio = arm, saved / loss
        state.num_unspent = 0.0
        if found is not None:
            self._tried.add(found)
            self._trial_loss = state.saved[found] / found_ratio
            state.saved[found] -= self._trial_loss
            self._trial_of, self._trial_tokens = (state, found), trial_tokens
            self.is_trial = True
        return found

    def charge(self, num_lost: float) -> None:
        """The last trial lost so many tokens, instead of what was expected; the arm saves for that, too."""
        if self._trial_of is not None:
            state, arm = self._trial_of
            limit = MAX_TRIAL_LOSS * self._trial_tokens
            state.saved[arm] -= min(max(num_lost, -limit), limit) - self._trial_loss
            self._trial_of = None

    def record(self, batch_size: int, arm: str, num_tokens: float, expected: float) -> None:
        """Steps of the arm committed num_tokens, where so many were expected for the time they took."""
        state = self._class(_class_of(batch_size))
        state.num_unspent += num_tokens
        self._num_tokens += num_tokens
        self._tried.add(arm)
        kept = math.exp(-num_tokens / (state.crowd * FADING_TOKENS))
        for belief in (self._drafting, *self._overall.values(), *state.arms.values()):
            belief.fade(kept)
        of_tokens = 0.0
        if arm != "off":
            of_tokens = OF_TOKEN / num_tokens + OF_REQUEST / max(batch_size, num_tokens / REQUEST_TOKENS)
        surprise = math.log(num_tokens / expected) + 0.5 * of_tokens  # the mean of a log is below the mean's
        self._mood.fade(MOOD_KEPT)
        _learn([self._mood, *self._beliefs(state, arm)], surprise, OF_PLAN + of_tokens)

    def _factor(self, state: _Class, arm: str) -> float:
        mean = self._overall[arm].mean + (0.0 if arm == "off" else self._drafting.mean)
        if arm in state.arms:
            mean += state.arms[arm].mean
        return math.exp(mean)

    def _likelihood(self, state: _Class, arm: str, best: str, scores: Mapping[str, float]) -> float:
        """That the arm is better than the best one: 1 where it is as likely as not, at least MIN_LIKELIHOOD."""
        pair = arm, best
        variance = sum(belief.variance for one in pair for belief in self._own(state, one))
        if "off" in pair:
            variance += self._drafting.variance
        ahead = math.log(scores[arm] / scores[best])
        return min(1.0, max(MIN_LIKELIHOOD, math.erfc(-ahead / math.sqrt(2.0 * variance))))

    def _beliefs(self, state: _Class, arm: str) -> list[_Belief]:
        own = self._own(state, arm)
        return own if arm == "off" else [self._drafting, *own]

    def _own(self, state: _Class, arm: str) -> list[_Belief]:
        return [self._overall[arm], state.arms.setdefault(arm, _Belief(OF_CLASS))]

    def _class(self, class_id: int) -> _Class:
        found = self._classes.get(class_id)
        if found is None:
            crowd = max(1.0, 2.0 ** (class_id / 3.0) / FEW_REQUESTS)
            found = self._classes[class_id] = _Class(self._default, crowd)
        return found


def _class_of(batch_size: int) -> int:
    """A third of an octave: what pays at 4 requests may not at 7."""
    return round(3.0 * math.log2(batch_size))
