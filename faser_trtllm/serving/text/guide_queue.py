"""A queue of requests that wait for their guides, which it compiles on threads of its own."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import CancelledError, FaserError, InvalidArgumentError, UnavailableError, timed_out
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.guided.spec import GuideSpec
from faser_trtllm.serving.text.fair_queue import FairQueue

log = logging.getLogger(__name__)

MAX_WAITING_GUIDES = 256  # per budget; also the limit of requests that wait for one guide
QUICK_BUDGETS_S = (0.01, 0.1)
_TIMEOUT_PERIOD_S = 0.02  # between two looks at the timeouts of waiting requests

OnGuide = Callable[[Guide], None]
OnError = Callable[[FaserError], None]


@dataclass(eq=False, slots=True)
class _Job:
    """A guide to compile, and the requests that wait for it."""

    spec: GuideSpec
    client_key: str
    number: int  # in the order of arrival
    level: int = 0  # number of budgets that it has used up
    requests: dict[str, OnGuide] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Waiting:
    job: _Job
    on_error: OnError
    timeout_ms: float | None
    deadline_s: float  # of time.perf_counter()


class GuideQueue:
    """Provides each request with its guide: at once if it is cached, otherwise from one of two threads.

    The time to compile a guide is only known afterwards. One thread therefore tries each guide for 10 ms, then for
    100 ms, and prefers guides not tried yet; a guide that takes longer goes to the other thread. Clients take turns,
    starting with their newest guide, and if too many wait, the client with the most loses its oldest (FairQueue). A
    simple guide thus waits for one try, however many slow ones are queued.

    Thread-safe. Exactly one of on_guide and on_error is called, once. For a request that waited, on_guide runs under
    the lock that cancel() takes, so the request is either cancelled here or passed on; on_guide must be quick, and a
    FaserError that it raises goes to on_error.
    """

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._jobs: dict[GuideSpec, _Job] = {}
        self._levels = [FairQueue[_Job](MAX_WAITING_GUIDES) for _ in (*QUICK_BUDGETS_S, None)]
        self._numbers = itertools.count()
        self._has_threads = False
        self._ends_late = False  # a thread runs _end_late()

    def submit(
        self,
        request_id: str,
        spec: GuideSpec,
        on_guide: OnGuide,
        on_error: OnError,
        timeout_ms: float | None = None,
        client_key: str = "",
        arrived_s: float | None = None,
    ) -> None:
        """Call on_guide with the guide, or on_error with an error, which timeout_ms after arrived_s is a timeout.

        arrived_s: of time.perf_counter(); None: now.

        Raises UnavailableError if too many guides or requests wait, and InvalidArgumentError if the id already waits;
        neither callback is called then. For a cached guide, passes on what on_guide raises.
        """
        guide = self._compiler.find(spec)
        if guide is not None:
            on_guide(guide)
            return
        lost: _Job | None = None
        with self._changed:
            if request_id in self._waiting:
                raise InvalidArgumentError(f"request id {request_id[:64]!r} is already in use by a running request")
            job = self._jobs.get(spec)
            if job is None:
                job = _Job(spec, client_key, next(self._numbers))
                lost = self._put(job)
                if lost is job:
                    raise _too_many()
                self._jobs[spec] = job
            elif len(job.requests) >= MAX_WAITING_GUIDES:
                raise _too_many()
            arrived_s = time.perf_counter() if arrived_s is None else arrived_s
            deadline_s = math.inf if timeout_ms is None else arrived_s + timeout_ms / 1e3
            if timeout_ms is not None and not self._ends_late:
                threading.Thread(target=self._end_late, name="faser-guides-timeouts", daemon=True).start()
                self._ends_late = True
            job.requests[request_id] = on_guide
            self._waiting[request_id] = _Waiting(job, on_error, timeout_ms, deadline_s)
        if lost is not None:
            self._finish(lost, _too_many())

    def cancel(self, request_id: str) -> bool:
        """End a waiting request with a CancelledError; return False if it is not waiting."""
        return self._end(request_id, CancelledError("the request was cancelled"))

    def _end(self, request_id: str, error: FaserError) -> bool:
        with self._changed:
            on_error = self._pop(request_id)
        if on_error is not None:
            on_error(error)
        return on_error is not None

    def _pop(self, request_id: str) -> OnError | None:
        """Remove a waiting request. The caller holds the lock, as for _put and _take."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        del waiting.job.requests[request_id]
        return waiting.on_error

    def _put(self, job: _Job) -> _Job | None:
        """Queue a job at its level; return the job that there is no room for, if any."""
        if not self._has_threads:
            self._has_threads = True
            for name, levels in (("quick", self._levels[:-1]), ("slow", self._levels[-1:])):
                threading.Thread(target=self._run, args=(levels,), name=f"faser-guides-{name}", daemon=True).start()
        lost = self._levels[job.level].put(job.client_key, job.number, job)
        self._changed.notify_all()
        return lost

    def _run(self, levels: Sequence[FairQueue[_Job]]) -> None:
        while True:
            self._run_next(levels)

    def _run_next(self, levels: Sequence[FairQueue[_Job]]) -> None:
        """Compile the next job's guide. A function of its own, so that a waiting thread keeps no guide alive."""
        with self._changed:
            while (job := self._take(levels)) is None:
                self._changed.wait()
        found = self._compile(job)
        if found is not None:
            self._finish(job, found)
            return
        with self._changed:
            job.level += 1
            lost = self._put(job)
        if lost is not None:
            self._finish(lost, _too_many())

    def _end_late(self) -> None:
        """End requests whose time is over, one thread for all, until none waits with a timeout."""
        while True:
            with self._changed:
                now_s = time.perf_counter()
                self._ends_late = any(waiting.timeout_ms is not None for waiting in self._waiting.values())
                if not self._ends_late:
                    return
                late = [(key, waiting) for key, waiting in self._waiting.items() if waiting.deadline_s <= now_s]
                for request_id, _ in late:
                    self._pop(request_id)
            for _, waiting in late:
                assert waiting.timeout_ms is not None
                waiting.on_error(timed_out("in the queue", waiting.timeout_ms))
            time.sleep(_TIMEOUT_PERIOD_S)

    def _take(self, levels: Sequence[FairQueue[_Job]]) -> _Job | None:
        """Return the next job that a request still waits for."""
        for queue in levels:
            while (job := queue.take()) is not None:
                if job.requests:
                    return job
                del self._jobs[job.spec]
        return None

    def _finish(self, job: _Job, found: Guide | FaserError) -> None:
        """Answer all requests of a job."""
        failed: list[tuple[OnError, FaserError]] = []
        with self._changed:
            del self._jobs[job.spec]
            for request_id, on_guide in list(job.requests.items()):
                on_error = self._pop(request_id)
                assert on_error is not None
                if isinstance(found, FaserError):
                    failed.append((on_error, found))
                    continue
                try:
                    on_guide(found)
                except FaserError as error:
                    failed.append((on_error, error))
        for on_error, refusal in failed:
            on_error(refusal)

    def _compile(self, job: _Job) -> Guide | FaserError | None:
        """Return the guide, or the error, or None if the job has used up the budget of its level."""
        try:
            if job.level < len(QUICK_BUDGETS_S):
                return self._compiler.compile_quickly(job.spec, QUICK_BUDGETS_S[job.level], job.client_key)
            return self._compiler.compile(job.spec, job.client_key)
        except FaserError as error:
            return error
        except Exception as error:
            log.exception("a guide could not be compiled")
            return FaserError(f"the guide failed with {type(error).__name__}; see the server's log")


def _too_many() -> UnavailableError:
    return UnavailableError(f"{MAX_WAITING_GUIDES} guides are waiting to be compiled, the limit; try again later")
