"""Outputs of an executor whose text is made on another thread, while the executor waits for its next pass.

Detokenizing, stop words and what follows them take longer than the executor's own Python of a step, and all threads
share Python's lock. So the executor's thread only notes what it committed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import RequestStats

log = logging.getLogger(__name__)

MAX_WAITING = 4096  # outputs: 16 steps of 256 requests
MAX_AT_ONCE = 16  # outputs of a step in which a stop word is looked for at once


class TextSink(Protocol):
    """The text of one request, in order of its outputs; called on one thread at a time."""

    may_stop: bool  # by what it finds in the text
    needs_stats: bool  # with outputs before the last, too

    def take(self, output: RequestOutput, stats: RequestStats) -> bool:
        """stats: of the request when the output was committed. True: the request ends here (a stop word was found)."""


class Backlog:
    """The executor's thread adds outputs and hands them over once per step; another one calls convert().

    If that thread is late by MAX_WAITING outputs, the executor converts them itself, so memory is bounded. So it does
    for the first MAX_AT_ONCE outputs of a step that may hold a stop word: a small batch runs no step in vain. Of others
    a stop word is found while the next step runs, whose output is dropped.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        """notify: called on the executor's thread when outputs wait for convert()."""
        self._notify = notify
        self._waiting: deque[tuple[_LateSink, RequestOutput, RequestStats]] = deque()
        self._converting = threading.Lock()
        self._num_at_once = 0

    def sink(self, text: TextSink) -> Callable[[RequestOutput], bool]:
        """A sink for the executor that has the text made later."""
        return _LateSink(self, text)

    def hand_over(self) -> None:
        """The executor's thread is about to wait for something else than Python."""
        self._num_at_once = 0
        if len(self._waiting) > MAX_WAITING:
            self.convert()
        elif self._waiting:
            self._notify()

    def convert(self) -> None:
        """Make the text of all that wait. Thread-safe."""
        with self._converting:  # the order of a request's outputs is that in which they are taken
            while self._waiting:
                late, output, stats = self._waiting.popleft()
                late.convert(output, stats)

    def add(self, late: _LateSink, output: RequestOutput, stats: RequestStats) -> None:
        self._waiting.append((late, output, stats))

    def may_convert_at_once(self) -> bool:
        """Whether this output of the step is among the first MAX_AT_ONCE that ask."""
        self._num_at_once += 1
        return self._num_at_once <= MAX_AT_ONCE


class _LateSink:
    """A request's sink. If the text was found to end later, the executor ends the request with its next output."""

    __slots__ = ("_backlog", "_is_done", "_num_added", "_num_converted", "_text")

    def __init__(self, backlog: Backlog, text: TextSink) -> None:
        self._backlog = backlog
        self._text = text
        self._num_added = 0  # written by the executor's thread only
        self._num_converted = 0  # and this under the backlog's lock
        self._is_done = False

    def __call__(self, output: RequestOutput) -> bool:
        if self._is_done:
            return True
        text, stats = self._text, output.request.stats
        if text.may_stop and self._num_added == self._num_converted and self._backlog.may_convert_at_once():
            return text.take(output, stats)
        if text.needs_stats:  # a request that has ended has its last ones
            stats = stats.copy()
        self._num_added += 1
        self._backlog.add(self, output, stats)
        return False

    def convert(self, output: RequestOutput, stats: RequestStats) -> None:
        if not self._is_done:
            try:
                self._is_done = self._text.take(output, stats)
            except Exception:
                log.exception("the output sink of a request failed; the request is cancelled")
                self._is_done = True
        self._num_converted += 1
