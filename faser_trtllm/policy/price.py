"""The default policy: every slot, draft step and row is bought at one price, the goodput of the step.

plan() takes the expected survivals (rates by place, and each request's history) and finds the number of slots with the
most goodput on the measured staircase, none included; that goodput is the price. Drafting stops, live, where the next
draft step and its rows would cost more than they are worth at that price; frontier_lengths() ranks what was drafted by
its live survival. A controller holds all that against drafting nothing and against the best uniform length, by what the
steps of each plan took and brought.

Why it is exact (DESIGN section 3): rates, offsets, costs and the price come from tested tokens of older steps and from
counts known before drafting. The number of slots of a pass uses, beyond those, each request's first pending draft's
margin only, which any slot of the request may know; for one request the frontier is decided place by place. Then slots
are ranked by survival, non-increasing along a request, so a slot's own later drafts never outrank it. Drafts that get
no row are tested by the row before them or stay pending: nothing untested is dropped. Times and the share of rows
pruned tell something of drafts not yet tested, so they are learnt only when all drafts of their step are settled; steps
without any pending tell nothing of drafts, so what they took is learnt as their plan ends. What a trial or a probe took
is known at once; it decides only whether one more is made: when a pending draft is tested, that is, never whether.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.request import Request
from faser_trtllm.core.value import value
from faser_trtllm.policy.base import DraftPlan, DraftStop, ExitView, Mode, StepOutcome, StepView
from faser_trtllm.policy.controller import TRIAL_STEPS, Controller
from faser_trtllm.policy.exits import ExitPricing
from faser_trtllm.policy.frontier import SLACK, Frontier
from faser_trtllm.policy.goodput import (
    Choice,
    StepCosts,
    best_row,
    best_slots,
    best_slots_few,
    best_uniform,
    step_ms,
)
from faser_trtllm.policy.judge import Judge, Promise
from faser_trtllm.policy.looks import Looks
from faser_trtllm.policy.measured_costs import FEW_REQUESTS, MeasuredCosts
from faser_trtllm.policy.modes import MODE_ARMS, predict_modes
from faser_trtllm.policy.period import Period
from faser_trtllm.policy.probes import Probes
from faser_trtllm.policy.stop import draft_stop
from faser_trtllm.policy.survival import FloatArray, SurvivalEstimator
from faser_trtllm.policy.urgency import urgency

MIN_GAIN = 0.01  # over drafting nothing, to start; none to go on
PLAN_STEPS = 16  # a plan holds so long: what it rests on is learnt no faster
IDLE_PLAN_STEPS = 24  # the same for a plan that drafts nothing
PLAN_S = 0.1  # and at least so long, so that planning takes less than 1 % of short steps' time
HELD_STEPS = 16  # at most, of a plan with drafts that is older than its steps and not than its time
MAX_HELD_STEPS = 1024  # the same without drafts, whose time is known
MARGINS = {"price": 0.0, "off": 0.0, "uniform": 0.01} | dict.fromkeys(MODE_ARMS, 0.02)


@value
class _Step:
    """A step that was looked at."""

    number: int
    outcome: StepOutcome
    context_len: float
    next_s: float | None  # when the next step was planned, on the outcome's clock; None if there was none


class PricePolicy:
    def __init__(
        self,
        max_draft_len: int,
        costs: CostTable,
        max_batch_size: int,
        *,
        prune: str = "auto",
        mode: str = "auto",
    ) -> None:
        """prune: "on" (wherever a boundary is calibrated), "auto" (where the profile says it pays), "off".
        mode: "auto", or a Mode's value that is used in every step that drafts."""
        self.name = "price"
        self._max_draft_len = max_draft_len
        self._max_batch_size = max_batch_size
        self.estimator = SurvivalEstimator(max_draft_len, max_batch_size)
        self._costs = MeasuredCosts(costs, max_draft_len)
        self.controller = Controller(MARGINS)
        self._exits = ExitPricing(costs, self.estimator, prune)
        self._auto_mode = mode == "auto"
        self._mode = Mode.SERIAL if mode == "auto" else Mode(mode)
        self._context_len = 1.0
        self._pays = False  # whether the price's own choice drafts
        self._drafting = False  # whether the plan drafts
        self._arm = "price"
        self._promise: Promise | None = None  # of the plan, None where it is not to be judged
        self._price = 0.0
        self._frontier = Frontier(self.estimator, max_batch_size, max_draft_len)
        self._ranked: StepView | None = None  # of the last step that drafts were ranked in
        self._probes = Probes(max_draft_len, self._costs, self.estimator)
        self._period = Period()  # of the plan
        self._probe: Period | None = None  # of the last probe, and of the cold steps that it leaves behind
        self._is_probe = False  # whether this step is one
        self._looks = Looks()
        self._looked: StepOutcome | None = None  # at the step before
        self._unsettled: deque[_Step] = deque()
        self._settling_steps = 2 * (max_draft_len + 1)  # a pass settles a draft at least, in ping_pong every other one
        self._judge = Judge(self.controller, self._costs, self._settling_steps)
        self._plan = DraftPlan([])
        self._plan_step = 0  # the number of the step that it was made for
        self._plan_steps = 0  # so long the plan holds
        self._plan_until_s = -math.inf  # and so long
        self._planned_size = 0
        self._mean_len = 0  # of the drafts that the plan counts on, rounded
        self._plan_tokens = 1.0  # per request and step, with so many
        self._plan_prompts = 0
        self._plan_decoding: tuple[Request, ...] = ()

    @property
    def price(self) -> float:
        """Tokens per ms that the last plan expects."""
        return self._price

    def plan(self, view: StepView) -> DraftPlan:
        self._ranked = None
        decoding = view.decoding
        n = len(decoding)
        if self._looked is not None:
            next_s = view.now_s - view.learning_s if n else None
            self._unsettled.append(_Step(self._looks.step, self._looked, self._context_len, next_s))
            self._looked = None
        self._looks.plan(view.now_s)
        self._is_probe = False
        slowness = self._costs.mood.factor
        if n == 0:
            self._end_probe(view)
            self._period.end_steps(view, slowness)
            return DraftPlan([])
        num_context_rows = view.num_context_rows
        prompts = num_context_rows if view.num_waiting else 0  # otherwise they do not count as tokens
        # A newcomer counts from its prompt on: what holds for the batch that it joins holds for the step before.
        size, planned = n + view.num_joining, self._planned_size
        resized = abs(size - planned) > planned // 8
        age = self._looks.step - self._plan_step
        is_old = age >= self._plan_steps and view.now_s >= self._plan_until_s
        is_new = is_old or resized or prompts != self._plan_prompts
        has_changed = self._plan_decoding != tuple(decoding)
        if is_new or has_changed or num_context_rows:  # prompts' time is nobody's; newcomers are promised their own
            self._end_probe(view)
            self._period.end_steps(view, slowness)
        if is_new:
            if not self._drafting:
                self._learn_idle(view)
            self._learn_settled()
            promise = None if self.estimator.is_new else self._promise
            self._judge.end_plan(self._looks.step, promise, self._period)
            self._plan_step = self._looks.step
            self._plan_prompts, self._plan_decoding, self._planned_size = prompts, tuple(decoding), size
            self._plan = self._decide(view)
            if num_context_rows and not prompts:
                self._expire()
        elif has_changed:
            self._plan = self._carried_over(decoding)
        if num_context_rows:  # they would be drafted for by a probe, too
            return self._plan
        if self._probe is not None:
            self._probe.begin_step(view)
            if not self._probe.is_open and not self.estimator.is_new:
                return self._plan
            self._end_probe(view)
        period = self._period
        if not self._drafting and not self.controller.is_trial:
            lengths = self._probes.lengths(decoding, self._context_len, self._price)
            if lengths is not None:
                period.end_steps(view, slowness)
                self._is_probe, self._probe = True, Period(self._price / slowness, is_change=True)
                self._probe.begin_step(view)
                return DraftPlan(lengths)
        can_open = n == self._planned_size and not period.is_open
        if can_open and (self._drafting or not any(request.num_drafts for request in decoding)):
            period.begin_step(view)
            if not period.is_open:
                self._plan_steps += 1  # its own steps are yet to come
                return self._plan
        if self.estimator.is_new:
            return self._plan
        plan = self._plan
        return DraftPlan(plan.lengths, plan.stop, plan.mode, self._num_held(view))

    def _num_held(self, view: StepView) -> int:
        """Steps behind this one that need no planning: up to one that is looked at, or the last of the plan."""
        num_left = max(self._plan_steps - 1 - (self._looks.step - self._plan_step), 0)
        left_ms = max(1e3 * (self._plan_until_s - view.now_s), 0.0)
        if self._drafting:
            return self._looks.num_held(True, num_left or (HELD_STEPS if left_ms else 0))
        step_ms = len(view.decoding) / self._price * self._costs.mood.factor
        return max(num_left, min(int(left_ms / step_ms), MAX_HELD_STEPS))

    def _expire(self) -> None:
        """The plan suits this step only."""
        self._plan_steps, self._plan_until_s = 0, -math.inf

    def _learn_idle(self, view: StepView) -> None:
        """What the steps of a plan that drafts nothing took: none of them was looked at."""
        period, size = self._period, self._planned_size
        num_steps = period.tokens // max(1, size)  # none if, say, the only step failed for somebody
        if num_steps:
            ms = period.ms / num_steps
            self._costs.observe_idle(size, self._context_len, num_steps, ms, view.now_s - view.learning_s)
            self._probes.save(num_steps, ms / self._costs.mood.factor)

    def _end_probe(self, view: StepView) -> None:
        """What it cost is known; nothing is before a rest of the service, whose time is nobody's."""
        if self._probe is not None:
            self._probe.end_steps(view, self._costs.mood.factor)
            if view.decoding:
                self._probes.charge(self._probe.lost_ms)
            self._probe = None

    def _carried_over(self, decoding: Sequence[Request]) -> DraftPlan:
        """The plan for a batch that lost or won a few requests: newcomers get what is usual. Among few, what these
        requests are expected to bring changes the goodput, so the price too."""
        self._context_len = sum(request.num_tokens for request in decoding) / len(decoding)
        if not self._drafting:
            self._plan_decoding = tuple(decoding)
            return DraftPlan([0] * len(decoding))
        lengths = self._plan.lengths
        usual = round(sum(lengths) / len(lengths))
        known = dict(zip(self._plan_decoding, lengths, strict=True))
        self._plan_decoding = tuple(decoding)
        stop = self._plan.stop
        if self._planned_size <= FEW_REQUESTS:
            tokens = self._expected_tokens(decoding)
            ratio, self._plan_tokens = tokens / self._plan_tokens, tokens
            self._price *= ratio
            self._period.promise *= ratio
            if stop is not None:
                by = np.float32(ratio)
                stop = DraftStop(stop.slope, stop.intercept, stop.prior, by * stop.row_price, by * stop.step_price)
        return DraftPlan([known.get(request, usual) for request in decoding], stop, self._plan.mode)

    def _expected_tokens(self, decoding: Sequence[Request]) -> float:
        """Of a step, per request, if each drafted as many as the plan's mean."""
        expected, places = self.estimator.expected, self._mean_len
        return 1.0 + sum([sum(expected(request, places)) for request in decoding]) / len(decoding)

    def _decide(self, view: StepView) -> DraftPlan:
        """The plan for the next steps."""
        self._looks.pace(view.now_s, view.learning_s)
        decoding = view.decoding
        n = len(decoding)
        limit = max(request.draft_limit for request in decoding)
        if limit == 0:  # last tokens, or requests that want no drafts: that says nothing about drafting
            self._drafting, self._promise = False, None
            self._expire()
            self._period = Period()
            return DraftPlan([0] * n)
        context_len = self._context_len = sum(request.num_tokens for request in decoding) / n
        costs = self._costs.costs(n, n + view.num_context_rows, context_len)
        # Prompt rows are worth as much as tokens while others wait for their end: the price rises, drafts are fewer.
        base_tokens = float(n + view.num_context_rows) if view.num_waiting else float(n)
        choice, expected = self._choose(view, costs, base_tokens)
        prompt_ms = self._catch_up_ms_per_token(decoding)
        pays = _charged(choice.goodput, prompt_ms) > choice.off_goodput * (1.0 + (0.0 if self._pays else MIN_GAIN))
        # Of a step of decoding; the prompts' share is charged where arms are compared, not where they are judged.
        goodput, drafting = {"off": choice.off_goodput}, {}
        if pays:
            drafting["price"] = choice.goodput
        # Also where the model says that no length pays: it may be wrong, which only a trial can show.
        uniform = best_uniform(expected, n, base_tokens, costs, min(limit, self._max_draft_len), min_length=1)
        drafting["uniform"] = uniform.goodput
        if self._auto_mode and pays and self._costs.table.interference:
            drafting |= predict_modes(self._costs.table, choice, n, n + view.num_context_rows, context_len, expected)
        goodput |= drafting
        predicted = goodput | {arm: _charged(g, prompt_ms) for arm, g in drafting.items()}
        # Who begins to draft pays for what the draft has missed of all requests at once.
        num_late = 0 if self._drafting else sum(r.num_tokens - r.num_draft_computed_tokens for r in decoding)
        entry = choice.off_goodput * self._costs.late_row_ms * num_late
        entries = dict.fromkeys(drafting, entry)
        arm = self.controller.choose(self._planned_size, predicted, entries, may_try=self._judge.is_paid)
        rate = self.controller.rate / self._costs.mood.factor
        self._period = Period(rate, goodput[arm], is_change=arm != self._arm)
        self._arm = arm
        self._promise = None
        if view.num_context_rows == 0:
            lengths = {"off": [0] * n, "price": choice.lengths, "uniform": uniform.lengths}.get(arm, [])
            predicted_ms = step_ms(lengths, costs) if lengths else 0.0
            self._promise = Promise(arm, self._planned_size, lengths, predicted_ms, context_len)
        self._pays = pays
        self._price = choice.goodput if pays else choice.off_goodput
        self._drafting = arm != "off"
        self._plan_steps, self._plan_until_s = TRIAL_STEPS, -math.inf
        if not self.controller.is_trial:
            self._plan_steps = PLAN_STEPS if self._drafting else IDLE_PLAN_STEPS
            self._plan_until_s = view.now_s + PLAN_S
        if not self._drafting:
            return DraftPlan([0] * n)
        planned = uniform.lengths if arm == "uniform" else choice.lengths
        if n <= FEW_REQUESTS:
            self._mean_len = max(1, round(sum(planned) / n))
            self._plan_tokens = self._expected_tokens(decoding)
        if arm == "uniform":
            return DraftPlan(uniform.lengths)
        self._frontier.plan(max(choice.lengths))
        stop = draft_stop(choice, costs, self.estimator, self._max_draft_len, self._max_batch_size)
        if n == 1:
            wanted = [self._max_draft_len]  # the price decides how far
        else:
            wanted = [min(length + SLACK, self._max_draft_len) if length else 0 for length in choice.lengths]
        mode = Mode(arm) if arm in MODE_ARMS else self._mode
        return DraftPlan(wanted, stop, mode)

    def frontier_lengths(self, view: StepView, num_pending: Sequence[int]) -> list[int]:
        if not self._drafting or self._is_probe or self._arm == "uniform":
            return list(num_pending)
        decoding = view.decoding
        if view is not self._ranked:  # it stands for all steps that the plan is held for
            self._ranked = view
            n = len(decoding)
            costs = self._costs.costs(n, n + view.num_context_rows, self._context_len)
            self._frontier.begin(decoding, costs.verify, self._price, self._weights(view))
        return self._frontier.lengths(decoding, num_pending)

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        if not self._exits.active or num_rows == len(view.decoding) or self._is_probe:
            return ()
        return self._exits.boundaries(num_rows, len(view.decoding), self._context_len, self._price)

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        return self._exits.keep_rows(view, exit_view, self._context_len, self._price)

    def wants_outcome(self, is_speculative: bool) -> bool:
        if not is_speculative:
            self._looks.pass_over()
            return False
        return self._looks.ask(True, all_tests=not self._drafting or self.estimator.is_new)

    def observe(self, outcome: StepOutcome) -> None:
        self.estimator.observe(outcome)  # looks at tested drafts only
        if self._looks.is_timed:
            self._looked = outcome

    def _learn_settled(self) -> None:
        """What steps cost, once all the drafts that were pending in them are tested."""
        while self._unsettled and self._unsettled[0].number <= self._looks.step - self._settling_steps:
            step = self._unsettled.popleft()
            self._exits.observe(step.outcome)
            self._costs.observe(step.outcome, step.context_len, step.next_s)

    def _choose(self, view: StepView, costs: StepCosts, base_tokens: float) -> tuple[Choice, list[float]]:
        """-> the slots with the most goodput; the mean survival of these requests by place, which a uniform length is
        predicted from: with the population's, whichever arm these requests' luck speaks for would be chosen."""
        decoding, estimator = view.decoding, self.estimator
        if len(decoding) == 1:
            request = decoding[0]
            expected = estimator.expected(request)
            return best_row(expected, base_tokens, costs, request.draft_limit), expected
        limits = [request.draft_limit for request in decoding]
        weights = self._weights(view)
        if weights is None and len(decoding) <= FEW_REQUESTS:
            rows = [estimator.expected(request) for request in decoding]
            expected = [sum(place) / len(rows) for place in zip(*rows, strict=True)]
            return best_slots_few(rows, base_tokens, costs, limits), expected
        survival = estimator.expected_many(list(decoding))
        expected = survival.mean(0).tolist()
        if min(limits) < self._max_draft_len:
            survival[np.arange(survival.shape[1]) >= np.array(limits)[:, None]] = 0.0
        if weights is not None:
            survival *= weights[:, None]
        return best_slots(survival, base_tokens, costs), expected

    def _catch_up_ms_per_token(self, decoding: Sequence[Request]) -> float:
        """What drafting costs the draft model beside its steps, per token generated.

        While drafting goes on: each newcomer's prompt, shared among the tokens that it may generate. To begin: all that
        these requests have missed; those that come after them will share in it, so it is spread over whole outputs.
        """
        num_rows = sum(request.prompt_len for request in decoding)
        if not self._drafting:
            num_rows = max(num_rows, sum(r.num_tokens - r.num_draft_computed_tokens for r in decoding))
        num_output = sum(request.max_num_tokens - request.prompt_len for request in decoding)
        return self._costs.late_row_ms * num_rows / max(1, num_output)

    def _weights(self, view: StepView) -> FloatArray | None:
        return urgency(view, self._price, self._costs.mood.factor)


def _charged(goodput: float, prompt_ms: float) -> float:
    """Tokens per ms when each token also pays its share of the draft model's prompt rows."""
    return goodput / (1.0 + goodput * prompt_ms)
