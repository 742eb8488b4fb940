"""A policy for drafts that cost no draft step, alone or together with a policy for the draft model.

Such drafts are proposed in every step, up to the limit. From all pending drafts the pass verifies the rows that are
worth their time at the step's price, by the argmax of ops/best_slots.py (docs/policies.md).
"""

from __future__ import annotations

import math
from dataclasses import replace

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.best_slots import SlotCosts, VerificationRule
from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import HELD_STEPS, Decision, PlanStats, Policy, StepView, mean_context
from faser_trtllm.policy.costs import MeasuredCosts
from faser_trtllm.policy.price import PricePolicy
from faser_trtllm.policy.static import OffPolicy

GOODPUT_MS = 2000.0  # averaging window of the goodput, in ms of steps


class FreeDraftsPolicy:
    """Asks for as many drafts as allowed, and verifies those that pay at the price of the draft model's policy. If that
    gives no VerificationRule, the price is the recent goodput, at the machine's usual speed and for this batch size."""

    def __init__(self, model_policy: PricePolicy | None, max_draft_len: int, costs: CostTable) -> None:
        """model_policy: the policy for the draft model; None: there is no draft model."""
        self.name = "price"
        self._model_policy = model_policy
        self._inner: Policy = model_policy or OffPolicy()
        self._model = model_policy.estimator.model if model_policy else AcceptanceModel(max_draft_len)
        self._max_draft_len = max_draft_len
        self._costs = MeasuredCosts(costs, max_draft_len)
        self._goodput = Average(GOODPUT_MS)  # log of goodput over goodput without drafts
        self._context_len = 1.0

    def plan(self, view: StepView) -> Decision:
        decision, decoding, n = self._inner.plan(view), view.decoding, len(view.decoding)
        if not decoding:
            return decision
        self._context_len = mean_context(decoding)
        lengths = {r.slot: k for r, k in zip(decoding, decision.lengths, strict=True) if k}
        if lengths and decision.verification is None:  # a probe, which measures the lengths that it asks for
            return replace(decision, model_lengths=lengths)
        wanted = [self._max_draft_len] * n
        if decision.verification is not None:  # with a price of its own
            return replace(decision, lengths=wanted, model_lengths=lengths)
        costs = self._costs.step(n, self._context_len)
        price = n / costs.off_ms * max(1.0, math.exp(self._goodput.mean))
        verify = costs.verify.copy()
        verify[0] = min(verify[0], max(0.0, costs.off_ms - costs.host_ms))  # a pass without drafts
        return replace(
            decision,
            lengths=wanted,
            verification=VerificationRule(self._model, SlotCosts(verify, price=price)),
            num_held=decision.num_held if self._model_policy else HELD_STEPS - 1,
            price=price / self._costs.slowness,
            model_lengths=lengths,
        )

    def observe(self, stats: PlanStats) -> None:
        self._inner.observe(stats)
        usual_ms = self._costs.observe(stats, self._context_len)
        n = stats.num_requests / stats.num_steps
        off_ms = stats.num_steps * self._costs.step(round(n), self._context_len).off_ms
        if stats.num_tokens and usual_ms > 0.0:
            self._goodput.add(math.log(stats.num_tokens * off_ms / (stats.num_requests * usual_ms)), usual_ms)
