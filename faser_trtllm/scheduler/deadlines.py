"""A queue of requests by deadline."""

from __future__ import annotations

import heapq
import itertools
import weakref

from faser_trtllm.core.request import Request

MIN_HEAP_SIZE = 64
"""Smaller heaps are not compacted."""


class Deadlines:
    """A heap of weak references to requests, by deadline. Entries of requests that ended before their deadline are
    dropped when they are most of the heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, weakref.ref[Request]]] = []
        self._numbers = itertools.count()

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline_s is None:
            return
        heapq.heappush(self._heap, (request.deadline_s, next(self._numbers), weakref.ref(request)))

    def compact(self, num_live: int) -> None:
        """Drop requests that have ended if they are more than the num_live others."""
        if len(self._heap) > 2 * num_live + MIN_HEAP_SIZE:
            self._heap = [entry for entry in self._heap if (request := entry[2]()) and not request.is_finished]
            heapq.heapify(self._heap)

    def is_due(self, now_s: float) -> bool:
        """Return True if take() may return a request."""
        return bool(self._heap) and self._heap[0][0] <= now_s

    def take(self, now_s: float) -> list[Request]:
        """Return the requests whose deadlines have passed, each once, in the order of their deadlines."""
        late: list[Request] = []
        while self.is_due(now_s):
            request = heapq.heappop(self._heap)[2]()
            if request is not None and not request.is_finished:
                late.append(request)
        return late
