"""Assigns engines to GPU partitions by mode: the whole GPU for both in turn, or one side of a pair each."""

from __future__ import annotations

from typing import Protocol

from faser_trtllm.core.decision import Mode
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair


class Movable(Protocol):
    def use(self, partition: GpuPartition) -> None:
        """Switch to another partition from the next call on."""


class GpuModes:
    """Moves the engines when the mode changes; both sides of a pair come from one split, so they never overlap."""

    def __init__(self, whole: GpuPartition, pair: PartitionPair, target: Movable, draft: Movable | None) -> None:
        self._whole = whole
        self._pair = pair
        self._target = target
        self._draft = draft

    def enter(self, mode: Mode) -> None:
        """Switch modes; call between two steps, when neither engine runs."""
        assert self._draft is not None, "only a drafting executor changes its mode"
        overlaps = mode is not Mode.SERIAL
        self._target.use(self._pair.target if overlaps else self._whole)
        self._draft.use(self._pair.draft if overlaps else self._whole)
