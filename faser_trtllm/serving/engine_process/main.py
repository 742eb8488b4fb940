"""The engine process of the Triton backend `faser`: `python -m faser_trtllm.serving.engine_process.main`.

The backend (plugins/triton) starts this process, forwards the requests of all models to it, and turns its frames into
responses. The process exits when the socket closes, when the server dies, when one of its threads fails, or after a
drain (SIGTERM).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from faser_trtllm import __version__
from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.executor.executor import Executor
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.client_rules import ClientRules
from faser_trtllm.serving.engine_process.connection import MAX_REST_S, Connection
from faser_trtllm.serving.engine_process.intake import Intake, Mark
from faser_trtllm.serving.engine_process.memory import BYTES_PER_BODY_BYTE, RequestMemory, sequence_bytes
from faser_trtllm.serving.engine_process.metrics import MetricChanges, ModelMetrics
from faser_trtllm.serving.engine_process.model import ModelConfig, ServedModel, load_model_config, note_start_error
from faser_trtllm.serving.engine_process.open_request import OpenRequest
from faser_trtllm.serving.engine_process.opening import (
    SHUTTING_DOWN,
    SWITCH_INTERVAL_S,
    Opener,
    die_of_thread,
    open_engine_dir,
)
from faser_trtllm.serving.engine_process.outbox import Outbox
from faser_trtllm.serving.engine_process.pauses import Pauses
from faser_trtllm.serving.engine_process.wire import (
    Body,
    FromBackend,
    OpenFrame,
    OpenStatus,
    RequestFrame,
    ToBackend,
    WireError,
)
from faser_trtllm.serving.launch.process import REPLACE_DRAFT, die_with_parent
from faser_trtllm.serving.launch.signals import handle_signals
from faser_trtllm.serving.observe.spans import SpanRecorder, open_span_recorder
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import contract_of
from faser_trtllm.serving.triton.reply import check_log_probs
from faser_trtllm.serving.triton.request import check_request_id

log = logging.getLogger("faser.engine")

_SETTINGS = struct.Struct("<I6d")
_PONG = struct.Struct("<2d")
_HELLO = struct.Struct("<2I")
_HANDLE = struct.Struct("<Q")
_OPENED = struct.Struct("<IBB")


class EngineServer:
    """Serves one connection with one engine: the engine directory of the first model that opens, for all models."""

    def __init__(self, connection: Connection, opener: Opener) -> None:
        self._connection = connection
        self._opener = opener
        self._changes = MetricChanges(connection)
        self._outbox = Outbox(connection.notify)
        self._num_restarts = 0.0
        self._backend_release = "an older release"  # older backends do not send their release
        self._config: ServiceConfig | None = None
        self._executor: Executor | None = None
        self._generator: TextGenerator | None = None
        self._spans: SpanRecorder | None = None
        self._models: dict[int, ServedModel] = {}
        self._unopened: dict[int, str] = {}  # model -> why it is not open here although Triton has loaded it
        self._publisher: ServedModel | None = None  # publishes the executor's counts, even after it was unloaded
        self._requests: dict[int, list[OpenRequest]] = {}  # handle -> sequences
        self._is_draining = False
        self._pauses = Pauses()
        self._intake = Intake(self._request)
        self._memory = RequestMemory(ServiceConfig().max_queue_bytes)

    def run(self) -> None:
        """Handle frames until the backend hangs up."""
        threading.Thread(target=self._write, name="faser-writer", daemon=True).start()
        try:
            while True:
                for kind, body in self._connection.receive():
                    self._handle(kind, body)
        except (EOFError, ConnectionError):
            pass  # the backend hung up
        except OSError as error:
            log.error("nothing more can be read from the Triton backend: %s", error)

    def drain(self) -> None:
        """Start to drain: refuse new requests, give running ones drain_timeout_s, fail the rest, then close."""
        if not self._is_draining:
            self._is_draining = True
            threading.Thread(target=self._drain, name="faser-drain", daemon=True).start()

    def replace_draft(self) -> None:
        """Replace the draft engine with the one that is now in the engine directory, on another thread."""
        threading.Thread(target=self._replace_draft, name="faser-draft-opener", daemon=True).start()

    def close(self) -> None:
        """Export the remaining spans; call it after run() has returned."""
        if self._spans is not None:
            self._spans.close()

    def _drain(self) -> None:
        self._connection.send(ToBackend.DRAINING)
        if self._executor is not None and self._config is not None:
            self._executor.drain(self._config.drain_timeout_s)
            for sequences in list(self._requests.values()):
                for request in sequences[:1]:
                    request.fail(UnavailableError(SHUTTING_DOWN))
        self._connection.flush(1.0)
        self._connection.close()

    def _replace_draft(self) -> None:
        if self._executor is None or self._config is None:
            return  # the engine opens later, with the draft of that time
        engine_dir = Path(self._config.engine_dir or "")
        try:
            self._executor.replace_draft(engine_dir).result()
            log.warning("the draft of %s has replaced the previous one", engine_dir)
        except Exception as error:
            log.error("the draft was not replaced: %s", error, exc_info=not isinstance(error, FaserError))

    def _write(self) -> None:
        self._connection.run_writer(self._outbox.take)

    def _handle(self, kind: FromBackend, body: Body) -> None:
        if kind is FromBackend.REQUEST:
            self._take(wire.read_request(body))
        elif kind is FromBackend.CANCEL:
            (handle,) = body.numbers(_HANDLE)
            if not self._intake.cancel(handle):
                self._cancel(handle)
        elif kind is FromBackend.PING:
            self._pong()
        elif kind is FromBackend.OPEN:
            self._open(wire.read_open(body))
        elif kind is FromBackend.CLOSE:
            self._close(body.u32())
        elif kind is FromBackend.HELLO:
            version, num_starts = body.numbers(_HELLO)
            # A process only counts its own start, since Triton keeps the counts of earlier processes.
            self._num_restarts = float(num_starts > 0)
            if body.num_left:
                self._backend_release = body.text()
            if version != wire.VERSION:
                self._send_settings(ServiceConfig())

    def _take(self, frame: RequestFrame) -> None:
        """Answer a stop at once, whatever waits, and queue other requests."""
        try:
            if frame.is_stop:
                self._stop(frame)
                return
            self._memory.take(frame.handle, BYTES_PER_BODY_BYTE * frame.num_bytes, frame.client_key)
        except FaserError as error:
            self._refuse(frame, error)
        else:
            self._intake.put(frame)

    def _model_of(self, frame: RequestFrame) -> ServedModel:
        """Return the model of a frame; raise UnavailableError if it is not open, or InvalidArgumentError."""
        check_request_id(frame.request_id)
        model = self._models.get(frame.model)
        if model is None:  # the backend keeps the models of the previous engine process
            why = self._unopened.get(frame.model, "it is not known here")
            raise UnavailableError(
                f"the model did not open when the engine process started again: {why}; correct that and load it again"
            )
        return model

    def _cancel(self, handle: int) -> None:
        for request in list(self._requests.get(handle, ())):
            request.cancel()

    def _request(self, frame: RequestFrame) -> None:
        try:
            model = self._model_of(frame)
            self._submit(frame, model, frame.tensors(model.check_input))
        except FaserError as error:
            self._refuse(frame, error)
        except Exception as error:
            log.exception("a request could not be read")
            self._refuse(frame, FaserError(f"the request could not be read: {type(error).__name__}"))
        if frame.handle not in self._requests:
            self._memory.release(frame.handle)
        mark = self._intake.take_mark(frame.handle)
        if mark is not None:
            for request in list(self._requests.get(frame.handle, ())):
                request.cancel() if mark is Mark.CANCELLED else request.stop()

    def _submit(self, frame: RequestFrame, model: ServedModel, tensors: wire.Tensors) -> None:
        """Start all sequences of a request or none."""
        if self._is_draining:
            raise UnavailableError(SHUTTING_DOWN)
        assert self._generator is not None, "it was opened before its models"
        executor = self._executor
        assert executor is not None
        sequences: list[OpenRequest] = []
        prepared, parts = None, model.parse(tensors, frame.client_key)
        for part in parts:
            prepared = self._generator.prepare(part.request, like=prepared, num_sequences=len(parts))
            prompt_len = len(prepared.prompt)
            num_output = min(prepared.params.max_tokens, executor.max_seq_len - prompt_len)
            check_log_probs(model.contract, part, num_output)
            num_bytes = sequence_bytes(prepared.params, prompt_len, num_output, executor.vocab_size)
            self._memory.take(frame.handle, num_bytes, frame.client_key)
            sequences.append(OpenRequest(prepared, part, frame, model, sequences, self._outbox, self._forget))
        self._requests[frame.handle] = sequences
        for request in list(sequences):
            try:
                self._generator.start(request.id, request.prepared, request, request.fail, frame.arrived_s)
            except FaserError as error:  # fail() ends the other sequences too
                request.fail(error)
                break
            except Exception as error:
                log.exception("a request could not be started")
                request.fail(FaserError(f"the request could not be started: {type(error).__name__}"))
                break

    def _forget(self, handle: int) -> None:
        del self._requests[handle]
        self._memory.release(handle)

    def _stop(self, frame: RequestFrame) -> None:
        """End the requests of this client and id with the output that they have so far."""
        model = self._model_of(frame)
        model.rules.check_stop(frame.request_id, frame.client_key)
        self._intake.stop(frame.model, frame.client_id)
        for sequences in list(self._requests.values()):
            for request in list(sequences):
                if request.model is model and request.client_id == frame.client_id:
                    request.stop()
        # A model that is not decoupled must send exactly one response, so the flag alone is an error.
        answer = wire.final_flag(frame.handle) if model.is_decoupled else wire.response(frame.handle, (), True)
        self._connection.send(ToBackend.RESPONSES, answer)

    def _refuse(self, frame: RequestFrame, error: FaserError) -> None:
        model, names = self._models.get(frame.model), {}
        if model is not None:
            names = model.contract.names
            model.metrics.ended(None, error)
        self._connection.send(ToBackend.RESPONSES, wire.error_response(frame.handle, error, names))

    def _pong(self) -> None:
        executor = self._executor
        if executor is None or self._generator is None:
            return
        if not self._requests:
            self._generator.release_guides()
        self._memory.trim()
        progress, pauses = executor.progress(), self._pauses
        self._connection.send(ToBackend.PONG, _PONG.pack(pauses.without(progress.stalled_s), progress.slow_step_s))
        self._publish(executor.stats() | {"num_restarts": self._num_restarts})

    def _publish(self, stats: Mapping[str, float] | None = None) -> None:
        """Publish the metrics of all models, including the executor's counts if its stats are given."""
        models = {model.number: model for model in self._models.values()}
        if self._publisher is not None:
            models[self._publisher.number] = self._publisher
        for model in models.values():
            model.metrics.publish(not self._is_draining, stats if model is self._publisher else None)
        self._changes.flush()

    def _open(self, frame: OpenFrame) -> None:
        try:
            if self._backend_release != __version__:
                raise UnavailableError(
                    f"the Triton backend is of faser_trtllm {self._backend_release}, the package of {__version__}; "
                    "install both from the same release"
                )
            config = load_model_config(frame)
            if self._executor is None:
                self._start(config)
            elif config != self._config:
                self._unopened[frame.model] = "its configuration is no longer that of the other models"
                self._answer_open(frame, OpenStatus.OTHER_CONFIGURATION)
                return
            self._models[frame.model] = self._open_model(frame)
            self._publish()  # the backend needs the series, to count requests that it fails itself
            self._answer_open(frame, OpenStatus.OPENED)
        except FaserError as error:
            self._fail_open(frame, error.code, str(error))
        except Exception as error:
            log.exception("the engines could not be opened")
            self._fail_open(frame, "INTERNAL", f"the engines could not be opened: {type(error).__name__}: {error}")

    def _open_model(self, frame: OpenFrame) -> ServedModel:
        assert self._generator is not None
        config = ModelConfig.of(frame)
        model = ServedModel(
            number=frame.model,
            contract=contract_of(frame.name),
            is_decoupled=config.is_decoupled,
            normalize_log_probs=config.flag("normalize_log_probs", False),
            metrics=ModelMetrics(self._changes, frame.name, frame.version),
            cancel=self._generator.cancel,
            rules=ClientRules.of(self._config or ServiceConfig()),
            defaults=config.request_defaults(),
        )
        self._publisher = self._publisher or model  # only one, so that sums over models count the engine once
        return model

    def _close(self, number: int) -> None:
        self._unopened.pop(number, None)
        self._publish()
        self._models.pop(number, None)

    def _start(self, config: ServiceConfig) -> None:
        self._config = config
        self._memory.limit = config.max_queue_bytes
        self._send_settings(config)
        self._spans = open_span_recorder(config.otlp_traces_endpoint)
        executor, tokenizer = self._opener(Path(config.engine_dir or ""), config)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        if self._spans is not None:
            executor.watch(self._spans)
        executor.before_pass(self._outbox.hand_over)
        executor.start()
        if config.stream_interval == "auto":
            self._connection.rest_at_most(MAX_REST_S)
        self._generator = TextGenerator(executor, tokenizer, config.steps_per_response, config.guide_compile_timeout_s)
        self._generator.open_guides()
        self._executor = executor

    def _send_settings(self, config: ServiceConfig) -> None:
        times_s = (
            config.startup_timeout_s,
            config.health_timeout_s,
            config.hang_timeout_s,
            config.restart_backoff_s,
            config.restart_backoff_max_s,
            config.cancellation_check_period_ms / 1e3,
        )
        self._connection.send(ToBackend.HELLO, _SETTINGS.pack(wire.VERSION, *times_s))

    def _answer_open(self, frame: OpenFrame, status: OpenStatus, code: str = "UNKNOWN", message: str = "") -> None:
        number = wire.ERROR_CODES.get(code, wire.ERROR_CODES["INTERNAL"])
        self._connection.send(ToBackend.OPENED, _OPENED.pack(frame.model, status, number), wire.text(message))

    def _fail_open(self, frame: OpenFrame, code: str, message: str) -> None:
        note_start_error(message)
        self._unopened[frame.model] = message
        self._answer_open(frame, OpenStatus.FAILED, code, message)
        if self._executor is None:
            self._connection.flush(1.0)
            _exit(1)


def main(argv: list[str] | None = None, opener: Opener = open_engine_dir) -> NoReturn:
    """Serve until the connection closes; never returns."""
    parser = argparse.ArgumentParser(description="Run the engine process; the Triton backend `faser` starts it.")
    parser.add_argument("--backend_fd", type=int, required=True, help="the inherited socket to the backend")
    parser.add_argument("--parent_pid", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    os.closerange(args.backend_fd + 1, os.sysconf("SC_OPEN_MAX"))  # inherited from the server, such as its ports
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    threading.excepthook = die_of_thread
    faulthandler.enable()
    server = EngineServer(Connection(socket.socket(fileno=args.backend_fd)), opener)
    try:
        with handle_signals({signal.SIGTERM: server.drain, REPLACE_DRAFT: server.replace_draft}):
            server.run()
            server.close()
    except WireError as error:
        log.error("the Triton backend sent an invalid frame: %s", error)
        _exit(70)
    _exit(0)


def _exit(status: int) -> NoReturn:
    """Exit at once. A regular exit could hang on engine threads that still run; the kernel frees the memory."""
    os._exit(status)


if __name__ == "__main__":
    main()
