"""A bounded queue in which clients take turns."""

from __future__ import annotations

from bisect import insort
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue in which clients take turns and a client's newest item comes first, so a burst delays only itself.

    Not thread-safe.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._queues: dict[str, list[tuple[int, T]]] = {}  # in the order of turns; none is empty

    def put(self, client_key: str, number: int, item: T) -> T | None:
        """Add an item. number: higher for newer items.

        If the queue is then over its limit, remove and return the oldest item of the client with the most items.
        """
        insort(self._queues.setdefault(client_key, []), (number, item), key=lambda entry: entry[0])
        if sum(map(len, self._queues.values())) <= self._max_items:
            return None
        longest = max(self._queues, key=lambda key: len(self._queues[key]))
        _, lost = self._queues[longest].pop(0)
        if not self._queues[longest]:
            del self._queues[longest]
        return lost

    def take(self) -> T | None:
        """Remove and return the next item; None if the queue is empty."""
        if not self._queues:
            return None
        client_key = next(iter(self._queues))
        queue = self._queues.pop(client_key)
        _, item = queue.pop()
        if queue:
            self._queues[client_key] = queue
        return item
