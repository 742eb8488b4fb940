"""The queue between the executor's thread, which commits tokens, and the writer's, which sends responses.

Detokenizing, stop words and responses take longer than the executor's own Python of a step, and all threads share
Python's lock. So the executor's thread only notes what it committed, and the rest is made while it waits for a pass.
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
MAX_AT_ONCE = 16  # outputs of a step in which a stop word is looked for at once
MAX_REQUEST_BYTES = 64 << 20  # of one request's responses that are due
MAX_BYTES = 256 << 20  # of all requests' together
NOT_READ = "the output was not read in time and filled the server's memory for it; read faster or ask for less of it"


class Outbox:
    """The executor's thread puts outputs and hands them over once per step; the writer's takes responses.

    If the writer is late by MAX_WAITING outputs, the executor makes their text itself, so memory is bounded. It does so
    for the first MAX_AT_ONCE outputs of a step that may hold a stop word, too: a small batch runs no step in vain. For
    the others a stop word is found while the next step runs, whose output is dropped. Outputs of a request that wait
    for the writer become one response. A request ends with UNAVAILABLE when its responses that nobody reads pass
    MAX_REQUEST_BYTES, or MAX_BYTES together with those of the others.
    """

    def __init__(self, notify: Callable[[bool], None]) -> None:
        """notify: called when the writer has work; True: now, False: when it has rested."""
        self._notify = notify
        self._waiting: deque[tuple[OpenRequest, RequestOutput | FaserError, RequestStats | None]] = deque()
        self._lock = threading.Lock()  # guards the requests' text and what follows
        self._due: dict[OpenRequest, None] = {}
        self._urgent: dict[OpenRequest, None] = {}
        self._num_bytes = 0
        self._num_at_once = 0  # in this step; the executor's thread's

    def put(self, request: OpenRequest, output: RequestOutput) -> bool:
        """Note the output of a request on the executor's thread; True if the request is found to end with it."""
        stats = output.request.stats
        if request.may_stop and request.num_put == request.num_converted and self._num_at_once < MAX_AT_ONCE:
            self._num_at_once += 1
            request.num_put += 1
            with self._lock:
                self._convert(request, output, stats)
            return request.is_done
        if request.needs_stats:  # a request that has ended has its last ones
            stats = stats.copy()
        request.num_put += 1
        self._waiting.append((request, output, stats))
        return False

    def fail(self, request: OpenRequest, error: FaserError) -> None:
        """End a request with an error after the outputs that wait. Thread-safe."""
        self._waiting.append((request, error, None))
        self._notify(True)

    def hand_over(self) -> None:
        """Tell the writer what waits; the executor's thread is about to wait for something else than Python."""
        self._num_at_once = 0
        if len(self._waiting) > MAX_WAITING:
            self.convert()
        if self._waiting or self._urgent:
            self._notify(True)
        elif self._due:
            self._notify(False)

    def convert(self) -> None:
        """Make the text of all outputs that wait. Thread-safe."""
        while self._waiting:
            with self._lock:  # a request's outputs are converted in the order in which they are taken
                if self._waiting:
                    self._convert(*self._waiting.popleft())

    def take(self, everything: bool) -> list[bytes]:
        """The responses (wire.py) that are due, or those that are urgent: the first of a request and its end."""
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
    except Exception as error:  # without a response its client would wait for ever, or miss some text
        log.exception("making a response failed; the request ends")
        if not request.siblings:
            return []
        return [
            request.refuse(FaserError(f"the response could not be made: {type(error).__name__}; see the server's log"))
        ]
