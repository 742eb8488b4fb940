"""The drafting of a step, before its verification or at the same time on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Protocol

from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, SchedulerOutput


class DraftStage(Protocol):
    def draft(self, plan: SchedulerOutput) -> DraftResult: ...


class Drafting:
    """A finished or running draft; result() waits for it."""

    def __init__(self, *, threaded: bool = False) -> None:
        self._done = threading.Event() if threaded else None
        self._result: DraftResult | None = None
        self._error: BaseException | None = None

    def run(self, stage: DraftStage, plan: SchedulerOutput) -> None:
        try:
            self._result = stage.draft(plan)
        except BaseException as error:
            self._error = error
        if self._done is not None:
            self._done.set()

    def result(self) -> DraftResult:
        if self._done is not None:
            self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class DraftWorker:
    """Drafts in the calling thread (serial) or in its own thread, concurrently with verification.

    enter_mode is called before a step whose mode differs from the last step's, while neither engine runs. It moves the
    engines to the partitions of the mode.
    """

    def __init__(self, stage: DraftStage, enter_mode: Callable[[Mode], None] = lambda mode: None) -> None:
        self._stage = stage
        self._enter_mode = enter_mode
        self._mode = Mode.SERIAL
        self._work: SimpleQueue[tuple[Drafting, SchedulerOutput] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def draft(self, plan: SchedulerOutput) -> Drafting:
        """Start (in serial mode, run) the drafting of a plan."""
        if plan.mode is not self._mode:
            self._enter_mode(plan.mode)
            self._mode = plan.mode
        drafting = Drafting(threaded=plan.mode is not Mode.SERIAL)
        if plan.mode is Mode.SERIAL:
            drafting.run(self._stage, plan)
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faser-draft", daemon=True)
                self._thread.start()
            self._work.put((drafting, plan))
        return drafting

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def register(self, stack: ExitStack) -> None:
        """Close the worker with the stack, before the engines entered earlier."""
        stack.callback(self.close)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next drafting, if any comes; between two, this thread keeps no plan alive."""
        item = self._work.get()
        if item is None:
            return False
        drafting, plan = item
        drafting.run(self._stage, plan)
        return True
