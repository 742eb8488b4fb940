"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""For what takes a moment: only code that is wrong takes so long, also on a machine that is busy."""


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S, poll_s: float = 0.02) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited for {timeout_s:g} s"
        time.sleep(poll_s)
