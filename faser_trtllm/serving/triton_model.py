"""What model.py of the Triton repository runs: requests to the engine child, its chunks to responses.

Facts of Triton that shape it: metrics are touched from one thread only (ModelMetrics'), nothing of a request is touched
after its FINAL flag is sent, and threads are joined before finalize() returns.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.config import ServiceConfig, load_service_config
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.serving.messages import Chunk, Failed
from faser_trtllm.serving.metrics import ModelMetrics
from faser_trtllm.serving.supervisor import ENGINE_COMMAND, Supervisor
from faser_trtllm.serving.triton_request import Wanted, parse_request, read_tensors

log = logging.getLogger("faser.triton")

STARTUP_ERROR_FILE = "startup_error"
_MAX_POLL_SHARE = 0.2  # of one core, for asking Triton which requests were cancelled
_IDLE_POLL_S = 0.02
_PARENT_CHECK_S = 0.5


class TritonModel:
    """The model of one instance; pb_utils is Triton's triton_python_backend_utils."""

    def __init__(self, pb_utils: Any, args: dict[str, str], command: tuple[str, ...] = ENGINE_COMMAND) -> None:
        self._pb_utils = pb_utils
        config = _load_config(args)
        self._metrics = ModelMetrics(pb_utils, args.get("model_name", "faser"), args.get("model_version", "1"))
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._supervisor = Supervisor(config, command, self._metrics.set_stats)
        self._supervisor.start()
        self._metrics.start(lambda: self._supervisor.is_ready)
        self._poll_period_s = config.cancellation_check_period_ms / 1e3
        self._threads = [
            threading.Thread(target=self._poll_cancelled, name="faser-cancellation", daemon=True),
            threading.Thread(target=self._watch_parent, name="faser-parent", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_ready(self) -> bool:
        return self._supervisor.is_ready

    def execute(self, requests: list[Any]) -> None:
        """Take requests; each answers through its response sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = read_tensors(request)
                text_request, wanted = parse_request(tensors), Wanted(tensors)
                stream = _Stream(self._pb_utils, request, sender, wanted)
                del tensors
                self._submit(stream, text_request)
            except FaserError as error:
                self._refuse(sender, error.code, str(error))
            except Exception as error:
                log.exception("a request could not be read")
                self._refuse(sender, "INTERNAL", f"the request could not be read: {type(error).__name__}")

    def close(self) -> None:
        """End the engine child and all threads; open requests have failed when it returns."""
        self._closing.set()
        self._supervisor.close()
        for thread in self._threads:
            thread.join()
        self._metrics.close()

    def _submit(self, stream: _Stream, text_request: Any) -> None:
        with self._lock:
            request_id = self._supervisor.submit(text_request, lambda event: self._on_event(stream, event))
            if not stream.is_done:
                self._streams[request_id] = stream

    def _on_event(self, stream: _Stream, event: Chunk | Failed) -> None:
        if isinstance(event, Chunk) and not event.is_final:
            stream.send_chunk(event)
            return
        self._metrics.record(event)
        stream.send_final(event)
        with self._lock:
            assert event.id is not None
            self._streams.pop(event.id, None)

    def _refuse(self, sender: Any, code: str, message: str) -> None:
        pb_utils = self._pb_utils
        self._metrics.refused(code)
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _poll_cancelled(self) -> None:
        pause_s = _IDLE_POLL_S
        while not self._closing.wait(pause_s):
            started_s = time.monotonic()
            with self._lock:
                streams = list(self._streams.items())
            for request_id, stream in streams:
                if stream.was_cancelled():
                    self._supervisor.cancel(request_id)
            polled_s = time.monotonic() - started_s
            pause_s = max(self._poll_period_s, polled_s / _MAX_POLL_SHARE) if streams else _IDLE_POLL_S

    def _watch_parent(self) -> None:
        """A stub whose server was killed must not live on with the engine."""
        parent_pid = os.getppid()
        while not self._closing.wait(_PARENT_CHECK_S):
            if os.getppid() != parent_pid:
                os._exit(1)


class _Stream:
    """One Triton request that is open. Its lock keeps everyone away once FINAL is sent."""

    def __init__(self, pb_utils: Any, request: Any, sender: Any, wanted: Wanted) -> None:
        self._pb_utils = pb_utils
        self._request = request
        self._sender = sender
        self._wanted = wanted
        self._lock = threading.Lock()
        self._cancel_sent = False
        self.is_done = False

    def was_cancelled(self) -> bool:
        """True once, when the client has cancelled."""
        with self._lock:
            if self.is_done or self._cancel_sent or not self._request.is_cancelled():
                return False
            self._cancel_sent = True
            return True

    def send_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            if not self.is_done and not self._cancel_sent:
                self._sender.send(self._pb_utils.InferenceResponse(output_tensors=self._tensors(chunk)))

    def send_final(self, event: Chunk | Failed) -> None:
        pb_utils = self._pb_utils
        if isinstance(event, Failed):
            error = pb_utils.TritonError(event.message, getattr(pb_utils.TritonError, event.code))
            response = pb_utils.InferenceResponse(error=error)
        else:
            response = pb_utils.InferenceResponse(output_tensors=self._tensors(event))
        with self._lock:
            if self.is_done:
                return
            self.is_done = True
            sender, self._sender, self._request = self._sender, None, None
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _tensors(self, chunk: Chunk) -> list[Any]:
        tensor = self._pb_utils.Tensor
        tensors = [
            tensor("text_output", np.array([chunk.text.encode()], dtype=np.object_)),
            tensor("output_ids", np.array([[chunk.token_ids]], dtype=np.int32)),
            tensor("sequence_index", np.zeros((1, 1), np.int32)),
            tensor("batch_index", np.zeros((1, 1), np.int32)),
        ]
        statistics = chunk.statistics
        if statistics is None:
            return tensors
        assert chunk.finish_reason is not None
        tensors += [
            tensor("finish_reason", np.array([chunk.finish_reason.encode()], dtype=np.object_)),
            tensor("total_draft_tokens", np.array([[statistics.num_draft_tokens]], np.int32)),
            tensor("total_accepted_draft_tokens", np.array([[statistics.num_accepted_tokens]], np.int32)),
            tensor("acceptance_rate", np.array([[statistics.acceptance_rate]], np.float32)),
        ]
        if self._wanted.num_input_tokens:
            tensors.append(tensor("num_input_tokens", np.array([[statistics.num_input_tokens]], np.int32)))
        if self._wanted.num_output_tokens:
            tensors.append(tensor("num_output_tokens", np.array([[statistics.num_output_tokens]], np.int32)))
        return tensors


def open_model(pb_utils: Any, args: dict[str, str], command: tuple[str, ...] = ENGINE_COMMAND) -> TritonModel:
    """The model for initialize(); a failure becomes a TritonModelException with our sentence."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        return TritonModel(pb_utils, args, command)
    except FaserError as error:
        run_dir = os.environ.get("FASER_RUN_DIR")
        if run_dir:
            Path(run_dir, STARTUP_ERROR_FILE).write_text(str(error))
        raise pb_utils.TritonModelException(str(error)) from error


def _load_config(args: dict[str, str]) -> ServiceConfig:
    """1/faser.yaml or FASER_CONFIG, then the model's parameters, then FASER_ENGINE_DIR; the last one wins."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    values = {name: parameter.get("string_value", "") for name, parameter in parameters.items()}
    own_file = Path(args["model_repository"]) / args["model_version"] / "faser.yaml"
    path = os.environ.get("FASER_CONFIG") or values.get("config") or (own_file if own_file.exists() else None)
    engine_dir = os.environ.get("FASER_ENGINE_DIR") or values.get("engine_dir") or None
    config = load_service_config(Path(path) if path else None, {"engine_dir": engine_dir})
    if not config.engine_dir:
        raise InvalidArgumentError(
            "engine_dir is not set; set it in faser.yaml, as a parameter of the model or in FASER_ENGINE_DIR"
        )
    return config
