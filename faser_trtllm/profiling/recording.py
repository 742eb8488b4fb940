"""A policy that drafts a fixed length, drops nothing, and writes down what early exit saw and what the test found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.decision import DraftPlan, ExitView, StepOutcome, StepView
from faser_trtllm.policy.base import StatelessPolicy

MAX_RANK = 8  # as ExitModel counts places


@dataclass(frozen=True, slots=True)
class Observations:
    """Tested drafts. place: among the pending drafts; margin: of the draft model; rank, gap [n, boundaries]."""

    place: npt.NDArray[np.int32]
    margin: npt.NDArray[np.float64]
    rank: npt.NDArray[np.float64]
    gap: npt.NDArray[np.float64]
    accepted: npt.NDArray[np.bool_]


@dataclass
class RecordingPolicy(StatelessPolicy):
    """boundaries: indices into EngineSpec.segments at which to look. outcomes: one per step, in order."""

    num_draft_tokens: int
    boundaries: tuple[int, ...] = ()
    outcomes: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"recording:{self.num_draft_tokens}"
        self._seen: dict[int, ExitView] = {}
        self._decoding: list[object] = []
        self._columns: list[tuple[float, ...]] = []

    def plan(self, view: StepView) -> DraftPlan:
        return DraftPlan([self.num_draft_tokens] * len(view.decoding))

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        self._seen.clear()
        return self.boundaries

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        self._seen[exit_view.boundary] = exit_view
        self._decoding = list(view.decoding)
        return list(exit_view.num_rows)

    def wants_outcome(self, is_speculative: bool) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        if len(self._seen) < len(self.boundaries) or not self._seen:
            return
        views = [self._seen[boundary] for boundary in self.boundaries]
        for i, request in enumerate(outcome.decoding):
            k = self._decoding.index(request)
            for j in range(min(outcome.num_tested[i], len(views[0].rank[k]))):
                margin = float(request.draft_margins[request.num_tokens + j])
                signals = [value for view in views for value in (float(view.rank[k][j]), float(view.gap[k][j]))]
                self._columns.append((j, j < outcome.num_accepted[i], margin, *signals))
        self._seen.clear()

    def observations(self) -> Observations:
        width = 3 + 2 * len(self.boundaries)
        table = np.array(self._columns, np.float64).reshape(-1, width)
        return Observations(
            place=table[:, 0].astype(np.int32),
            margin=table[:, 2],
            rank=table[:, 3::2],
            gap=table[:, 4::2],
            accepted=table[:, 1] > 0.5,
        )
