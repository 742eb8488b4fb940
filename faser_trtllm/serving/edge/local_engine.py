"""The executor of this process, as TritonModel uses it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.text.request import TextOutput, TextRequest
from faser_trtllm.serving.worker.engine_process import SHUTTING_DOWN, message_of
from faser_trtllm.serving.worker.messages import Chunk, Failed

log = logging.getLogger("faser.engine")

OnEvent = Callable[[Chunk | Failed], None]


class Generator(Protocol):
    """What TextGenerator does."""

    def submit(self, request_id: str, request: TextRequest, on_output: Callable[[TextOutput], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class LocalEngine:
    """Any thread may submit and cancel; deliver() belongs to one thread, which calls all callbacks.

    Chunks of a request that wait for delivery are merged, so what waits is bounded by the requests' own limits.
    """

    def __init__(self, generator: Generator, notify: Callable[[], None]) -> None:
        """notify: called when events wait that did not before."""
        self._generator = generator
        self._notify = notify
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, OnEvent] = {}
        self._stopped: set[int] = set()
        self._waiting: list[tuple[OnEvent, Chunk | Failed]] = []
        self._places: dict[int, int] = {}  # of each request's last event in _waiting
        self._is_draining = False

    @property
    def is_ready(self) -> bool:
        return not self._is_draining

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: TextRequest, on_event: OnEvent) -> int:
        """Start a request and return its id; an error of the request is an event. Raises UnavailableError."""
        if self._is_draining:
            raise UnavailableError(SHUTTING_DOWN)
        request_id = next(self._ids)
        with self._lock:
            self._open[request_id] = on_event
        try:
            self._generator.submit(str(request_id), request, lambda output: self._take(request_id, output))
        except FaserError as error:
            self._put(request_id, Failed(request_id, error.code, str(error)))
        except Exception as error:
            log.exception("a request could not be submitted")
            what = f"the request failed with {type(error).__name__}; see the server's log"
            self._put(request_id, Failed(request_id, "INTERNAL", what))
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request, which still ends with an event. Unknown ids are ignored."""
        self._generator.cancel(str(request_id))

    def stop(self, request_id: int) -> None:
        """End a request with the output it has so far."""
        with self._lock:
            if request_id in self._open:
                self._stopped.add(request_id)
        self._generator.cancel(str(request_id))

    def refuse(self) -> None:
        """Refuse requests from now on."""
        self._is_draining = True

    def fail_all(self, code: str, message: str) -> None:
        """End the requests that are open."""
        with self._lock:
            left = list(self._open)
        for request_id in left:
            self._put(request_id, Failed(request_id, code, message))

    def deliver(self) -> None:
        """Call the callbacks of all events that wait."""
        with self._lock:
            waiting, self._waiting, self._places = self._waiting, [], {}
        for on_event, event in waiting:
            try:
                on_event(event)
            except Exception:
                log.exception("delivering a response failed")

    def _take(self, request_id: int, output: TextOutput) -> None:
        was_stopped = output.is_final and request_id in self._stopped
        self._put(request_id, message_of(request_id, output, was_stopped))

    def _put(self, request_id: int, event: Chunk | Failed) -> None:
        is_final = isinstance(event, Failed) or event.is_final
        with self._lock:
            on_event = self._open.get(request_id)
            if on_event is None:
                return
            if is_final:
                del self._open[request_id]
                self._stopped.discard(request_id)
            was_empty = not self._waiting
            place = self._places.get(request_id)
            if place is not None and isinstance(event, Chunk):
                before = self._waiting[place][1]
                assert isinstance(before, Chunk)
                self._waiting[place] = on_event, before.followed_by(event)
            else:
                self._places[request_id] = len(self._waiting)
                self._waiting.append((on_event, event))
        if was_empty:
            self._notify()
