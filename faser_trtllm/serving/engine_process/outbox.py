"""The queue between the executor's thread, which commits tokens, and the writer's, which sends responses.

Detokenizing, searching stop words and building responses take longer than the executor's own Python code in a step, and
all threads share Python's lock. The executor's thread therefore only queues outputs; the rest is done while it waits
for a pass.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import RequestStats
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.engine_process.open_request import OpenRequest

log = logging.getLogger("faser.engine")

MAX_WAITING = 4096  # outputs: 16 steps of 256 requests
MAX_AT_ONCE = 16  # outputs of a step that the executor's thread itself searches for stop words
MAX_REQUEST_BYTES = 64 << 20  # responses of one request that are due
MAX_BYTES = 256 << 20  # responses of all requests that are due
NOT_READ = "the output was not read in time and filled the server's memory for it; read faster or ask for less of it"


class Outbox:
    """The executor's thread puts outputs and hands them over once per step; the writer's thread takes responses.

    If the writer is MAX_WAITING outputs late, the executor detokenizes them itself, so memory is bounded. It also
    detokenizes the first MAX_AT_ONCE outputs of a step that may contain a stop word, so that a small batch never runs a
    step too many. In all other outputs, a stop word is found while the next step runs, whose output is then dropped.
    Outputs of a request that wait for the writer are merged into one response. A request ends with UNAVAILABLE if its
    unread responses exceed MAX_REQUEST_BYTES, or MAX_BYTES together with those of other requests.
    """

    def __init__(self, notify: Callable[[bool], None]) -> None:
        """notify: called when the writer has work; its argument is True if the writer must not rest first."""
        self._notify = notify
        self._waiting: deque[tuple[OpenRequest, RequestOutput | FaserError, RequestStats | None]] = deque()
        self._lock = threading.Lock()  # guards the requests' text and the next three attributes
        self._due: dict[OpenRequest, None] = {}
        self._urgent: dict[OpenRequest, None] = {}
        self._num_bytes = 0
        self._num_at_once = 0  # in this step; only the executor's thread uses it

    def put(self, request: OpenRequest, output: RequestOutput) -> bool:
        """Queue an output, on the executor's thread; return True if it was detokenized at once and ends the request."""
        stats = output.request.stats
        if request.may_stop and request.num_put == request.num_converted and self._num_at_once < MAX_AT_ONCE:
            self._num_at_once += 1
            request.num_put += 1
            with self._lock:
                self._convert(request, output, stats)
            return request.is_done
        if request.needs_stats:  # otherwise they are only read at the end, when they no longer change
            stats = stats.copy()
        request.num_put += 1
        self._waiting.append((request, output, stats))
        return False

    def fail(self, request: OpenRequest, error: FaserError) -> None:
        """End a request with an error after its queued outputs. Thread-safe."""
        self._waiting.append((request, error, None))
        self._notify(True)

    def hand_over(self) -> None:
        """Wake the writer for queued outputs; the executor calls it before a pass, which releases Python's lock."""
        self._num_at_once = 0
        if len(self._waiting) > MAX_WAITING:
            self.convert()
        if self._waiting or self._urgent:
            self._notify(True)
        elif self._due:
            self._notify(False)

    def convert(self) -> None:
        """Detokenize all queued outputs. Thread-safe."""
        while self._waiting:
            with self._lock:  # keeps the outputs of a request in order
                if self._waiting:
                    self._convert(*self._waiting.popleft())

    def take(self, everything: bool) -> list[bytes]:
        """Return the responses (wire.py) that are due, or only urgent ones: the first of a request and its end."""
        self.convert()
        with self._lock:
            requests = [*self._urgent, *(self._due if everything else ())]
        responses: list[bytes] = []
        for request in requests:
            with self._lock:
                self._urgent.pop(request, None)
                self._due.pop(request, None)
                self._num_bytes -= request.num_due_bytes
                request.num_due_bytes = 0
                responses += _responses_of(request)
        if self._due:
            self._notify(False)
        return responses

    def _convert(self, request: OpenRequest, event: RequestOutput | FaserError, stats: RequestStats | None) -> None:
        if isinstance(event, FaserError):
            request.end(event)
        else:
            assert stats is not None
            request.num_converted += 1
            request.push(event, stats)
        if not request.is_due:
            return
        self._num_bytes += request.num_bytes - request.num_due_bytes
        request.num_due_bytes = request.num_bytes
        if request.num_bytes > MAX_REQUEST_BYTES or self._num_bytes > MAX_BYTES:
            self._num_bytes -= request.num_due_bytes
            request.num_due_bytes = 0
            request.end(UnavailableError(NOT_READ), drop=True)
            request.model.cancel(request.id)
        if request.is_urgent or request.has_end:
            request.is_urgent = False
            self._due.pop(request, None)
            self._urgent[request] = None
        elif request not in self._urgent:
            self._due[request] = None


def _responses_of(request: OpenRequest) -> list[bytes]:
    try:
        return request.responses()
    except FaserError as error:
        return [request.refuse(error)] if request.siblings else []
    except Exception as error:  # without a response the client would wait forever, or miss some text
        log.exception("a response could not be built; the request ends")
        if not request.siblings:
            return []
        return [
            request.refuse(FaserError(f"the response could not be built: {type(error).__name__}; see the server's log"))
        ]
