"""Keep Ctrl-C during native work, since native code swallows exceptions in its Python callbacks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_kept = threading.Event()


@contextlib.contextmanager
def kept_interrupts() -> Iterator[None]:
    """Make sure that Ctrl-C within the block raises KeyboardInterrupt, at the end of the block at the latest.

    TensorRT swallows the exception in its callbacks (log messages); raise_kept() or the end of the block raises it
    again. Does nothing outside the main thread, which alone gets signals.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def keep(signum: int, frame: FrameType | None) -> None:
        _kept.set()
        previous(signum, frame)

    _kept.clear()
    signal.signal(signal.SIGINT, keep)
    try:
        yield
        raise_kept()
    finally:
        signal.signal(signal.SIGINT, previous)
        _kept.clear()


def raise_kept() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed in the open block."""
    if _kept.is_set():
        raise KeyboardInterrupt
