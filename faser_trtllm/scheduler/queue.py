"""Requests waiting for a slot: higher priority first, then first come, first served."""

from __future__ import annotations

import heapq

from faser_trtllm.core.request import Request, RequestState

MIN_HEAP_SIZE = 64
"""Smaller heaps are not compacted."""


class WaitingQueue:
    """A preempted request keeps its arrival order, so it comes before later arrivals."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order: dict[str, int] = {}
        self._num_added = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        """Add a request, or put a preempted one back."""
        if request.request_id not in self._order:
            self._order[request.request_id] = self._num_added
            self._num_added += 1
        heapq.heappush(self._heap, (-request.priority, self._order[request.request_id], request))
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """The next request."""
        while self._heap and self._heap[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Remove the request that peek() returned."""
        heapq.heappop(self._heap)
        self._num_waiting -= 1

    def first(self, count: int) -> list[Request]:
        """The next requests, at most count, without removing them."""
        found: list[tuple[float, int, Request]] = []
        while len(found) < count and self.peek() is not None:
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [request for _, _, request in found]

    def take(self, request: Request) -> None:
        """Remove a request anywhere in the queue."""
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)
        self._num_waiting -= 1

    def note_removed(self) -> None:
        """Mark a waiting request as ended; its entry is dropped when it reaches the top, or when half of the heap has
        ended."""
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + MIN_HEAP_SIZE:
            self._heap = [entry for entry in self._heap if entry[2].state is RequestState.WAITING]
            heapq.heapify(self._heap)

    def forget(self, request_id: str) -> None:
        """Forget the arrival order of a request that has ended."""
        self._order.pop(request_id, None)

    def expired(self, now_s: float) -> list[Request]:
        """Waiting requests whose deadline has passed."""
        return [
            request
            for _, _, request in self._heap
            if request.deadline_s is not None and request.deadline_s <= now_s and request.state is RequestState.WAITING
        ]
