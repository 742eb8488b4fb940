"""Keeps an engine child running and routes requests to it.

One thread starts the child, reads its messages and restarts it after a crash, so every callback runs on that thread.
The kernel kills the child when that thread ends for any reason.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.worker import messages
from faser_trtllm.serving.worker.messages import Chunk, Connection, ConnectionClosedError, Failed

log = logging.getLogger("faser.supervisor")

OnEvent = Callable[[Chunk | Failed], None]
"""Receives the chunks of a request on the supervisor's thread; the last is a final Chunk or a Failed."""

ENGINE_COMMAND = (sys.executable or "python3", "-m", "faser_trtllm.serving.worker.engine_process")
PARENT_OPTION = "--parent_pid="  # distinguishes an engine child from other processes
PING_PERIOD_S = 1.0
SLOW_STEPS = 4.0  # a step counts as hung only after this multiple of a slow step's time
STEADY_S = 10.0  # a child that ran this long had started well: the back-off is reset
_POLL_S = 0.25


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"  # crashed, will be restarted
    DRAINING = "draining"  # refuses new requests, will exit and is not restarted
    CLOSED = "closed"


class Supervisor:
    """start() starts the child; submit() and cancel() may be called from any thread."""

    def __init__(
        self,
        config: ServiceConfig,
        command: Sequence[str] = ENGINE_COMMAND,
        on_stats: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        """on_stats: receives stats() about once a second, on the supervisor's thread."""
        self._config = config
        self._on_stats = on_stats
        self._command = tuple(command)
        self._changed = threading.Condition()
        self._state = EngineState.STARTING
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: messages.Ready | None = None
        self._events: dict[int, OnEvent] = {}
        self._ids = itertools.count(1)
        self._start_error: FaserError | None = None
        self._stats: dict[str, float] = {}
        self._num_restarts = 0
        self._moved_s = 0.0  # time.monotonic() when the engine last made progress, as far as is known
        self._slow_step_s = 0.0  # duration of a slow step of the engine
        self._stalls = False  # the process answers but its executor makes no progress
        self._retry_at_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faser-supervisor", daemon=True)

    def start(self) -> messages.Ready:
        """Start the child and wait until it has loaded its engines; raises FaserError if that fails."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._start_error or self._state is EngineState.CLOSED,
                self._config.startup_timeout_s,
            )
            if self._ready is not None:
                return self._ready
            error = self._start_error or UnavailableError(
                f"the engine was not ready within startup_timeout_s {self._config.startup_timeout_s:g}; raise it"
            )
        self.close()
        raise error

    def submit(self, request: TextRequest, on_event: OnEvent) -> int:
        """Send a request to the child and return its id; raises UnavailableError while no child accepts requests."""
        request_id = next(self._ids)
        with self._changed:
            self._check_available()
            connection = self._connection
            assert connection is not None
            self._events[request_id] = on_event
        try:
            connection.send(messages.Submit(request_id, request))
        except ConnectionClosedError:
            with self._changed:
                known = self._events.pop(request_id, None)
            if known is not None:
                raise self._unavailable() from None
        except FaserError:
            with self._changed:
                self._events.pop(request_id, None)
            raise
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ask the child to end a request, which still ends with an event. Unknown ids are ignored."""
        with self._changed:
            connection = self._connection if request_id in self._events else None
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):
                connection.send(messages.Cancel(request_id))

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_ready(self) -> bool:
        """The child has loaded its engines and has not hung for the health timeout."""
        return self._state is EngineState.READY and self._hung_s() < self._health_timeout_s()

    @property
    def num_open(self) -> int:
        return len(self._events)

    def stats(self) -> dict[str, float]:
        """The executor's stats at the last pong, and num_restarts."""
        return self._stats | {"num_restarts": self._num_restarts}

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._process.pid if self._process is not None else None

    def drain(self) -> None:
        """Tell the child to finish its requests and exit; it is not restarted."""
        with self._changed:
            connection = self._connection
            self._state = EngineState.DRAINING
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):
                connection.send(messages.Drain())

    def close(self) -> None:
        """End the child and the thread; open requests fail as UNAVAILABLE."""
        self._closing.set()
        with self._changed:
            connection = self._connection
        if connection is not None:
            connection.shutdown()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._set_state(EngineState.CLOSED)

    def _check_available(self) -> None:
        if self._connection is None or not self.is_ready:
            raise self._unavailable()

    def _unavailable(self) -> UnavailableError:
        if self._state in (EngineState.DRAINING, EngineState.CLOSED):
            return UnavailableError("the server is shutting down; send the request to another one")
        hung_s = self._hung_s()
        if self._state is EngineState.READY and hung_s >= self._health_timeout_s():
            if self._stalls:
                return UnavailableError(f"the engine has been in one step for {hung_s:.0f} s; try again later")
            return UnavailableError(f"the engine process has not answered for {hung_s:.0f} s; try again later")
        retry_s = max(1, round(self._retry_at_s - time.monotonic()) + 1)
        return UnavailableError(f"the engine process is starting again after a crash; try again in {retry_s} s")

    def _hung_s(self) -> float:
        """Seconds since the child last answered with an executor that was making progress."""
        return time.monotonic() - self._moved_s

    def _health_timeout_s(self) -> float:
        """health_timeout_s, or more if the engine's steps are known to be slow, up to hang_timeout_s."""
        config = self._config
        return max(config.health_timeout_s, min(SLOW_STEPS * self._slow_step_s, config.hang_timeout_s))

    def _set_state(self, state: EngineState) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _run(self) -> None:
        backoff_s = self._config.restart_backoff_s
        while not self._closing.is_set():
            started_s = time.monotonic()
            try:
                self._serve_child()
            except Exception:
                log.exception("the supervisor failed while the engine process ran")
            finally:
                self._end_child()
            first_start_failed = self._ready is None
            if self._closing.is_set() or self._state is EngineState.DRAINING or first_start_failed:
                break
            if time.monotonic() - started_s > STEADY_S:
                backoff_s = self._config.restart_backoff_s
            self._num_restarts += 1
            self._closing.wait(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.restart_backoff_max_s)
        with self._changed:
            if self._ready is None and self._start_error is None:
                self._start_error = UnavailableError(
                    "the engine process ended before it was ready; see the server's log"
                )
            if self._state is not EngineState.DRAINING:
                self._state = EngineState.CLOSED
            self._changed.notify_all()

    def _serve_child(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        connection = Connection(ours)
        with self._changed:
            self._connection = connection
        with theirs:
            self._process = subprocess.Popen(
                [
                    *self._command,
                    f"--fd={theirs.fileno()}",
                    f"{PARENT_OPTION}{os.getpid()}",
                    f"--config={self._config.model_dump_json()}",
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        with contextlib.suppress(ConnectionClosedError):
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        next_ping_s, started_s = 0.0, time.monotonic()
        while not self._closing.is_set():
            now_s = time.monotonic()
            if self._process is not None and self._is_stuck(now_s - started_s):
                return
            if now_s >= next_ping_s and self._state is EngineState.READY:
                connection.send(messages.Ping())
                next_ping_s = now_s + PING_PERIOD_S
            for message in connection.receive(_POLL_S):
                self._handle(message)

    def _is_stuck(self, age_s: float) -> bool:
        """Whether to kill a child of this age, because it hangs or does not finish starting."""
        if self._state is EngineState.READY and self._hung_s() >= self._config.hang_timeout_s:
            log.error("the engine process has hung for %.0f s and is restarted", self._hung_s())
            return True
        if self._state is EngineState.DOWN and age_s >= self._config.startup_timeout_s:
            log.error("the engine process was not ready within %.0f s and is restarted", age_s)
            return True
        return False

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, Chunk | Failed) and message.id is not None:
            self._deliver(message.id, message)
        elif isinstance(message, messages.Pong):
            stalled_s = message.progress.stalled_s
            self._moved_s, self._stalls = time.monotonic() - stalled_s, stalled_s >= PING_PERIOD_S
            self._slow_step_s = message.progress.slow_step_s
            self._stats = message.stats
            if self._on_stats is not None:
                self._on_stats(self.stats())
        elif isinstance(message, messages.Ready):
            with self._changed:
                self._ready = message
                self._moved_s, self._stalls = time.monotonic(), False
            self._set_state(EngineState.READY)
        elif isinstance(message, messages.Draining):
            self._set_state(EngineState.DRAINING)
        elif isinstance(message, Failed):
            log.error("the engine process cannot start: %s", message.message)
            with self._changed:
                self._start_error = _error_of(message)

    def _deliver(self, request_id: int, event: Chunk | Failed) -> None:
        is_final = isinstance(event, Failed) or event.is_final
        with self._changed:
            on_event = self._events.pop(request_id, None) if is_final else self._events.get(request_id)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:
                log.exception("delivering a response failed")

    def _end_child(self) -> None:
        """Reap the child and fail all open requests."""
        with self._changed:
            connection, self._connection = self._connection, None
            if self._state is not EngineState.DRAINING:
                self._state = EngineState.DOWN
            self._retry_at_s = time.monotonic() + self._config.restart_backoff_s
            left = list(self._events)
        if self._state is EngineState.DRAINING or self._closing.is_set():
            message = "the server is shutting down; send the request to another one"
        else:
            message = "the engine process stopped while it served the request; send the request again"
        for request_id in left:
            self._deliver(request_id, Failed(request_id, "UNAVAILABLE", message))
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            if self._state is EngineState.DRAINING:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            process.kill()
            returncode = process.wait()
            if self._state is EngineState.DOWN and not self._closing.is_set():
                log.error("the engine process ended with status %d", returncode)


def _error_of(message: Failed) -> FaserError:
    error = FaserError(message.message)
    error.code = message.code
    return error
