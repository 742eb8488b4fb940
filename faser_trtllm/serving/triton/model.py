"""A Triton model in the engine process: submits requests to the engine and turns its chunks into responses.

The Triton backend (plugins/triton) forgets a request with its FINAL flag: nothing may be sent after it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
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
from faser_trtllm.serving.worker.messages import Chunk, Failed

log = logging.getLogger("faser.triton")

RUN_DIR_VARIABLE = "FASER_RUN_DIR"  # the directory of the launch, if `faser serve` started the server
STARTUP_ERROR_FILE = "startup_error"

OnEvent = Callable[[Chunk | Failed], None]
"""Receives the chunks of a request, on one thread; the last is a final Chunk or a Failed."""


class Engine(Protocol):
    """What a model needs of the engine: LocalEngine."""

    @property
    def is_ready(self) -> bool: ...

    def submit(self, request: TextRequest, on_event: OnEvent) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def stop(self, request_id: int) -> None: ...


class TritonModel:
    """One of the models of contract.py. The engine's owner calls end_cancelled() and set_stats()."""

    def __init__(self, api: Any, args: dict[str, str], engine: Engine) -> None:
        """api: an EdgeApi. args: model_name, model_version, model_repository, model_config (JSON)."""
        self._api = api
        name = args["model_name"]
        self._contract = contract_of(name)
        self._is_decoupled = _is_decoupled(args)
        self._normalize_log_probs = parameters_of(args).get("normalize_log_probs", "").lower() == "true"
        self._metrics = ModelMetrics(api, name, args["model_version"])
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()
        self._engine = engine
        self._metrics.start(lambda: engine.is_ready)

    def execute(self, requests: list[Any]) -> None:
        """Submit requests; each is answered through its response sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = read_tensors(request)
                if is_stop(tensors):
                    self._stop(request.request_id())
                    # A model that is not decoupled must send exactly one response, so the flag alone is an error.
                    response = None if self._is_decoupled else self._api.InferenceResponse(output_tensors=[])
                    sender.send(response, flags=self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                tensors = self._contract.canonical(tensors)
                parts = parse_request(tensors, self._contract, normalize_log_probs=self._normalize_log_probs)
                if not self._is_decoupled:
                    self._check_single(parts)
                reply = Reply(self._api.Tensor, self._contract, RequestedStats(tensors, self._contract), parts)
                del tensors
                self._submit(_Stream(self._api, request, sender, reply, len(parts)), parts)
            except FaserError as error:
                self._refuse(request, sender, error.code, self._contract.client_message(str(error)))
            except Exception as error:
                log.exception("a request could not be read")
                self._refuse(request, sender, "INTERNAL", f"the request could not be read: {type(error).__name__}")

    def set_stats(self, stats: Mapping[str, float]) -> None:
        """Publish the engine's stats, as ModelMetrics.set_stats()."""
        self._metrics.set_stats(stats)

    def end_cancelled(self) -> None:
        """End the requests whose clients have cancelled them."""
        with self._lock:
            streams = set(self._streams.values())
        for stream in streams:
            if stream.was_cancelled():
                self._cancel(stream)

    def close(self) -> None:
        """Publish the last metrics and end the thread that does it."""
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
        api = self._api
        self._metrics.refused(code)
        error = api.TritonError(error_message(request, code, message), getattr(api.TritonError, code))
        sender.send(api.InferenceResponse(error=error), flags=api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class _Stream:
    """One open Triton request. Its lock ensures that nothing touches the request after FINAL was sent."""

    def __init__(self, api: Any, request: Any, sender: Any, reply: Reply, num_parts: int) -> None:
        self._api = api
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
            response = self._api.InferenceResponse(output_tensors=self._reply.tensors(place, chunk))
            if is_final:
                self._end(response)
            else:
                self._sender.send(response)

    def fail(self, code: str, message: str) -> bool:
        """End the request with an error; False if it has ended already."""
        api = self._api
        with self._lock:
            if self.is_done:
                return False
            self._has_failed = True
            text = error_message(self._request, code, message)
            error = api.TritonError(text, getattr(api.TritonError, code))
            self._end(api.InferenceResponse(error=error))
            return True

    def abandon(self) -> None:
        """Send nothing more: the caller ends the request itself."""
        with self._lock:
            self._has_failed = self.is_done = True
            self._sender = self._request = None

    def _end(self, response: Any) -> None:
        self._sender.send(response, flags=self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.is_done = True  # not if that failed: then an error can still be sent
        self._sender = self._request = None


def note_start_error(message: str) -> None:
    """Leave the reason why a model could not be opened to `faser serve`."""
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
