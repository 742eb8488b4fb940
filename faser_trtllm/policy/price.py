"""The default policy: every row and every draft step must pay at one price, the goodput of the step.

plan() takes the expected yield of drafts, by sampling mode and position, and finds the slots (rows for drafts) with the
highest goodput under the measured costs, which are a step function of the rows. That goodput is the price. Drafting
stops where the next draft step and its rows would cost more than they are worth at that price. From the drafts made,
the slots that are worth their time are verified, by the same argmax over survivals that include the margins. Whether to
draft at all, and whether to overlap drafting with verification, is corrected by what plans achieved (candidates.py).

The policy is exact: no draft is discarded, reordered or replaced before it is verified, so decisions affect when a
draft is verified, never whether, whatever they are based on (docs/policies.md).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.request import Request
from faser_trtllm.ops.arrays import Float64Array, Int32Array
from faser_trtllm.ops.best_slots import SlotCosts, VerificationRule, best_slots
from faser_trtllm.policy.acceptance import AcceptanceEstimator
from faser_trtllm.policy.base import (
    HELD_MS,
    HELD_STEPS,
    MAX_HELD_STEPS,
    TRIAL_STEPS,
    Decision,
    Mode,
    PlanStats,
    StepView,
    mean_context,
)
from faser_trtllm.policy.candidates import OFF, Candidates
from faser_trtllm.policy.costs import MeasuredCosts, StepCosts
from faser_trtllm.policy.exits import ExitPlanner
from faser_trtllm.policy.modes import OVERLAPPED, predict_modes
from faser_trtllm.policy.prompts import Prompts, prompt_row_worth
from faser_trtllm.policy.stop import block_lengths, draft_stop

PRICE = "price"
PROBE = "probe"  # one other length for all requests, since costs of lengths that never run are never corrected
MORE = 2  # drafts of a probe beyond the plan's longest; a probe has half of that length if there is no room
SLACK = 2  # drafts beyond the planned length that a confident request of a batch may take
RESIZED = 8  # a plan ends when 1 / RESIZED of its batch is new, or the batch has grown or shrunk by as much
TABLE_ERROR = 0.2  # relative error that predictions from a new table may have
RETRY_REQUESTS = 4  # maximum number of requests that draft in a trial while drafting does not pay


class PricePolicy:
    def __init__(
        self, max_draft_len: int, costs: CostTable, max_batch_size: int, *, prune: str = "auto", mode: str = "serial"
    ) -> None:
        """prune: see ExitPlanner. mode: a Mode's value for every step that drafts, or "auto": an overlapped mode where
        it is predicted and measured to be better."""
        self.name = "price"
        self._max_draft_len = max_draft_len
        self._max_batch_size = max_batch_size
        self._is_block = costs.has("draft_block")
        self.estimator = AcceptanceEstimator(max_draft_len, is_block=self._is_block)
        self._costs = MeasuredCosts(costs, max_draft_len)
        self._exits = ExitPlanner(costs, self.estimator.model, prune)
        self._candidates = Candidates(TABLE_ERROR)
        self._mode = None if mode == "auto" else Mode(mode)
        self._decision = Decision([])
        # By slot: its request in the plan, which may have ended, and the length.
        self._planned: dict[int, tuple[weakref.ref[Request], int]] = {}
        self._size = 0  # number of requests in the plan
        self._context_len = 1.0
        self._prompts = Prompts()
        self._until_s = 0.0  # end of the plan
        self._running = self._in_charge = OFF
        self._rival: str | None = None
        self._rival_steps = 0  # steps for which the rival still runs
        self._is_trial = False  # drafting by a few requests only, which is not recorded for the candidate
        self._is_off_for_all = False  # the plan has no drafts for requests far from their ends: newcomers are no news
        self._promised = 0.0  # tokens per ms expected from the plan
        self._is_known = False  # acceptance is known in the sampling modes of these requests

    def observe(self, stats: PlanStats) -> None:
        self._prompts.observe(stats)
        usual_ms = self._costs.observe(stats, self._context_len)
        self._exits.observe(stats)
        is_telling = usual_ms > 0.0 and self._promised > 0.0 and stats.num_tokens > 0
        is_new = self.estimator.is_new or (self._running != OFF and not self._is_known)
        if is_telling and self._costs.were_known and not self._is_trial and not is_new:
            promised = self._promised * usual_ms
            self._candidates.record(self._size, self._running, stats.num_steps, usual_ms, stats.num_tokens, promised)

    def plan(self, view: StepView) -> Decision:
        decoding = view.decoding
        if not decoding:
            return Decision([])
        size = len(decoding) + view.num_joining
        lengths = [self._planned_length(request) for request in decoding]
        num_new = 0 if self._is_off_for_all else lengths.count(None)
        num_changed = max(abs(size - self._size), num_new)
        if view.now_s >= self._until_s or num_changed > self._size // RESIZED:
            self.estimator.fit()
            self._size, self._context_len = size, mean_context(decoding)
            self._decision = self._decide(view)
            planned = zip(decoding, self._decision.lengths, strict=True)
            self._planned = {request.slot: (weakref.ref(request), length) for request, length in planned}
            return self._decision
        usual = round(sum(self._decision.lengths) / max(1, len(self._decision.lengths)))
        return replace(self._decision, lengths=[usual if length is None else length for length in lengths])

    def _planned_length(self, request: Request) -> int | None:
        """Return the planned length, or None if the request came after the plan (its slot may have had another one)."""
        planned = self._planned.get(request.slot)
        return planned[1] if planned is not None and planned[0]() is request else None

    def _decide(self, view: StepView) -> Decision:
        """Make the plan for the next steps."""
        decoding, n = view.decoding, len(view.decoding)
        limits = np.array([request.draft_limit for request in decoding], np.int32)
        shares = functools.partial(self._prompts.shares, most_rows=view.num_context_rows + view.num_free_rows)
        least_prompts, most_prompts = shares(n), shares(n * (1 + self._max_draft_len))
        costs = self._costs.step(n, self._context_len, max(most_prompts, default=0))
        with_prompts = costs.with_prompts(least_prompts)
        off_goodput = n / costs.off_with_prompts(least_prompts)
        steps_ms = costs.off_ms * self._costs.slowness
        self._until_s = view.now_s + 1e-3 * max(HELD_MS, HELD_STEPS * steps_ms)
        if view.num_context_rows or view.num_joining:  # the next step has other prompt rows, so it gets its own plan
            self._until_s = 0.0
        held = min(MAX_HELD_STEPS, max(HELD_STEPS, int(HELD_MS / steps_ms))) - 1
        self._running, self._is_trial, self._is_off_for_all, self._promised = OFF, False, False, 0.0
        off = Decision([0] * n, num_held=held, price=off_goodput / self._costs.slowness)
        if not limits.any():  # last tokens, or requests without speculation: nothing to learn about drafting
            self._until_s = 0.0
            return replace(off, num_held=0)
        gains, self._is_known = self.estimator.gains(decoding), self.estimator.knows(decoding)
        survivals = np.sort(gains[np.arange(self._max_draft_len) < limits[:, None]])[::-1]
        tokens = np.full(costs.verify.size, n + survivals.sum())
        tokens[: survivals.size + 1] = n + np.concatenate([[0.0], np.cumsum(survivals)])
        drafting = (tokens - n) / (tokens[-1] - n)
        verify = with_prompts + drafting * (costs.with_prompts(shares(tokens[-1])) - with_prompts)
        displaced_ms = prompt_row_worth(decoding) / off_goodput * _beyond(view.num_free_rows, verify.size)
        verify = verify + displaced_ms
        slot_costs = _slot_costs(costs, verify, n)
        lengths, goodput = best_slots(gains, limits, slot_costs)
        probed = _probed(gains, limits, lengths)
        goodputs = {PRICE: goodput, PROBE: _goodput(gains, probed, slot_costs)} if probed else {PRICE: goodput}
        goodputs |= self._overlapped(lengths, round(tokens[sum(lengths)]), gains)
        candidate, rival = self._choose(view, costs, off_goodput, goodputs)
        if rival is not None:
            # With prompts, every step has its own plan, and while requests wait, the scheduler asks for one.
            held = self._rival_steps - 1 if self._until_s and not view.num_waiting else 0
            self._rival_steps -= held + 1
            self._until_s = 0.0
        self._running = rival or candidate
        if self._running == OFF:
            self._is_off_for_all = int(limits.min()) == self._max_draft_len
            self._promised = n / costs.off_ms
            return replace(off, num_held=held)
        if candidate == OFF:
            # A few requests are enough to learn acceptance and costs; chosen across ages, since new ones accept fewer.
            limits[np.arange(n) * RETRY_REQUESTS % n >= RETRY_REQUESTS] = 0
            lengths, goodput = best_slots(gains, limits, slot_costs)
            self._is_trial = n > RETRY_REQUESTS
            if not any(lengths):  # no draft pays for these few
                self._running, self._is_trial, self._until_s = OFF, False, 0.0
                self._promised = n / costs.off_ms
                return replace(off, num_held=0)
            probed = _probed(gains, limits, lengths)
        slots = sum(lengths)
        prompt_ms = (verify[slots] - costs.verify[slots]) / tokens[slots]
        self._promised = 1.0 / (1.0 / goodputs[self._running] - prompt_ms)
        price = 1.0 / (1.0 / goodput - prompt_ms)
        num_rows = n + slots + round(tokens[slots] * self._prompts.rows_per_token)
        mode = Mode(self._running) if self._running in OVERLAPPED else self._mode or Mode.SERIAL
        prompts = shares(tokens[slots])
        smooth, experts = costs.with_prompts(prompts) + displaced_ms, costs.experts_with_prompts(prompts)
        stop = None
        if self._is_block:
            modes = [request.sampling_mode for request in decoding]
            wanted = block_lengths(lengths, limits, modes, price, smooth, costs, self.estimator, experts)
        else:
            wanted = [min(length + SLACK, self._max_draft_len) if length else 0 for length in lengths]
            wanted = wanted if n > 1 else [self._max_draft_len]  # a single request drafts as long as it pays
            stop = draft_stop(lengths, price, smooth, costs, self.estimator, self._max_batch_size, experts)
        decision = Decision(
            wanted,
            stop,
            VerificationRule(self.estimator.model, SlotCosts(smooth, price=price)),
            self._exits.rule(self._costs.table, num_rows, n, self._context_len, price),
            self.estimator.tested,
            mode,
            held,
            goodput / self._costs.slowness,
        )
        if self._running == PROBE:  # all of it runs, whatever its expected worth
            return replace(decision, lengths=probed or lengths, stop=None, verification=None)
        return decision

    def _choose(
        self, view: StepView, costs: StepCosts, off_goodput: float, goodputs: Mapping[str, float]
    ) -> tuple[str, str | None]:
        """Return the candidate in charge, and the one that runs instead for self._rival_steps more steps, if any."""
        # Both must still be possible: modes do not overlap with one request or without drafts.
        if self._rival_steps and {self._in_charge, self._rival} <= {OFF, *goodputs}:
            return self._in_charge, self._rival
        decoding, n = view.decoding, len(view.decoding)
        # Drafting makes the draft model run prompts too, and first the tokens that it has missed.
        lag = sum(request.num_tokens - request.num_draft_computed_tokens for request in decoding)
        num_left = sum(request.max_num_tokens - request.num_tokens for request in decoding)
        row_ms, num_trial = self._costs.late_row_ms(n), min(RETRY_REQUESTS, n)
        late_ms = row_ms * max(self._prompts.rows_per_token, lag / max(1, num_left))
        predicted = {OFF: off_goodput} | {name: 1.0 / (1.0 / goodput + late_ms) for name, goodput in goodputs.items()}
        entry_ms, steps = row_ms * lag * num_trial / n, TRIAL_STEPS
        if self._in_charge == OFF:  # missed tokens are run once, however long a trial is
            steps = HELD_STEPS
            entry_ms += steps * costs.draft_first[num_trial]
        candidate, rival = self._candidates.choose(
            self._size, predicted, steps * costs.off_ms, dict.fromkeys(goodputs, entry_ms), PROBE
        )
        if self.estimator.is_new and candidate == OFF:
            rival = PRICE
        trial_steps = HELD_STEPS if candidate == OFF else TRIAL_STEPS
        self._in_charge, self._rival, self._rival_steps = candidate, rival, trial_steps if rival else 0
        return candidate, rival

    def _overlapped(self, lengths: Sequence[int], num_tokens: int, gains: Float64Array) -> dict[str, float]:
        """Return the predicted goodput of the overlapped modes that can run."""
        if self._mode is not None or not self._costs.table.interference:
            return {}
        n, expected = len(lengths), gains.mean(0).tolist()
        base_rows = n + round(num_tokens * self._prompts.rows_per_token)
        found = predict_modes(self._costs.table, lengths, n, base_rows, self._context_len, expected)
        if self._is_block:  # a block drafter cannot draft after pending drafts
            found.pop(Mode.DRAFT_AHEAD.value, None)
        return found


def _beyond(num_free: int, size: int) -> Float64Array:
    """Return, for 0 to size - 1 slots, the rows that they take from prompts: those beyond num_free."""
    return np.maximum(np.arange(size) - num_free, 0.0)


def _probed(gains: Float64Array, limits: Int32Array, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of PROBE; empty if nothing is drafted or only one length is possible."""
    most, room = max(lengths), gains.shape[1]
    other = most + MORE if most + MORE <= room else most // 2
    return np.minimum(limits, other).tolist() if most and other else []


def _goodput(gains: Float64Array, lengths: Sequence[int], costs: SlotCosts) -> float:
    """Return the tokens per ms of a step in which all drafts of these lengths are made and verified."""
    places = np.arange(gains.shape[1]) < np.array(lengths)[:, None]
    active = places.sum(0)
    assert costs.draft_ms is not None
    first, step = costs.draft_ms
    draft_ms = float(first[active[0]] + step[active[1:]].sum())
    slots = min(int(active.sum()), costs.verify_ms.size - 1)
    tokens = costs.base_tokens + float(gains[places].sum())
    return tokens / (draft_ms + float(costs.verify_ms[slots]) + costs.fixed_ms)


def _slot_costs(costs: StepCosts, verify: Float64Array, num_requests: int) -> SlotCosts:
    draft_ms = costs.draft_first, costs.draft_step
    return SlotCosts(verify, draft_ms, fixed_ms=costs.host_ms, base_tokens=float(num_requests))
