"""Requests that wait for their guide to be compiled, off the threads that read requests and run steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import CancelledError, FaserError, InvalidArgumentError, UnavailableError, timed_out
from faser_trtllm.guided.compiler import GuideCompiler
from faser_trtllm.guided.spec import GuideSpec

log = logging.getLogger(__name__)

MAX_WAITING_GUIDES = 256

OnGuide = Callable[[Guide], None]
OnError = Callable[[FaserError], None]


class GuideQueue:
    """Provides each request with its guide: at once if it is cached, else from one thread, in order of arrival.

    Thread-safe. Exactly one of on_guide and on_error is called, once. on_guide runs under the lock that cancel() takes,
    so that a request is either cancelled here or passed on; it must be quick, and its exceptions go to on_error.
    """

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[OnError, threading.Timer | None]] = {}
        self._work: SimpleQueue[tuple[str, GuideSpec, OnGuide]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, request_id: str, spec: GuideSpec, on_guide: OnGuide, on_error: OnError, timeout_ms: float | None = None
    ) -> None:
        """Wait for a guide, for timeout_ms at most, after which the request ends as one in the executor's queue does.

        Raises UnavailableError if too many requests wait, InvalidArgumentError if the id already waits, and what
        on_guide raises for a cached guide; then neither callback is called.
        """
        guide = self._compiler.find(spec)
        if guide is not None:
            on_guide(guide)
            return
        with self._lock:
            if request_id in self._waiting:
                raise InvalidArgumentError(f"request id {request_id[:64]!r} is already in use by a running request")
            if len(self._waiting) >= MAX_WAITING_GUIDES:
                raise UnavailableError(
                    f"{len(self._waiting)} requests wait for their guides, the limit is {MAX_WAITING_GUIDES}; "
                    "try again later"
                )
            timer = None
            if timeout_ms is not None:
                error = timed_out("in the queue", timeout_ms)
                timer = threading.Timer(timeout_ms / 1e3, self._end, (request_id, error))
                timer.daemon = True
                timer.start()
            self._waiting[request_id] = on_error, timer
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faser-guides", daemon=True)
                self._thread.start()
        self._work.put((request_id, spec, on_guide))

    def cancel(self, request_id: str) -> bool:
        """End a waiting request with a CancelledError; False if it is not waiting."""
        return self._end(request_id, CancelledError("the request was cancelled"))

    def _end(self, request_id: str, error: FaserError) -> bool:
        with self._lock:
            on_error = self._pop(request_id)
        if on_error is not None:
            on_error(error)
        return on_error is not None

    def _pop(self, request_id: str) -> OnError | None:
        """With the lock: the request waits no longer."""
        on_error, timer = self._waiting.pop(request_id, (None, None))
        if timer is not None:
            timer.cancel()
        return on_error

    def _run(self) -> None:
        while True:
            request_id, spec, on_guide = self._work.get()
            with self._lock:
                if request_id not in self._waiting:
                    continue
            found = self._compile(spec)
            with self._lock:
                on_error = self._pop(request_id)
                if on_error is None:
                    continue
                if not isinstance(found, FaserError):
                    try:
                        on_guide(found)
                        continue
                    except FaserError as error:
                        found = error
            on_error(found)

    def _compile(self, spec: GuideSpec) -> Guide | FaserError:
        try:
            return self._compiler.compile(spec)
        except FaserError as error:
            return error
        except Exception as error:
            log.exception("a guide could not be compiled")
            return FaserError(f"the guide failed with {type(error).__name__}; see the server's log")
