"""Threads that read requests, so that one client's long prompt does not delay the requests of others."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable
from queue import PriorityQueue

from faser_trtllm.serving.engine_process.wire import RequestFrame

NUM_THREADS = 2
MAX_INLINE_BYTES = 8 << 10  # a frame up to this size is read at once: its text takes a few ms at most


class Mark(enum.Enum):
    """How a queued request is to end as soon as it was read."""

    CANCELLED = enum.auto()
    STOPPED = enum.auto()


class Intake:
    """Reads small requests on the caller's thread, and others on NUM_THREADS threads, the smallest first.

    put(), cancel() and stop() must be called on one thread.
    """

    def __init__(self, read: Callable[[RequestFrame], None]) -> None:
        """read: starts or refuses a request. Several threads call it."""
        self._read = read
        self._work: PriorityQueue[tuple[int, int, RequestFrame]] = PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, RequestFrame] = {}  # by handle
        self._marks: dict[int, Mark] = {}
        self._threads: list[threading.Thread] = []

    def put(self, frame: RequestFrame) -> None:
        """Read a request, or queue it for a thread that does."""
        if frame.num_bytes <= MAX_INLINE_BYTES:
            self._read(frame)
            return
        with self._lock:
            self._waiting[frame.handle] = frame
        if len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._run, name="faser-intake", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put((frame.num_bytes, next(self._numbers), frame))

    def cancel(self, handle: int) -> bool:
        """Mark a queued request as cancelled by its client; return False if no request with this handle is queued."""
        with self._lock:
            if handle not in self._waiting:
                return False
            self._marks[handle] = Mark.CANCELLED
            return True

    def stop(self, model: int, client_id: tuple[str, str]) -> None:
        """Mark the queued requests of a client's id as stopped (RequestFrame.client_id)."""
        with self._lock:
            for handle, frame in self._waiting.items():
                if frame.model == model and frame.client_id == client_id:
                    self._marks.setdefault(handle, Mark.STOPPED)

    def take_mark(self, handle: int) -> Mark | None:
        """Forget a request that was read and started; return its mark. cancel() then returns False."""
        with self._lock:
            self._waiting.pop(handle, None)
            return self._marks.pop(handle, None)

    def _run(self) -> None:
        while True:
            self._read(self._work.get()[-1])
