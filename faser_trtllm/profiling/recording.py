"""A policy that drafts a fixed length, drops nothing, and records early-exit signals and test results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import Decision, PruneRule, StepView
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.ops.arrays import float32_at
from faser_trtllm.policy.base import StatelessPolicy

MAX_RANK = 8  # as in ExitModel


@dataclass(frozen=True, slots=True)
class Observations:
    """n tested drafts. place: index among the pending drafts. rank, gap: [n, boundaries]; the others [n]."""

    place: npt.NDArray[np.int32]
    margin: npt.NDArray[np.float64]
    rank: npt.NDArray[np.float64]
    gap: npt.NDArray[np.float64]
    accepted: npt.NDArray[np.bool_]


@dataclass
class RecordingPolicy(StatelessPolicy, StepWatcher):
    """A policy with a fixed draft length that also watches its executor.

    boundaries: indices into EngineSpec.segments at which it records.
    steps: per step with decoding requests, True if prompts ran, too, and the ms of drafting and verification.
    """

    num_draft_tokens: int
    boundaries: tuple[int, ...] = ()
    steps: list[tuple[bool, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"recording:{self.num_draft_tokens}"
        self._seen: dict[int, tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.float32]]]] = {}
        self._slots: list[int] = []
        self._columns: list[tuple[float, ...]] = []

    def plan(self, view: StepView) -> Decision:
        return Decision([self.num_draft_tokens] * len(view.decoding), exits=self, tested=self)

    def rule(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        boundary: int,
    ) -> PruneRule:
        """Return a rule that records the signals and drops nothing."""
        self._slots = slots.tolist()
        ends = np.cumsum(num_drafts)[:-1]

        def record(rank: npt.NDArray[np.int32], gap: npt.NDArray[np.float32]) -> None:
            self._seen[boundary] = np.split(rank, ends), np.split(gap, ends)

        return PruneRule(np.zeros(num_drafts.sum(), np.float32), record=record)

    def add(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_accepted: Int32Array,
        outcome: Int32Array,
    ) -> None:
        """Record the results of rejection sampling for the drafts with signals."""
        views = [self._seen[boundary] for boundary in self.boundaries if boundary in self._seen]
        if views and len(views) == len(self.boundaries):
            columns = (column.tolist() for column in (slots, num_tokens, num_accepted, outcome))
            for slot, first, accepted, how in zip(*columns, strict=True):
                if slot not in self._slots:
                    continue
                k = self._slots.index(slot)
                num_tested = accepted + (how == native.RECOVERED)
                for j in range(min(num_tested, len(views[0][0][k]))):
                    margin = float(float32_at(int(sampling[slot]["draft_margins"]) + 4 * first, num_tested)[j])
                    signals = [value for rank, gap in views for value in (float(rank[k][j]), float(gap[k][j]))]
                    self._columns.append((j, j < accepted, margin, *signals))
        self._seen.clear()

    def step(self, record: StepRecord) -> None:
        rows = record.plan.scheduled
        if rows.num_decoding:
            self.steps.append((rows.num_decoding < len(rows), record.result.step_ms))

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
