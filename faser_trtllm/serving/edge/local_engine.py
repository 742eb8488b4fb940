"""The executor of this process, as TritonModel uses it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.text.request import TextOutput, TextRequest, TopLogProbs
from faser_trtllm.serving.worker.engine_process import SHUTTING_DOWN, message_of
from faser_trtllm.serving.worker.messages import Chunk, Failed

log = logging.getLogger("faser.engine")

OnEvent = Callable[[Chunk | Failed], None]

MAX_REQUEST_BYTES = 64 << 20
MAX_BYTES = 256 << 20
_NOT_READ = "the output was not read in time and filled the server's memory for it; read faster or ask for less of it"


class Generator(Protocol):
    """What TextGenerator does."""

    def submit(self, request_id: str, request: TextRequest, on_output: Callable[[TextOutput], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Open:
    """A request and its output that waits for delivery."""

    on_event: OnEvent
    chunks: list[Chunk] = field(default_factory=list)
    num_bytes: int = 0
    failure: Failed | None = None
    has_begun: bool = False

    def take_chunks(self) -> list[Chunk]:
        chunks, self.chunks, self.num_bytes = self.chunks, [], 0
        return chunks


class LocalEngine:
    """Any thread may submit and cancel; deliver() belongs to one thread, which calls all callbacks.

    Chunks of a request that wait for delivery become one. If nobody takes them, a request with more than
    MAX_REQUEST_BYTES, or the one that brings all of them beyond MAX_BYTES, ends with UNAVAILABLE and without them.
    Urgent are the first output of a request and its end.
    """

    def __init__(self, generator: Generator, notify: Callable[[bool], None]) -> None:
        """notify: called when events wait that did not before; True: an urgent one is among them."""
        self._generator = generator
        self._notify = notify
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._stopped: set[int] = set()
        self._waiting: dict[int, _Open] = {}
        self._urgent: dict[int, _Open] = {}  # those of _waiting
        self._num_bytes = 0
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
            self._open[request_id] = _Open(on_event)
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

    def deliver(self, everything: bool = True) -> None:
        """Call the callbacks of all events that wait, or of the requests with urgent ones."""
        with self._lock:
            due = self._waiting if everything else self._urgent
            if everything:
                self._waiting = {}
            else:
                for request_id in due:
                    del self._waiting[request_id]
            self._urgent = {}
            self._num_bytes -= sum(request.num_bytes for request in due.values())
            batch = [(id_, request.on_event, request.take_chunks(), request.failure) for id_, request in due.items()]
        for request_id, on_event, chunks, failure in batch:
            try:
                if chunks:
                    on_event(_merged(chunks))
                if failure is not None:
                    on_event(failure)
            except Exception as error:
                log.exception("delivering a response failed; the request ends")
                self._give_up(request_id, on_event, error)

    def _give_up(self, request_id: int, on_event: OnEvent, error: Exception) -> None:
        """End a request whose response could not be made; else its client would wait for ever, or miss some text."""
        with self._lock:
            self._open.pop(request_id, None)
            self._stopped.discard(request_id)
            waiting = self._waiting.pop(request_id, None)
            self._urgent.pop(request_id, None)
            self._num_bytes -= 0 if waiting is None else waiting.num_bytes
        self._generator.cancel(str(request_id))
        what = f"the response could not be made: {type(error).__name__}; see the server's log"
        with contextlib.suppress(Exception):  # what failed before may fail again
            on_event(Failed(request_id, "INTERNAL", what))

    def _take(self, request_id: int, output: TextOutput) -> None:
        was_stopped = output.is_final and request_id in self._stopped
        self._put(request_id, message_of(request_id, output, was_stopped))

    def _put(self, request_id: int, event: Chunk | Failed) -> None:
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            was_empty, was_calm = not self._waiting, not self._urgent
            is_over = isinstance(event, Chunk) and not self._keep(request, event)
            if is_over:
                self._num_bytes -= request.num_bytes
                request.take_chunks()
                event = Failed(request_id, "UNAVAILABLE", _NOT_READ)
            if isinstance(event, Failed):
                request.failure = event
            is_urgent = not request.has_begun or isinstance(event, Failed) or event.is_final
            request.has_begun = True
            if isinstance(event, Failed) or event.is_final:
                del self._open[request_id]
                self._stopped.discard(request_id)
            self._waiting[request_id] = request
            if is_urgent:
                self._urgent[request_id] = request
        if is_over:
            self._generator.cancel(str(request_id))
        if was_empty or (is_urgent and was_calm):
            self._notify(is_urgent)

    def _keep(self, request: _Open, chunk: Chunk) -> bool:
        """False, and the chunk is not kept, if a limit would be passed."""
        num_bytes = _bytes_of(chunk)
        if request.num_bytes + num_bytes > MAX_REQUEST_BYTES or self._num_bytes + num_bytes > MAX_BYTES:
            return False
        request.chunks.append(chunk)
        request.num_bytes += num_bytes
        self._num_bytes += num_bytes
        return True


def _bytes_of(chunk: Chunk) -> int:
    """Memory of a chunk, roughly: a character up to 4 bytes, a number 36 with its place."""
    num_numbers = len(chunk.token_ids) + len(chunk.log_probs) + len(chunk.is_draft)
    tops = [chunk.tops]
    if chunk.context is not None:
        num_numbers += len(chunk.context.token_ids) + len(chunk.context.log_probs)
        tops.append(chunk.context.tops)
    num_bytes = len(chunk.logits) + sum(len(one.ids) + len(one.log_probs) for one in tops)
    return 512 + 4 * len(chunk.text) + 36 * num_numbers + num_bytes


def _merged(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return Chunk(
        id=last.id,
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple(chain.from_iterable([chunk.token_ids for chunk in chunks])),
        finish_reason=last.finish_reason,
        statistics=last.statistics,
        log_probs=tuple(chain.from_iterable([chunk.log_probs for chunk in chunks])),
        logits=b"".join([chunk.logits for chunk in chunks]),
        is_draft=tuple(chain.from_iterable([chunk.is_draft for chunk in chunks])),
        tops=TopLogProbs.join([chunk.tops for chunk in chunks]),
        context=chunks[0].context,
    )
