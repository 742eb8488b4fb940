"""The Triton model: sends requests to the engine child and turns its chunks into responses.

Triton requires three things: metrics are touched from one thread only (that of ModelMetrics), a request is not touched
after its FINAL flag was sent, and all threads are joined before finalize() returns.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.triton.contract import contract_of
from faser_trtllm.serving.triton.metrics import ModelMetrics
from faser_trtllm.serving.triton.reply import Reply
from faser_trtllm.serving.triton.request import (
    Part,
    RequestedStats,
    error_message,
    is_stop,
    parse_request,
    read_tensors,
)
from faser_trtllm.serving.triton.shared_engine import RUN_DIR_VARIABLE, SharedEngine
from faser_trtllm.serving.worker.messages import Chunk, Failed
from faser_trtllm.serving.worker.supervisor import ENGINE_COMMAND, OnEvent

log = logging.getLogger("faser.triton")

STARTUP_ERROR_FILE = "startup_error"
_MAX_POLL_SHARE = 0.05  # of one core, spent on asking Triton which requests were cancelled
_IDLE_POLL_S = 0.02
_PARENT_CHECK_S = 0.5


class Engine(Protocol):
    """What a model needs of the engine: SharedEngine in another process, LocalEngine in this one."""

    @property
    def is_ready(self) -> bool: ...

    def submit(self, request: TextRequest, on_event: OnEvent) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def stop(self, request_id: int) -> None: ...

    def close(self) -> None: ...


class TritonModel:
    """One of the models of contract.py. pb_utils: triton_python_backend_utils, or its stand-in of serving/edge."""

    def __init__(
        self,
        pb_utils: Any,
        args: dict[str, str],
        command: tuple[str, ...] = ENGINE_COMMAND,
        engine: Engine | None = None,
    ) -> None:
        """engine: one of this process, whose owner calls end_cancelled() and set_stats(); None: an engine child."""
        self._pb_utils = pb_utils
        name = args.get("model_name", "faser")
        self._contract = contract_of(name)
        self._is_decoupled = _is_decoupled(args)
        self._normalize_log_probs = parameters_of(args).get("normalize_log_probs", "").lower() == "true"
        self._metrics = ModelMetrics(pb_utils, name, args.get("model_version", "1"))
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._engine = self._share_engine(args, command) if engine is None else engine
        self._metrics.start(lambda: self._engine.is_ready)
        for thread in self._threads:
            thread.start()

    def _share_engine(self, args: dict[str, str], command: tuple[str, ...]) -> Engine:
        config = load_model_config(args)
        engine = SharedEngine(config, command, self._metrics.set_stats)
        engine.start()
        self._poll_period_s = config.cancellation_check_period_ms / 1e3
        self._threads = [
            threading.Thread(target=self._poll_cancelled, name="faser-cancellation", daemon=True),
            threading.Thread(target=self._watch_parent, name="faser-parent", daemon=True),
        ]
        return engine

    @property
    def is_ready(self) -> bool:
        return self._engine.is_ready

    def execute(self, requests: list[Any]) -> None:
        """Submit requests; each is answered through its response sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = read_tensors(request)
                if is_stop(tensors):
                    self._stop(request.request_id())
                    # A model that is not decoupled must send exactly one response, so the flag alone is an error.
                    response = None if self._is_decoupled else self._pb_utils.InferenceResponse(output_tensors=[])
                    sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                tensors = self._contract.canonical(tensors)
                parts = parse_request(tensors, self._contract, normalize_log_probs=self._normalize_log_probs)
                if not self._is_decoupled:
                    self._check_single(parts)
                reply = Reply(self._pb_utils.Tensor, self._contract, RequestedStats(tensors, self._contract), parts)
                del tensors
                self._submit(_Stream(self._pb_utils, request, sender, reply, len(parts)), parts)
            except FaserError as error:
                self._refuse(request, sender, error.code, self._contract.client_message(str(error)))
            except Exception as error:
                log.exception("a request could not be read")
                self._refuse(request, sender, "INTERNAL", f"the request could not be read: {type(error).__name__}")

    def set_stats(self, stats: Mapping[str, float]) -> None:
        """Publish the engine's stats, as ModelMetrics.set_stats()."""
        self._metrics.set_stats(stats)

    def end_cancelled(self) -> int:
        """End the requests whose clients have cancelled them; returns how many were open."""
        with self._lock:
            streams = set(self._streams.values())
        for stream in streams:
            if stream.was_cancelled():
                self._cancel(stream)
        return len(streams)

    def close(self) -> None:
        """End the engine child and all threads. Open requests have failed when this returns."""
        self._closing.set()
        self._engine.close()
        for thread in self._threads:
            thread.join()
        self._metrics.close()

    def _submit(self, stream: _Stream, parts: list[Part]) -> None:
        """Send all parts to the engine or none: if one is refused, cancel the others and raise."""
        ids = stream.engine_ids
        try:
            for place, part in enumerate(parts):
                with self._lock:
                    ids.append(self._engine.submit(part.request, partial(self._on_event, stream, place)))
                    self._streams[ids[-1]] = stream
        except FaserError:
            if not ids:
                raise
            stream.abandon()
            self._cancel(stream)
            raise
        if stream.is_unwanted:  # cancelled or failed before all parts had ids
            self._cancel(stream)

    def _on_event(self, stream: _Stream, place: int, event: Chunk | Failed) -> None:
        is_final = isinstance(event, Failed) or event.is_final
        if is_final:
            self._metrics.record(event)
        if isinstance(event, Failed):
            if stream.fail(event.code, self._contract.client_message(event.message)):
                self._cancel(stream)
        else:
            stream.send(place, event)
        if is_final:
            with self._lock:
                assert event.id is not None
                self._streams.pop(event.id, None)

    def _check_single(self, parts: list[Part]) -> None:
        """Raise InvalidArgumentError if the request needs more than one response; this model is not decoupled."""
        if any(part.request.stream for part in parts):
            name = self._contract.client_name("stream")
            raise InvalidArgumentError(f"{name} is true: Streaming is only supported in decoupled mode.")
        if len(parts) > 1:
            raise InvalidArgumentError(
                f"the request asks for {len(parts)} sequences, allowed is 1 as the model is not decoupled; "
                "send one request for each"
            )

    def _cancel(self, stream: _Stream) -> None:
        for request_id in list(stream.engine_ids):
            self._engine.cancel(request_id)

    def _stop(self, request_id: str) -> None:
        """End the requests with this id, with the output they have so far."""
        if not request_id:
            raise InvalidArgumentError("A request id must be provided for request cancellation")
        with self._lock:
            ids = [engine_id for engine_id, stream in self._streams.items() if stream.request_id == request_id]
        for engine_id in ids:
            self._engine.stop(engine_id)

    def _refuse(self, request: Any, sender: Any, code: str, message: str) -> None:
        pb_utils = self._pb_utils
        self._metrics.refused(code)
        error = pb_utils.TritonError(error_message(request, code, message), getattr(pb_utils.TritonError, code))
        sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _poll_cancelled(self) -> None:
        pause_s = _IDLE_POLL_S
        while not self._closing.wait(pause_s):
            started_s = time.monotonic()
            num_open = self.end_cancelled()
            polled_s = time.monotonic() - started_s
            pause_s = max(self._poll_period_s, polled_s / _MAX_POLL_SHARE) if num_open else _IDLE_POLL_S

    def _watch_parent(self) -> None:
        """Exit when the server was killed: otherwise this stub and its engine would stay alive."""
        parent_pid = os.getppid()
        while not self._closing.wait(_PARENT_CHECK_S):
            if os.getppid() != parent_pid:
                os._exit(1)


