"""The engine process behind the Triton backend `faser`: `python -m faser_trtllm.serving.edge.process`.

The backend (plugins/triton) starts it, passes the requests of all models on as Triton gives them, and turns its frames
into responses. Checks, conversions and metrics are those of serving/triton. The process exits when the socket closes,
when the server dies, when one of its threads fails, or after a drain (SIGTERM).
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
from pathlib import Path
from typing import Any, NoReturn

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import FaserError
from faser_trtllm.serving.edge import wire
from faser_trtllm.serving.edge.api import EdgeApi, EdgeRequest, InferenceResponse, TritonError
from faser_trtllm.serving.edge.connection import MAX_REST_S, EdgeConnection
from faser_trtllm.serving.edge.local_engine import LocalEngine
from faser_trtllm.serving.edge.wire import Body, FromEdge, OpenFrame, OpenStatus, RequestFrame, ToEdge, WireError
from faser_trtllm.serving.observe.spans import SpanRecorder, open_span_recorder
from faser_trtllm.serving.text.backlog import Backlog
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import TOKEN_MODELS
from faser_trtllm.serving.triton.model import TritonModel, load_model_config, note_start_error
from faser_trtllm.serving.triton.request import error_message
from faser_trtllm.serving.triton.tokens import TokenModel, open_token_model
from faser_trtllm.serving.worker.engine_process import (
    SHUTTING_DOWN,
    SWITCH_INTERVAL_S,
    Opener,
    ServedExecutor,
    die_of_thread,
    open_engine_dir,
)
from faser_trtllm.serving.worker.process import die_with_parent

log = logging.getLogger("faser.engine")

_SETTINGS = struct.Struct("<I6d")
_PONG = struct.Struct("<2d")
_HELLO = struct.Struct("<2I")
_HANDLE = struct.Struct("<Q")
_OPENED = struct.Struct("<IBB")


class EdgeServer:
    """Serves one connection with one engine, which the first model's configuration names."""

    def __init__(self, connection: EdgeConnection, opener: Opener) -> None:
        self._connection = connection
        self._opener = opener
        self._api = EdgeApi(connection)
        self._backlog = Backlog(connection.notify)
        self._num_restarts = 0.0
        self._config: ServiceConfig | None = None
        self._executor: ServedExecutor | None = None
        self._tokenizer: Any = None
        self._spans: SpanRecorder | None = None
        self._engine: LocalEngine | None = None
        self._models: dict[int, TritonModel | TokenModel] = {}
        self._unopened: dict[int, str] = {}  # models of Triton that are not open here, and why
        self._publisher: TritonModel | None = None  # of the executor's counts, also after it was unloaded
        self._requests: dict[int, EdgeRequest] = {}
        self._is_draining = False

    def run(self) -> None:
        """Handle frames until the edge hangs up."""
        threading.Thread(target=self._write, name="faser-edge-writer", daemon=True).start()
        try:
            while True:
                any_cancelled = False
                for kind, body in self._connection.receive():
                    any_cancelled |= self._handle(kind, body)
                if any_cancelled:
                    for model in self._models.values():
                        model.end_cancelled()
        except (EOFError, ConnectionError):
            pass  # the backend hung up
        except OSError as error:
            log.error("nothing more can be read from the Triton backend: %s", error)

    def drain(self) -> None:
        """Refuse new requests, give the running ones drain_timeout_s, fail the rest and hang up."""
        if not self._is_draining:
            self._is_draining = True
            threading.Thread(target=self._drain, name="faser-drain", daemon=True).start()

    def close(self) -> None:
        """Send the spans that wait; call it after run() has returned."""
        if self._spans is not None:
            self._spans.close()

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.refuse()
        self._connection.send(ToEdge.DRAINING)
        if self._engine is not None and self._executor is not None and self._config is not None:
            self._executor.drain(self._config.drain_timeout_s)
            self._backlog.convert()
            self._engine.fail_all("UNAVAILABLE", SHUTTING_DOWN)
        self._connection.flush(1.0)
        self._connection.close()

    def _write(self) -> None:
        self._connection.run_writer(self._produce)

    def _produce(self, everything: bool) -> None:
        self._backlog.convert()
        if self._engine is not None:
            self._engine.deliver(everything)
        self._api.flush_metrics()

    def _handle(self, kind: FromEdge, body: Body) -> bool:
        """Whether a request was cancelled."""
        if kind is FromEdge.REQUEST:
            self._request(wire.read_request(body))
        elif kind is FromEdge.CANCEL:
            request = self._requests.get(body.numbers(_HANDLE)[0])
            if request is not None:
                request.cancelled = True
                return True
        elif kind is FromEdge.PING:
            self._pong()
        elif kind is FromEdge.OPEN:
            self._open(wire.read_open(body))
        elif kind is FromEdge.CLOSE:
            number = body.u32()
            self._unopened.pop(number, None)
            model = self._models.pop(number, None)
            if model is not None and model is not self._publisher:
                model.close()
        elif kind is FromEdge.HELLO:
            version, num_starts = body.numbers(_HELLO)
            # Each process counts its own start again: Triton keeps what the processes before it have counted.
            self._num_restarts = float(num_starts > 0)
            if version != wire.VERSION:
                self._send_settings(ServiceConfig())
        return False

    def _request(self, frame: RequestFrame) -> None:
        request = EdgeRequest(frame, wire.output_names(frame.outputs), self._connection, self._forget)
        self._requests[frame.handle] = request
        model = self._models.get(frame.model)
        if model is None:
            self._refuse(request, frame.model)
        else:
            model.execute([request])
        request.forget_inputs()

    def _refuse(self, request: EdgeRequest, model: int) -> None:
        """The edge goes on with the models of the process before this one, where one may not have opened again."""
        why = self._unopened.get(model, "it is not known here")
        message = f"the model did not open when the engine process started again: {why}; correct that and load it again"
        error = TritonError(error_message(request, "UNAVAILABLE", message), "UNAVAILABLE")
        request.send(InferenceResponse(error=error), EdgeApi.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _forget(self, handle: int) -> None:
        self._requests.pop(handle, None)

    def _pong(self) -> None:
        executor = self._executor
        if executor is None:
            return
        progress = executor.progress()
        self._connection.send(ToEdge.PONG, _PONG.pack(progress.stalled_s, progress.slow_step_s))
        if self._publisher is not None:
            self._publisher.set_stats(executor.stats() | {"num_restarts": self._num_restarts})

    def _open(self, frame: OpenFrame) -> None:
        args = {
            "model_name": frame.name,
            "model_version": frame.version,
            "model_repository": frame.repository,
            "model_config": frame.config_json,
        }
        try:
            config = load_model_config(args)
            if self._engine is None:
                self._engine = self._start(config)
            elif config != self._config:
                self._unopened[frame.model] = "its configuration is no longer that of the other models"
                self._answer_open(frame, OpenStatus.OTHER_CONFIGURATION)
                return
            self._models[frame.model] = self._open_model(args, self._engine)
            self._answer_open(frame, OpenStatus.OPENED)
        except FaserError as error:
            self._fail_open(frame, error.code, str(error))
        except Exception as error:
            log.exception("the engines could not be opened")
            message = f"the engines could not be opened: {type(error).__name__}: {error}"
            self._fail_open(frame, "INTERNAL", message)

    def _open_model(self, args: dict[str, str], engine: LocalEngine) -> TritonModel | TokenModel:
        if args["model_name"] in TOKEN_MODELS:
            assert self._executor is not None, "it was opened before its models"
            return open_token_model(self._api, args, self._tokenizer, self._executor.max_seq_len)
        model = TritonModel(self._api, args, engine)
        self._publisher = self._publisher or model  # one only, so that sums over models count the engine once
        return model

    def _start(self, config: ServiceConfig) -> LocalEngine:
        self._config = config
        self._send_settings(config)
        self._spans = open_span_recorder(config.otlp_traces_endpoint)
        executor, tokenizer = self._opener(Path(config.engine_dir or ""), config)
        self._tokenizer = tokenizer
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        if self._spans is not None:
            executor.watch(self._spans)
        executor.before_pass(self._backlog.hand_over)
        executor.start()
        self._executor = executor
        if config.stream_interval == "auto":
            self._connection.rest_at_most(MAX_REST_S)
        generator = TextGenerator(executor, tokenizer, config.steps_per_response, self._backlog)
        return LocalEngine(generator, self._connection.notify)

    def _send_settings(self, config: ServiceConfig) -> None:
        times_s = (
            config.startup_timeout_s,
            config.health_timeout_s,
            config.hang_timeout_s,
            config.restart_backoff_s,
            config.restart_backoff_max_s,
            config.cancellation_check_period_ms / 1e3,
        )
        self._connection.send(ToEdge.HELLO, _SETTINGS.pack(wire.VERSION, *times_s))

    def _answer_open(self, frame: OpenFrame, status: OpenStatus, code: str = "UNKNOWN", message: str = "") -> None:
        number = wire.ERROR_CODES.get(code, wire.ERROR_CODES["INTERNAL"])
        self._connection.send(ToEdge.OPENED, _OPENED.pack(frame.model, status, number), wire.text(message))

    def _fail_open(self, frame: OpenFrame, code: str, message: str) -> None:
        note_start_error(message)
        self._unopened[frame.model] = message
        self._answer_open(frame, OpenStatus.FAILED, code, message)
        if self._engine is None:
            self._connection.flush(1.0)
            _exit(1)


def main(argv: list[str] | None = None, opener: Opener = open_engine_dir) -> NoReturn:
    """Serve until the connection closes; never returns."""
    parser = argparse.ArgumentParser(description="The engine process of the Triton backend `faser`, which starts it.")
    parser.add_argument("--edge_fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent_pid", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    os.closerange(args.edge_fd + 1, os.sysconf("SC_OPEN_MAX"))  # the server's own, such as its ports
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    threading.excepthook = die_of_thread
    faulthandler.enable()
    server = EdgeServer(EdgeConnection(socket.socket(fileno=args.edge_fd)), opener)
    signal.signal(signal.SIGTERM, lambda signum, frame: server.drain())
    try:
        server.run()
        server.close()
    except WireError as error:
        log.error("the Triton backend sent what is not understood: %s", error)
        _exit(70)
    _exit(0)


def _exit(status: int) -> NoReturn:
    """The kernel frees the memory. A regular exit could hang on engine threads that still run."""
    os._exit(status)


if __name__ == "__main__":
    main()
