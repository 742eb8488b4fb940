"""The worker's end of the pipe: one JSON object per line in, one out, until stdin closes.

Requests: {"op": "load", ...} once, then {"op": "run", ...} and {"op": "steps", ...} on demand.
Replies: {"ok": true, ...} or {"ok": false, "kind": "missing" | "failed", "error": sentence}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

TokenIds = list[list[int]]
CONTEXT_LEN = 128  # tokens before the rows of a one-step measurement


@dataclass
class Counts:
    """Statistics of a run; times are from the system's own clock, if it has one.

    first_ms: per batch, until every request had its first token. step_ms: of later steps. The *_cpu_ms are CPU times of
    this process, which, with one thread, other work on the machine disturbs least.
    """

    num_target_passes: int = 0  # per request; a pass over a batch of 4 counts 4
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    first_ms: list[float] = field(default_factory=list)
    first_cpu_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    step_cpu_ms: list[float] = field(default_factory=list)


class Laps:
    """A timer that adds the steps of one batch to its counts."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def end_prefill(self) -> None:
        """Record that every request of the batch has its first token."""
        self._end(self._counts.first_ms, self._counts.first_cpu_ms)

    def end_step(self) -> None:
        self._end(self._counts.step_ms, self._counts.step_cpu_ms)

    def _end(self, wall_ms: list[float], cpu_ms: list[float]) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        wall_ms.append(1e3 * (wall_s - self._wall_s))
        cpu_ms.append(1e3 * (cpu_s - self._cpu_s))
        self._wall_s, self._cpu_s = wall_s, cpu_s


class System(Protocol):
    def load(self, request: dict[str, Any]) -> dict[str, str]:
        """Load models and return versions of the libraries involved. Import optional libraries here."""

    def generate(self, setting: str, prompts: Sequence[list[int]], max_tokens: int, counts: Counts) -> TokenIds:
        """Decode the prompts greedily as one batch, max_tokens each, ignoring end ids."""

    def steps(self, num_rows: Sequence[int], num_repeats: int) -> dict[int, float]:
        """Return the median ms of one forward pass per number of rows, at CONTEXT_LEN tokens of context."""


def step_mix(num_rows: int) -> list[int]:
    """Return rows per request of a one-step measurement: one each, or four each from 8 rows on."""
    return [1] * num_rows if num_rows < 8 else [4] * (num_rows // 4)


def time_steps(step: Callable[[], None], num_repeats: int) -> float:
    """Return the median ms of a call after a few dropped ones."""
    times = []
    for _ in range(num_repeats + 3):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[3:])[num_repeats // 2]


def serve(system: System) -> None:
    """Answer requests until stdin closes. Output printed by libraries goes to stderr and cannot corrupt a reply."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, **_answer(system, request)}
        except ImportError as error:
            reply = {"ok": False, "kind": "missing", "error": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"ok": False, "kind": "failed", "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")


def _answer(system: System, request: dict[str, Any]) -> dict[str, Any]:
    op = request["op"]
    if op == "load":
        # Pin before importing libraries: their thread pools count the available cores.
        os.sched_setaffinity(0, request["cores"])
        return {"versions": system.load(request)}
    if op == "steps":
        with _quiet_collector():
            return {"steps_ms": system.steps(request["num_rows"], request["num_repeats"])}
    return _run(system, request)


def _run(system: System, request: dict[str, Any]) -> dict[str, Any]:
    """Time request["prompts"] in batches of request["batch_size"]."""
    prompts, batch_size = request["prompts"], request["batch_size"]
    counts, token_ids, seconds = Counts(), [], []
    with _quiet_collector():
        for first in range(0, len(prompts), batch_size):
            start = time.perf_counter()
            token_ids += system.generate(
                request["setting"], prompts[first : first + batch_size], request["max_tokens"], counts
            )
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "token_ids": token_ids, **vars(counts)}


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Collect garbage before a measurement, not during it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
