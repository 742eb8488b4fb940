"""Successive kills and pauses of the service's processes in the first part of a soak."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.soak.ledger import Ledger
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.watch import ENGINE, LAUNCHER, SERVER, ServiceProcesses

SHORT_PAUSE_S = 8.0  # of one process, shorter than hang_timeout_s
_LAST_S = 15.0  # time without events at the end, for recovery


@dataclass(frozen=True)
class Event:
    """An event, at_s after the start of the load. what: "kill" or "pause"; roles: of the processes, all at once."""

    at_s: float
    what: str
    roles: tuple[str, ...]
    seconds: float = 0.0


def plan_events(options: SoakOptions) -> list[Event]:
    """Return kills of the engine process every kill_period_s, with kills of the server and pauses between them.

    The long pause stops all processes, as if the machine stopped, and must end nothing.
    """
    end_s = options.storm_s - _LAST_S
    events, half_s = [], options.kill_period_s / 2
    if options.kill_period_s > 0:
        number = 1
        while number * options.kill_period_s < end_s:
            events.append(Event(number * options.kill_period_s, "kill", (ENGINE,)))
            number += 1
    if options.kill_server and end_s > 0:
        events += [Event(share * end_s + half_s / 4, "kill", (SERVER,)) for share in (0.25, 0.55)]
    if options.pause_s > 0 and end_s > 2 * (options.pause_s + 2 * SHORT_PAUSE_S):
        events.append(Event(0.1 * end_s, "pause", (ENGINE,), SHORT_PAUSE_S))
        events.append(Event(0.2 * end_s, "pause", (SERVER,), SHORT_PAUSE_S))
        events.append(Event(0.4 * end_s, "pause", (LAUNCHER, SERVER, ENGINE), options.pause_s))
    return sorted(events, key=lambda event: event.at_s)


class Storm:
    """A runner of events in one thread, which records kills and ended pauses in the ledger."""

    def __init__(
        self, events: list[Event], processes: ServiceProcesses, ledger: Ledger, log: Callable[[str], None]
    ) -> None:
        self._events = list(events)
        self._processes = processes
        self._ledger = ledger
        self._log = log
        self._begun_s = time.monotonic()

    def step(self, stop: threading.Event) -> None:
        """Run the next event if it is due and the service has recovered from the last kill."""
        now_s = time.monotonic() - self._begun_s
        if not self._events or now_s < self._events[0].at_s or not self._ledger.has_recovered():
            return
        pids = self._processes.pids()
        event = self._events[0]
        if not all(role in pids for role in event.roles):
            return
        self._events.pop(0)
        self._log(f"{now_s:.0f} s: {event.what} of {', '.join(event.roles)}")
        if event.what == "kill":
            self._ledger.kill(pids[event.roles[0]], event.roles[0])
            return
        begun_s = time.monotonic()
        for role in event.roles:
            os.kill(pids[role], signal.SIGSTOP)
        stop.wait(event.seconds)
        for role in reversed(event.roles):
            os.kill(pids[role], signal.SIGCONT)
        self._ledger.pauses.append((begun_s, time.monotonic()))
