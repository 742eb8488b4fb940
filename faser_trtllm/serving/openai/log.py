"""The log of the OpenAI server, limited so that no client can fill it."""

from __future__ import annotations

import logging
import sys
import threading
import time

_PERIOD_S = 60.0
_MAX_KINDS = 1000


class Sparse(logging.Filter):
    """Passes one record per minute and kind. A kind is a logger, a level and the unformatted message's first line."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # time of the last record, number held since

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0])
        now_s = time.monotonic()
        with self._lock:
            passed_s, num_held = self._kinds.get(kind, (-_PERIOD_S, 0))
            if now_s - passed_s < _PERIOD_S:
                self._kinds[kind] = passed_s, num_held + 1
                return False
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = now_s, 0
        if num_held:
            record.msg, record.args = f"{record.getMessage()} ({num_held} more of this kind)", None
        return True


def set_up_log() -> None:
    """Send the warnings of all loggers to stderr, at most one per minute and kind."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Sparse())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
