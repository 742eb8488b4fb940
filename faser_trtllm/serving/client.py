"""Small clients of the service: gRPC through tritonclient, HTTP through the standard library.

tritonclient is imported where it is used; it comes with the `triton` extra.
"""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from faser_trtllm.errors import FaserError

MODEL_NAME = "faser"

INPUT_DTYPES = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "embedding_bias_words": "BYTES",
    "embedding_bias_weights": "FP32",
    "logit_bias_ids": "INT32",
    "logit_bias_values": "FP32",
    "end_id": "INT32",
    "pad_id": "INT32",
    "beam_width": "INT32",
    "num_return_sequences": "INT32",
    "num_draft_tokens": "INT32",
    "drafters": "BYTES",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_log_probs": "BOOL",
    "return_context_log_probs": "BOOL",
    "num_top_log_probs": "INT32",
    "return_generation_logits": "BOOL",
    "return_is_draft": "BOOL",
    "return_perf_metrics": "BOOL",
    "stop": "BOOL",
    "priority": "FP32",
    "timeout_ms": "FP32",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
}


@dataclass(frozen=True, slots=True)
class Response:
    """One response; the counts are None in all but a sequence's last. log_probs and is_draft (the draft model proposed
    the token): of token_ids, if asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    batch_index: int = 0
    sequence_index: int = 0
    log_probs: tuple[float, ...] = ()
    is_draft: tuple[bool, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class ResponseError(FaserError):
    """The server answered with an error; the message is the server's."""

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class GrpcClient:
    """A gRPC connection that runs one stream of requests; use one object per thread."""

    def __init__(self, url: str = "localhost:8001") -> None:
        import tritonclient.grpc as grpcclient

        self._grpc = grpcclient
        self._client = grpcclient.InferenceServerClient(url)
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(callback=partial(_put, self._answers))
        self._num_requests = 0

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def close(self, cancel: bool = False) -> None:
        """End the stream; cancel: do not wait for running requests, end them."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def send(self, text: str | None = None, **fields: Any) -> str:
        """Send a request without waiting for its answer, and give its id. fields: inputs of the model `faser`."""
        inputs = []
        for name, value in _with_text(text, fields).items():
            array = to_tensor(name, value)
            inputs.append(self._grpc.InferInput(name, list(array.shape), INPUT_DTYPES[name]))
            inputs[-1].set_data_from_numpy(array)
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._client.async_stream_infer(MODEL_NAME, inputs, request_id=request_id)
        return request_id

    def receive(self, timeout_s: float | None = None) -> tuple[str, Response]:
        """The next response of any request, and the request's id; raises ResponseError, or queue.Empty."""
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise ResponseError(error.message(), str(error.status() or "UNKNOWN").removeprefix("StatusCode."))
        return result.get_response().id, _response_of(result.as_numpy)

    def stream(self, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Iterator[Response]:
        """Send one request and give its responses as they come; no other request may be open."""
        self.send(text, **{"stream": True} | fields)
        while True:
            _, response = self.receive(timeout_s)
            yield response
            if response.is_final:
                return


def stream_http(url: str, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Iterator[Response]:
    """Responses of generate_stream as they come (server-sent events). url: such as http://localhost:8000."""
    body = _body(text, {"stream": True} | fields)
    with _post(f"{url}/v2/models/{MODEL_NAME}/generate_stream", body, timeout_s) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield _response_of_json(json.loads(line[6:]))


def generate_http(url: str, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Response:
    """One answer of generate; not streamed."""
    with _post(f"{url}/v2/models/{MODEL_NAME}/generate", _body(text, fields), timeout_s) as answer:
        return _response_of_json(json.load(answer))


def _put(answers: queue.SimpleQueue[tuple[Any, Any]], result: Any, error: Any) -> None:
    answers.put((result, error))


def _with_text(text: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    return fields if text is None else {"text_input": text} | fields


def _body(text: str | None, fields: dict[str, Any]) -> bytes:
    return json.dumps(_with_text(text, fields)).encode()


def _post(url: str, body: bytes, timeout_s: float) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise ResponseError(_message_of(error.read()), f"HTTP {error.code}") from None


def _message_of(body: bytes) -> str:
    """The sentence of an error; generate_stream gives it as an event."""
    try:
        return str(json.loads(body.removeprefix(b"data: "))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the server gave no reason"


def to_tensor(name: str, value: Any) -> np.ndarray[Any, Any]:
    """The value of an input of the model `faser` as an array of shape [1, n]: batch 1 and the values."""
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    if INPUT_DTYPES[name] == "BYTES":
        encoded = [item.encode() if isinstance(item, str) else item for item in values]
        return np.array([encoded], dtype=np.object_).reshape(1, len(encoded))
    kinds = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    return np.array([values], dtype=kinds[INPUT_DTYPES[name]])


def _response_of(get: Any) -> Response:
    def number(name: str) -> int | None:
        array = get(name)
        return None if array is None else int(array.reshape(-1)[0])

    reason, log_probs, is_draft = get("finish_reason"), get("output_log_probs"), get("output_is_draft")
    return Response(
        text=get("text_output").reshape(-1)[0].decode(),
        token_ids=tuple(get("output_ids").reshape(-1).tolist()),
        finish_reason=None if reason is None else reason.reshape(-1)[0].decode(),
        num_input_tokens=number("num_input_tokens"),
        num_output_tokens=number("num_output_tokens"),
        num_draft_tokens=number("total_draft_tokens"),
        num_accepted_tokens=number("total_accepted_draft_tokens"),
        batch_index=number("batch_index") or 0,
        sequence_index=number("sequence_index") or 0,
        log_probs=() if log_probs is None else tuple(log_probs.reshape(-1).tolist()),
        is_draft=() if is_draft is None else tuple(is_draft.reshape(-1).tolist()),
    )


_PER_TOKEN = ("output_ids", "output_log_probs", "output_is_draft")  # lists, or the one value itself


def _response_of_json(answer: dict[str, Any]) -> Response:
    if "error" in answer:
        raise ResponseError(str(answer["error"]))
    token_ids, log_probs, is_draft = (answer.get(name, []) for name in _PER_TOKEN)
    return Response(
        text=answer["text_output"],
        token_ids=tuple(token_ids) if isinstance(token_ids, list) else (token_ids,),
        finish_reason=answer.get("finish_reason"),
        num_input_tokens=answer.get("num_input_tokens"),
        num_output_tokens=answer.get("num_output_tokens"),
        num_draft_tokens=answer.get("total_draft_tokens"),
        num_accepted_tokens=answer.get("total_accepted_draft_tokens"),
        batch_index=answer.get("batch_index", 0),
        sequence_index=answer.get("sequence_index", 0),
        log_probs=tuple(log_probs) if isinstance(log_probs, list) else (log_probs,),
        is_draft=tuple(is_draft) if isinstance(is_draft, list) else (is_draft,),
    )
