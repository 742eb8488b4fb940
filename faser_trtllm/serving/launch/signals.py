"""Signals of server processes, handled on a thread of their own."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

from faser_trtllm.serving.launch.process import REPLACE_DRAFT


@contextlib.contextmanager
def handle_signals(actions: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Call actions[signum] for each signal that arrives within the block, one after the other, on one thread.

    Python runs a handler between two instructions of the main thread. If that thread is in Event.wait() and holds the
    event's lock, a handler that calls Event.set() waits for the lock forever. SimpleQueue.put() is reentrant.
    """
    arrived: SimpleQueue[int | None] = SimpleQueue()

    def work() -> None:
        while (signum := arrived.get()) is not None:
            actions[signum]()

    thread = threading.Thread(target=work, name="faser-signals", daemon=True)
    thread.start()
    previous = {signum: signal.signal(signum, lambda signum, _: arrived.put(signum)) for signum in actions}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        arrived.put(None)
        thread.join()


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event, hurry: threading.Event, draft_changed: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM, SIGINT and SIGHUP (not under nohup), `hurry` on a second one, draft_changed on SIGUSR1."""

    def on_stop() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    signums: list[int] = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    with handle_signals({**dict.fromkeys(signums, on_stop), REPLACE_DRAFT: draft_changed.set}):
        yield
