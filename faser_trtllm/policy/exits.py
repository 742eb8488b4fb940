"""Early exit by price: the segment boundaries at which a plan's passes drop rows, and the worth that keeps a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.cost_table import CostTable, ExitModel
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import PruneRule
from faser_trtllm.core.value import value
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.policy.base import PlanStats

MIN_SAVING = 0.02  # of the remaining time; below, compaction and a split pass cost as much
FIRST_KEPT = 0.7  # share of rows expected to stay, before anything was measured
KEPT_MEMORY = 0.9  # of that share, per plan with exits


@value
class ExitRule:
    """Exits (core/decision.py) by calibrated models: rows go on up to the first draft with survival below `least`."""

    boundaries: Sequence[int]  # indices into EngineSpec.segments
    models: Mapping[int, ExitModel]  # by boundary
    least: Mapping[int, float]  # by boundary
    acceptance: AcceptanceModel

    def rule(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        boundary: int,
    ) -> PruneRule:
        model = self.models[boundary]
        return PruneRule(
            self.acceptance.log_odds(sampling, slots, num_tokens, num_drafts),
            model.rank,
            model.gap,
            model.survival,
            model.intercept,
            self.least[boundary],
        )


class ExitPlanner:
    """Plans exits. prune: "on" (at all calibrated boundaries), "auto" (where the profile found that it pays), "off"."""

    def __init__(self, costs: CostTable, acceptance: AcceptanceModel, prune: str) -> None:
        self._acceptance = acceptance
        models = [] if prune == "off" else [m for m in costs.exits if prune == "on" or m.pays]
        self._models: dict[int, ExitModel] = {m.boundary: m for m in models if 0 < m.boundary < costs.num_segments}
        self._is_forced = prune == "on"
        self._kept = FIRST_KEPT

    def rule(
        self, costs: CostTable, num_rows: int, num_requests: int, context_len: float, price: float
    ) -> ExitRule | None:
        """Return the exits for passes of num_rows rows, or None if none pays. To stay, a row must be worth its share of
        the remaining time, since the tile that is reached depends on all rows together. For a mixture of experts, this
        share counts only experts that the dropped rows alone read."""
        least = {}
        for boundary in self._models:
            ms = costs.remaining_ms_array(boundary, num_rows, num_requests, context_len)
            droppable = num_rows - num_requests
            kept = num_rows - int((1.0 - self._kept) * droppable)
            saving = float(ms[num_rows] - ms[kept]) - costs.exit_ms(boundary, droppable)
            if droppable and (self._is_forced or saving > MIN_SAVING * float(ms[num_rows])):
                first = num_requests if costs.routing is None else min(kept, num_rows - 1)
                least[boundary] = price * float(ms[num_rows] - ms[first]) / (num_rows - first)
        return ExitRule(tuple(least), self._models, least, self._acceptance) if least else None

    def observe(self, stats: PlanStats) -> None:
        """Learn the share of rows that stay where rows were dropped."""
        if stats.num_pruned:
            share = stats.num_verified / (stats.num_verified + stats.num_pruned)
            self._kept += (1.0 - KEPT_MEMORY) * (share - self._kept)
