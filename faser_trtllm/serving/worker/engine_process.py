"""The engine child: `python -m faser_trtllm.serving.worker.engine_process`, started by the supervisor.

Owns the executor. Reads requests from its parent's socket and from any other process that connects to --listen, and
writes chunks back. Exits when the parent's socket closes, when the parent dies, when any of its threads fails, or after
a drain (SIGTERM or a Drain message).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from faser_trtllm.config import ServiceConfig, parse
from faser_trtllm.core.request import FinishReason
from faser_trtllm.errors import FaserError
from faser_trtllm.executor.stats import Progress, StepWatcher
from faser_trtllm.serving.observe.spans import open_span_recorder
from faser_trtllm.serving.text.request import TextOutput
from faser_trtllm.serving.text.service import TextGenerator, TokenExecutor
from faser_trtllm.serving.worker import messages
from faser_trtllm.serving.worker.messages import Chunk, Connection, ConnectionClosedError, Failed
from faser_trtllm.serving.worker.process import die_with_parent

log = logging.getLogger("faser.engine")

SHUTTING_DOWN = "the server is shutting down; send the request to another one"

# Threads that read requests must not hold up the executor's thread for Python's default switch interval of 5 ms.
SWITCH_INTERVAL_S = 0.0005


class ServedExecutor(TokenExecutor, Protocol):
    max_draft_len: int

    def start(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def progress(self) -> Progress: ...
    def watch(self, watcher: StepWatcher) -> None: ...


Opener = Callable[[Path, ServiceConfig], tuple[ServedExecutor, Any]]
"""Opens an engine directory; returns the executor, not yet started, and the tokenizer."""


class EngineServer:
    """Serves the parent's connection; run() returns when that closes. accept() serves further connections."""

    def __init__(
        self,
        executor: ServedExecutor,
        tokenizer: Any,
        connection: Connection,
        drain_timeout_s: float,
        stream_interval: int = 1,
    ) -> None:
        self._executor = executor
        self._generator = TextGenerator(executor, tokenizer, stream_interval)
        self._drain_timeout_s = drain_timeout_s
        self._session_ids = itertools.count()
        self._parent = self._new_session(connection)
        self._sessions = {self._parent}
        self._lock = threading.Lock()
        self.draining = threading.Event()

    def run(self) -> None:
        """Handle the parent's messages until it hangs up."""
        self._parent.run()

    def accept(self, listener: socket.socket) -> None:
        """Serve every connection in a new thread. Never returns; run it on its own thread."""
        while True:
            sock, _ = listener.accept()
            if self.draining.is_set():
                sock.close()
                continue
            session = self._new_session(Connection(sock))
            with self._lock:
                self._sessions.add(session)
            threading.Thread(target=self._serve, args=(session,), name="faser-session", daemon=True).start()

    def drain(self) -> None:
        """Refuse new requests, give the running ones drain_timeout_s, fail the rest and hang up."""
        if self.draining.is_set():
            return
        self.draining.set()
        threading.Thread(target=self._drain, name="faser-drain", daemon=True).start()

    def _new_session(self, connection: Connection) -> _Session:
        return _Session(self, next(self._session_ids), self._executor, self._generator, connection)

    def _serve(self, session: _Session) -> None:
        with contextlib.suppress(ConnectionClosedError):
            session.run()
        with self._lock:
            self._sessions.discard(session)
        session.close()

    def _drain(self) -> None:
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.announce_drain()
        self._executor.drain(self._drain_timeout_s)
        for session in sessions:
            session.end_drain()


