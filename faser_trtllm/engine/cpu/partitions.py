"""Assigns cores to engines by mode: all cores for both in turn, or a core set for each."""

from __future__ import annotations

from contextlib import ExitStack

from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.partition.core_set import CoreSet


class Partitions:
    """Moves the engines when the mode changes. The overlapped core sets are created on first use and closed with
    `stack`.

    cores: those of the whole partition. The draft gets one core, the target the others (or the same one if it is the
    only one: the operating system then time-slices the two lanes).
    """

    def __init__(
        self, whole: CoreSet, target: CpuEngine, draft: CpuEngine | None, num_threads: int, stack: ExitStack
    ) -> None:
        self._whole = whole
        self._target = target
        self._draft = draft
        self._num_threads = num_threads
        self._stack = stack
        self._parts: tuple[CoreSet, CoreSet] | None = None

    def enter(self, mode: Mode) -> None:
        """Switch modes; call between two steps."""
        assert self._draft is not None, "only a drafting executor changes its mode"
        if mode is Mode.SERIAL:
            self._target.use(self._whole)
            self._draft.use(self._whole)
            return
        verify, draft = self._split()
        self._target.use(verify)
        self._draft.use(draft)

    def _split(self) -> tuple[CoreSet, CoreSet]:
        if self._parts is None:
            verify = self._stack.enter_context(CoreSet(None, max(1, self._num_threads - 1)))
            draft = self._stack.enter_context(CoreSet(None, 1))
            self._parts = verify, draft
        return self._parts