class _Stream:
    """One open Triton request. Its lock ensures that nothing touches the request after FINAL was sent."""

    def __init__(self, pb_utils: Any, request: Any, sender: Any, reply: Reply, num_parts: int) -> None:
        self._pb_utils = pb_utils
        self._request = request
        self._sender = sender
        self._reply = reply
        self._num_open_parts = num_parts
        self._lock = threading.Lock()
        self._cancel_sent = False
        self._has_failed = False
        self.request_id: str = request.request_id()
        self.engine_ids: list[int] = []
        self.is_done = False

    @property
    def is_unwanted(self) -> bool:
        """Nobody waits for the parts that still run."""
        return self._cancel_sent or self._has_failed

    def was_cancelled(self) -> bool:
        """True exactly once, after the client has cancelled."""
        with self._lock:
            if self.is_done or self._cancel_sent or not self._request.is_cancelled():
                return False
            self._cancel_sent = True
            return True

    def send(self, place: int, chunk: Chunk) -> None:
        """Send the next chunk of a part; the last chunk of the last part ends the request."""
        with self._lock:
            if self.is_done:
                return
            self._num_open_parts -= chunk.is_final
            is_final = self._num_open_parts == 0
            if self._cancel_sent and not is_final:
                return
            response = self._pb_utils.InferenceResponse(output_tensors=self._reply.tensors(place, chunk))
            if is_final:
                self._end(response)
            else:
                self._sender.send(response)

    def fail(self, code: str, message: str) -> bool:
        """End the request with an error; False if it has ended already."""
        pb_utils = self._pb_utils
        with self._lock:
            if self.is_done:
                return False
            self._has_failed = True
            text = error_message(self._request, code, message)
            error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, code))
            self._end(pb_utils.InferenceResponse(error=error))
            return True

    def abandon(self) -> None:
        """Send nothing more: the caller ends the request itself."""
        with self._lock:
            self._has_failed = self.is_done = True
            self._sender = self._request = None

    def _end(self, response: Any) -> None:
        self.is_done = True
        sender, self._sender, self._request = self._sender, None, None
        sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def open_model(pb_utils: Any, args: dict[str, str], command: tuple[str, ...] = ENGINE_COMMAND) -> TritonModel:
    """The model for initialize(); a FaserError becomes a TritonModelException with the same message."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        return TritonModel(pb_utils, args, command)
    except FaserError as error:
        note_start_error(str(error))
        raise pb_utils.TritonModelException(str(error)) from error


def note_start_error(message: str) -> None:
    """Leave the reason why a model could not be opened to `faser serve`, if that started the server."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir:
        Path(run_dir, STARTUP_ERROR_FILE).write_text(message)


