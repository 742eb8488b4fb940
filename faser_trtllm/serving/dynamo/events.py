"""Reports cached prefixes and load to Dynamo's router."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("faser.dynamo")

PERIOD_S = 0.5  # between two reports of the load


class CacheEvents:
    """A BlockListener that queues events between start() and close() for a thread that publishes them.

    That thread also calls publish_load every PERIOD_S. Events before start() are dropped.
    """

    def __init__(self, publish_load: Callable[[], None]) -> None:
        self._publish_load = publish_load
        self._events: queue.SimpleQueue[tuple[int, int | None, bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def stored(self, chain_id: int, parent_id: int, token_ids: bytes) -> None:
        if self._thread is not None:
            self._events.put((chain_id, parent_id, token_ids))

    def removed(self, chain_id: int) -> None:
        if self._thread is not None:
            self._events.put((chain_id, None, b""))

    def start(self, publisher: Any) -> None:
        """Start publishing. publisher: Dynamo's KvEventPublisher."""
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="faser-dynamo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the queued events and end the thread; may be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._events.put(None)
            thread.join()

    def _run(self, publisher: Any) -> None:
        next_load_s = time.monotonic()
        while True:
            try:
                if time.monotonic() >= next_load_s:
                    next_load_s = time.monotonic() + PERIOD_S
                    self._publish_load()
                event = self._events.get(timeout=PERIOD_S)
                if event is None:
                    return
                _publish(publisher, *event)
            except queue.Empty:
                continue
            except Exception:
                log.exception("cache events or load could not be published to the router")


def _publish(publisher: Any, chain_id: int, parent_id: int | None, token_ids: bytes) -> None:
    """Publish an event. parent_id is None for a removed block, and 0 for a block without a prefix."""
    if parent_id is None:
        publisher.publish_removed([chain_id])
        return
    tokens = np.frombuffer(token_ids, np.int32).tolist()
    publisher.publish_stored(tokens, [len(tokens)], [chain_id], parent_id or None)
