"""The progress bar of commands that take a while."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_PERIOD_S = 10.0


class ProgressBar:
    """Shows a rich bar on a terminal, and elsewhere prints a line to stderr every LINE_PERIOD_S."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._said_s = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __call__(self, what: str, done: int, total: int, phase: str = "") -> None:
        description = f"{what}, {phase}" if phase else what
        if self._bar is None:
            now_s = time.monotonic()
            if now_s - self._said_s >= LINE_PERIOD_S:
                self._said_s = now_s
                print(f"{description}: {done} of {total}", file=sys.stderr, flush=True)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total, description=description)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
