"""A policy that always prunes, to test pruned passes on every engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import Decision, Mode, PruneRule, StepView
from faser_trtllm.policy.base import StatelessPolicy

LIKELY = 10.0  # log-odds


class PruningPolicy(StatelessPolicy):
    """A policy with a fixed length whose boundaries drop rows from the first draft that is not the best candidate on.

    The last draft of a request is always dropped.
    """

    def __init__(self, num_draft_tokens: int, boundaries: Sequence[int], mode: Mode) -> None:
        self.name = f"pruned:{num_draft_tokens}"
        self.boundaries = boundaries
        self._num_draft_tokens, self._mode = num_draft_tokens, mode

    def plan(self, view: StepView) -> Decision:
        return Decision([self._num_draft_tokens] * len(view.decoding), exits=self, mode=self._mode)

    def rule(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        boundary: int,
    ) -> PruneRule:
        before = np.full(sum(num_drafts), LIKELY, np.float32)
        before[[end - 1 for end, count in zip(np.cumsum(num_drafts), num_drafts, strict=True) if count]] = -LIKELY
        return PruneRule(before, rank=-2 * LIKELY, survival=1.0, least=0.5)