class _Session:
    """One connection and its requests. Request ids in the executor are prefixed with the session id."""

    def __init__(
        self,
        server: EngineServer,
        session_id: int,
        executor: ServedExecutor,
        generator: TextGenerator,
        connection: Connection,
    ) -> None:
        self._server = server
        self._prefix = f"{session_id}-"
        self._executor = executor
        self._generator = generator
        self._connection = connection
        self._open: set[int] = set()
        self._stopped: set[int] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Handle messages until the connection closes."""
        executor = self._executor
        self._connection.send(messages.Ready(executor.vocab_size, executor.max_seq_len, executor.max_draft_len))
        try:
            while True:
                for message in self._connection.receive():
                    self._handle(message)
        except ConnectionClosedError:
            return

    def close(self) -> None:
        """Cancel open requests; call it after run() has returned."""
        with self._lock:
            left = list(self._open)
        for request_id in left:
            self._generator.cancel(self._name(request_id))
        self._connection.close()

    def announce_drain(self) -> None:
        with contextlib.suppress(ConnectionClosedError):
            self._connection.send(messages.Draining())

    def end_drain(self) -> None:
        """Fail the requests that are still open and hang up."""
        with contextlib.suppress(ConnectionClosedError):
            with self._lock:
                left = list(self._open)
            for request_id in left:
                self._fail(request_id, "UNAVAILABLE", SHUTTING_DOWN)
            self._connection.flush(1.0)
        self._connection.shutdown()

    def _name(self, request_id: int) -> str:
        return f"{self._prefix}{request_id}"

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.Submit):
            self._submit(message)
        elif isinstance(message, messages.Cancel):
            self._generator.cancel(self._name(message.id))
        elif isinstance(message, messages.Stop):
            with self._lock:
                if message.id in self._open:
                    self._stopped.add(message.id)
            self._generator.cancel(self._name(message.id))
        elif isinstance(message, messages.Ping):
            self._connection.send(messages.Pong(self._executor.stats(), self._executor.progress()))
        elif isinstance(message, messages.Drain):
            self._server.drain()

    def _submit(self, message: messages.Submit) -> None:
        with self._lock:
            self._open.add(message.id)
        try:
            if self._server.draining.is_set():
                self._fail(message.id, "UNAVAILABLE", SHUTTING_DOWN)
                return
            name = self._name(message.id)
            self._generator.submit(name, message.request, lambda output: self._send(message.id, output))
        except FaserError as error:
            self._fail(message.id, error.code, str(error))
        except ConnectionClosedError:
            raise
        except Exception as error:
            log.exception("a request could not be submitted")
            self._fail(
                message.id,
                "INTERNAL",
                f"the request failed with {type(error).__name__}; see the server's log",
            )

    def _send(self, request_id: int, output: TextOutput) -> None:
        if output.is_final:
            with self._lock:
                if request_id not in self._open:
                    return
                self._open.discard(request_id)
                was_stopped = request_id in self._stopped
                self._stopped.discard(request_id)
        try:
            self._connection.send(message_of(request_id, output, output.is_final and was_stopped))
        except ConnectionClosedError:
            self._generator.cancel(self._name(request_id))

    def _fail(self, request_id: int, code: str, message: str) -> None:
        with self._lock:
            if request_id not in self._open:
                return
            self._open.discard(request_id)
        self._connection.send(messages.Failed(request_id, code, message))


def message_of(request_id: int, output: TextOutput, was_stopped: bool) -> Chunk | Failed:
    """An output as an error or a chunk. was_stopped: a stop request ended it, which is no error."""
    if output.finish_reason == FinishReason.ERROR.value:
        return messages.Failed(request_id, output.error_code, output.error or "the engine failed on this request")
    if output.finish_reason == FinishReason.CANCELLED.value and not was_stopped:
        return messages.Failed(request_id, "CANCELLED", "the request was cancelled")
    if output.finish_reason == FinishReason.TIMEOUT.value and not (
        output.statistics and output.statistics.num_output_tokens
    ):
        return messages.Failed(request_id, "UNAVAILABLE", output.error or "the request timed out")
    return messages.Chunk(
        id=request_id,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        statistics=output.statistics,
        log_probs=output.log_probs,
        logits=output.logits,
        is_draft=output.is_draft,
    )


def open_listener(path: Path) -> socket.socket:
    """Listen on a socket at path, replacing a socket that a dead process left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen()
    return listener


def open_engine_dir(engine_dir: Path, config: ServiceConfig) -> tuple[ServedExecutor, Any]:
    """The executor and tokenizer of an engine directory; raises FaserError."""
    from faser_trtllm.builder.engine_dir import EngineDir
    from faser_trtllm.executor.factory import open_executor
    from faser_trtllm.models.tokenizer import Tokenizer
    from faser_trtllm.profiling.ensure import ensure_profile
    from faser_trtllm.testing.faults import faults_of_environment, with_faults

    faults = faults_of_environment()
    tokenizer = Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)
    ensure_profile(engine_dir, config)
    executor = open_executor(
        engine_dir,
        config,
        wrap_engine=lambda engine, role: with_faults(engine, role, faults),
        draft_timeout_ms=config.draft_timeout_ms,
    )
    return executor, tokenizer


def main(argv: list[str] | None = None, opener: Opener = open_engine_dir) -> None:
    """Serve until the connection closes; never returns."""
    parser = argparse.ArgumentParser(description="The engine process behind a Triton model; its supervisor starts it.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent_pid", type=int, required=True)
    parser.add_argument("--listen", type=Path, help="socket to listen on, in a directory of this user only")
    parser.add_argument("--config", required=True, help="the service configuration as JSON")
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    threading.excepthook = die_of_thread
    faulthandler.enable()  # after a crash in native code the log has the stacks of all threads
    connection = Connection(socket.socket(fileno=args.fd))
    signal.signal(signal.SIGTERM, lambda signum, frame: _end_before_start(connection))
    config: ServiceConfig = parse(ServiceConfig, msgspec.json.decode(args.config))
    try:
        spans = open_span_recorder(config.otlp_traces_endpoint)
        executor, tokenizer = opener(Path(config.engine_dir or ""), config)
    except FaserError as error:
        _die_of_start(connection, error.code, str(error))
    except Exception as error:
        log.exception("the engines could not be opened")
        _die_of_start(connection, "INTERNAL", f"the engines could not be opened: {type(error).__name__}: {error}")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    if spans is not None:
        executor.watch(spans)
    executor.start()
    server = EngineServer(executor, tokenizer, connection, config.drain_timeout_s, config.stream_interval)
    signal.signal(signal.SIGTERM, lambda signum, frame: server.drain())
    if args.listen is not None:
        listener = open_listener(args.listen)
        threading.Thread(target=server.accept, args=(listener,), name="faser-listener", daemon=True).start()
    server.run()
    if spans is not None:
        spans.close()
    # The kernel frees the memory. A regular exit could hang on engine threads that still run.
    os._exit(0)


def _die_of_start(connection: Connection, code: str, message: str) -> None:
    connection.send(messages.Failed(None, code, message))
    connection.flush(1.0)
    os._exit(1)


def _end_before_start(connection: Connection) -> None:
    connection.send(messages.Draining())
    os._exit(0)


def die_of_thread(failure: threading.ExceptHookArgs) -> None:
    """A threading.excepthook: a process with a dead thread is worse than none."""
    log.error("thread %s failed", failure.thread.name if failure.thread else "?", exc_info=failure.exc_value)
    os._exit(70)


if __name__ == "__main__":
    main()
