"""Run TensorRT's builder so that it reports its phases and can be interrupted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from faser_trtllm.builder.interrupts import raise_kept

PhaseProgress = Callable[[float, str], None]
"""A callback that gets the fraction done, 0 to 1, and the innermost running phase."""


class Phases:
    """Combines the builder's nested phases into one fraction that never decreases. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[str, int, int]] = []  # name, steps, steps done
        self._fraction = 0.0

    def start(self, name: str, num_steps: int) -> None:
        with self._lock:
            self._open.append((name, max(num_steps, 1), 0))

    def complete(self, name: str, step: int) -> None:
        with self._lock:
            for place, (open_name, num_steps, _) in enumerate(self._open):
                if open_name == name:
                    self._open[place] = (name, num_steps, min(step + 1, num_steps))

    def finish(self, name: str) -> None:
        with self._lock:
            for place in reversed(range(len(self._open))):
                if self._open[place][0] == name:
                    del self._open[place]
                    return

    @property
    def state(self) -> tuple[float, str]:
        """The fraction done, 0 to 1, and the innermost open phase, "" if none."""
        with self._lock:
            fraction, share = 0.0, 1.0
            for _, num_steps, done in self._open:
                fraction += share * done / num_steps
                share /= num_steps
            self._fraction = max(self._fraction, min(fraction, 1.0))
            return self._fraction, self._open[-1][0] if self._open else ""


def run_builder(
    trt: Any, config: Any, build: Callable[[], Any], progress: PhaseProgress | None, poll_s: float = 0.1
) -> Any:
    """Run build() in its own thread with config.progress_monitor set and return its result, or raise its exception.

    The calling thread reports progress every poll_s. An exception in it (Ctrl-C, or from `progress`) ends the build at
    its next step and is raised again once the builder has stopped.
    """
    phases = Phases()
    cancelled = threading.Event()

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.complete(phase_name, step)
            return not cancelled.is_set()

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    monitor = Monitor()
    config.progress_monitor = monitor
    result: list[Any] = []
    failure: list[BaseException] = []

    # If Ctrl-C interrupts Thread.join, Python 3.10 to 3.12 consider the thread dead.
    finished = threading.Event()

    def run() -> None:
        try:
            result.append(build())
        except BaseException as error:
            failure.append(error)
        finally:
            finished.set()

    threading.Thread(target=run, name="faser-tensorrt-builder").start()
    try:
        while not finished.wait(poll_s):
            raise_kept()
            if progress is not None:
                progress(*phases.state)
    finally:
        cancelled.set()
        _wait_for(finished)
        config.progress_monitor = None
    if failure:
        raise failure[0]
    return result[0]


def _wait_for(finished: threading.Event) -> None:
    """Wait through any number of Ctrl-C: TensorRT aborts the process if Python exits while it builds."""
    while not finished.is_set():
        with contextlib.suppress(KeyboardInterrupt):
            finished.wait()
