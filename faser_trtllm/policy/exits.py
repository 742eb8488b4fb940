"""Early exit by price: which rows of a running pass are worth its remaining segments.

At a segment boundary the target's intermediate scores re-rank each draft among the draft's candidates. The profile's
logistic model turns the draft's place, its score gap and the estimate from before the pass into a new acceptance
probability; the product along the request is the row's worth, held against price x the ms that it still costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.cost_table import CostTable, ExitModel
from faser_trtllm.policy.base import ExitView, StepOutcome, StepView
from faser_trtllm.policy.survival import SurvivalEstimator

IntArray = npt.NDArray[np.int32]
GapArray = npt.NDArray[np.float32]

MAX_PLACE = 8
MIN_SAVING = 0.02  # of the remaining time: below, compaction and a split pass cost as much
FORGET = 0.98
FIRST_KEPT = 0.7  # share of rows expected to stay, before anything is known


class ExitPricing:
    """The threshold comes from the plan's price and the costs of the pass, a row's worth from tokens up to its own, so
    that dropping a row never looks at a later token of its request."""

    def __init__(self, costs: CostTable, estimator: SurvivalEstimator, prune: str) -> None:
        self._costs = costs
        self._estimator = estimator
        models = [] if prune == "off" else [m for m in costs.exits if prune == "on" or m.pays]
        self._models: dict[int, ExitModel] = {m.boundary: m for m in models if 0 < m.boundary < costs.num_segments}
        self._forced = prune == "on"
        self._kept = dict.fromkeys(self._models, FIRST_KEPT)

    @property
    def active(self) -> bool:
        return bool(self._models)

    def boundaries(self, num_rows: int, num_requests: int, context_len: float, price: float) -> list[int]:
        """Where looking is expected to pay: the survivors, as many as in older steps, reach a cheaper row count."""
        found = []
        for boundary in self._models:
            ms = self._costs.remaining_ms_array(boundary, num_rows, num_requests, context_len)
            droppable = num_rows - num_requests
            kept = num_rows - int((1.0 - self._kept[boundary]) * droppable)
            saving = float(ms[num_rows] - ms[kept]) - self._costs.exit_ms(boundary, droppable)
            if self._forced or saving > MIN_SAVING * float(ms[num_rows]):
                found.append(boundary)
        return found

    def keep_rows(self, view: StepView, exit_view: ExitView, context_len: float, price: float) -> list[int]:
        model = self._models.get(exit_view.boundary)
        if model is None:
            return list(exit_view.num_rows)
        num_rows = sum(exit_view.num_rows) + exit_view.num_other_rows
        num_requests = len(exit_view.num_rows)
        ms = self._costs.remaining_ms_array(exit_view.boundary, num_rows, num_requests, context_len)
        floor = num_requests + exit_view.num_other_rows
        # Mean ms of a row over the rows that can go: which stair is reached depends on all of them together.
        row_ms = float(ms[num_rows] - ms[floor]) / max(1, num_rows - floor)
        least = price * row_ms
        kept = []
        for request, rows, rank, gap in zip(
            view.decoding, exit_view.num_rows, exit_view.rank, exit_view.gap, strict=True
        ):
            kept.append(1 + self._num_worth(model, self._estimator.survival(request, rows - 1), rank, gap, least))
        return kept

    def observe(self, outcome: StepOutcome) -> None:
        """The share kept is learnt where rows were dropped; a boundary that ceased to pay is tried again later."""
        kept_rows, pruned = sum(outcome.num_verified), sum(outcome.num_pruned)
        if not self._models or not kept_rows + pruned:
            return
        share = kept_rows / (kept_rows + pruned)
        for boundary, kept in self._kept.items():
            self._kept[boundary] = kept + ((1.0 - FORGET) * (share - kept) if pruned else 1e-4 * (FIRST_KEPT - kept))

    @staticmethod
    def _num_worth(model: ExitModel, survival: Sequence[float], rank: IntArray, gap: GapArray, least: float) -> int:
        """Drafts whose rows stay: up to the first whose updated survival is below `least`."""
        alive, before = 1.0, 1.0
        for j, estimate in enumerate(survival):
            conditional = min(1.0 - 1e-6, max(1e-6, estimate / before if before > 0.0 else 0.0))
            before = estimate
            place = min(int(rank[j]), MAX_PLACE)
            logit = model.rank * place + model.gap * float(gap[j]) + model.intercept
            logit += model.survival * float(np.log(conditional / (1.0 - conditional)))
            alive *= 1.0 / (1.0 + float(np.exp(-logit)))
            if alive < least:
                return j
        return len(survival)
