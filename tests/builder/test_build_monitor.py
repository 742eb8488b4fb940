"""The builder's phases as progress, and interrupting it: over a stand-in builder that calls back from its thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from faser_trtllm.builder.build_monitor import Phases, run_builder


class ProgressMonitor:
    """Stand-in for TensorRT's monitor, whose __init__ must be called explicitly."""

    def __init__(self) -> None:
        self.is_made = True


TRT = SimpleNamespace(IProgressMonitor=ProgressMonitor)


class Builder:
    """Ten steps in a nested phase, each once the caller has looked; stops where a step says so."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(progress_monitor=None)
        self.num_steps = 0
        self.looks = threading.Semaphore(0)
        self.thread = ""
        self.is_done = False

    def build(self) -> str | None:
        monitor = self.config.progress_monitor
        assert monitor.is_made
        self.thread = threading.current_thread().name
        monitor.phase_start("Building engine", None, 2)
        monitor.phase_start("Optimizing graph", "Building engine", 10)
        for step in range(10):
            self.looks.acquire(timeout=0.3)
            self.num_steps += 1
            if not monitor.step_complete("Optimizing graph", step):
                self.is_done = True
                return None
        monitor.phase_finish("Optimizing graph")
        monitor.step_complete("Building engine", 0)
        monitor.phase_finish("Building engine")
        return "plan"


def test_phases_become_a_fraction_that_never_falls() -> None:
    seen: list[tuple[float, str]] = []
    builder = Builder()

    def progress(fraction: float, phase: str) -> None:
        seen.append((fraction, phase))
        builder.looks.release()

    plan = run_builder(TRT, builder.config, builder.build, progress, poll_s=0.005)
    assert plan == "plan"
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert 0.3 < fractions[-1] <= 1
    assert "Optimizing graph" in {phase for _, phase in seen}
    assert builder.config.progress_monitor is None
    assert builder.thread != threading.current_thread().name


def test_nested_steps_are_parts_of_their_parents_step() -> None:
    phases = Phases()
    phases.start("outer", 4)
    phases.complete("outer", 0)
    phases.start("inner", 2)
    assert phases.state == (0.25, "inner")
    phases.complete("inner", 0)
    assert phases.state == (0.375, "inner")
    phases.finish("inner")
    assert phases.state == (0.375, "outer")  # finished early: the parent's step is not complete
    phases.complete("outer", 1)
    assert phases.state == (0.5, "outer")
    phases.finish("unknown")
    phases.finish("outer")
    assert phases.state == (0.5, "")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_interrupts_the_caller_ends_the_build_at_its_next_step(kind: type[BaseException]) -> None:
    builder = Builder()

    def progress(fraction: float, phase: str) -> None:
        if builder.num_steps >= 2:
            raise kind
        builder.looks.release()

    with pytest.raises(kind):
        run_builder(TRT, builder.config, builder.build, progress, poll_s=0.005)
    assert 2 <= builder.num_steps < 9
    assert builder.is_done


def test_what_the_builder_raises_is_raised() -> None:
    def build() -> None:
        raise MemoryError("the builder ran out")

    config: Any = SimpleNamespace(progress_monitor=None)
    with pytest.raises(MemoryError, match="ran out"):
        run_builder(TRT, config, build, None)