def _is_decoupled(args: dict[str, str]) -> bool:
    policy: dict[str, bool] = json.loads(args["model_config"]).get("model_transaction_policy", {})
    return policy.get("decoupled", True)


def parameters_of(args: dict[str, str]) -> dict[str, str]:
    """The parameters of the model's config.pbtxt."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {name: parameter.get("string_value", "") for name, parameter in parameters.items()}


def load_model_config(args: dict[str, str]) -> ServiceConfig:
    """Settings from FASER_CONFIG, a model parameter or 1/faser.yaml, in this order; FASER_ENGINE_DIR sets engine_dir.

    A model without its own faser.yaml uses that of the model `faser` beside it, so that both share one engine process.
    """
    values = parameters_of(args)
    model_dir, version = Path(args["model_repository"]), args["model_version"]
    files = (path / version / "faser.yaml" for path in (model_dir, model_dir.parent / "faser"))
    own_file = next((path for path in files if path.exists()), None)
    path = os.environ.get("FASER_CONFIG") or values.get("config") or own_file
    engine_dir = os.environ.get("FASER_ENGINE_DIR") or values.get("engine_dir") or None
    config = load_service_config(Path(path) if path else None, {"engine_dir": engine_dir})
    if not config.engine_dir:
        raise InvalidArgumentError(
            "engine_dir is not set; set it in faser.yaml, as a model parameter or in FASER_ENGINE_DIR"
        )
    return config
