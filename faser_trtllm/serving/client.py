"""Small clients of the service: gRPC through tritonclient, HTTP through the standard library.

tritonclient is imported where it is used; it comes with the `triton` extra.
"""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.json_text import parse_json
from faser_trtllm.serving.text.acceptance import Acceptance
from faser_trtllm.serving.triton.contract import INPUTS

MODEL_NAME = "faser"
CLIENT_HEADER = "x-faser-client"
"""The HTTP or gRPC header in which a proxy names the client of a request; fair shares are per client."""

INPUT_DTYPES = {**INPUTS, "pad_id": "INT32"}
"""Inputs of the model `faser` and the Triton type of each."""

Top = Sequence[tuple[int, float]]
"""The most probable tokens at one position and their log probs, best first."""


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt's tokens and their log probs. The first token has none; tops is empty unless requested."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # from the second token on, as are tops
    tops: Sequence[Top]


@dataclass(frozen=True, slots=True)
class Response:
    """One response: new text of a sequence and its tokens.

    Counts are None where the server did not send them; by default only the last response of a sequence has them.
    log_probs, tops, context, is_draft and acceptance are empty or None unless the request asked for them.
    """

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
    is_draft: tuple[bool, ...] = ()  # for each token: True if it was an accepted draft token
    num_cached_tokens: int | None = None
    tops: Sequence[Top] = ()
    context: Context | None = None  # in the first response
    acceptance: Acceptance | None = None  # in the last response
    prediction: tuple[int, int] | None = None  # accepted and rejected draft tokens of the request's prediction

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class ResponseError(FaserError):
    """An error that the server sent. code is Triton's status code, or "UNKNOWN".

    field, value and limit are set for errors about a field if the client asked for error codes, as GrpcClient does.
    """

    def __init__(self, message: str, code: str = "UNKNOWN", **about: Any) -> None:
        super().__init__(message, **about)
        self.code = code


def response_error(details: str, code: str = "UNKNOWN") -> ResponseError:
    """Return the error in the answer to a request with the parameter error_codes.

    The model answers with JSON that has a code; Triton itself answers with a sentence, which gets `code`.
    """
    try:
        record = parse_json(details)
    except ValueError:
        record = None
    known = {"message": str, "code": str, "field": str | None}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in known.items()):
        return ResponseError(" ".join(details.split()) or "the server gave no reason", code)
    about = {name: record.get(name) for name in ("field", "value", "limit")}
    message = record["message"]
    if about["field"] is not None:
        message = message.removeprefix(FaserError("", about["field"]).sentence({}))
    return ResponseError(message, record["code"], **about)


class GrpcClient:
    """A gRPC connection that runs one stream of requests; use one object per thread."""

    def __init__(self, url: str = "localhost:8001") -> None:
        import tritonclient.grpc as grpcclient

        self._grpc = grpcclient
        self._client = grpcclient.InferenceServerClient(url)
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(callback=partial(_put, self._answers))

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def close(self, cancel: bool = False) -> None:
        """End the stream. With cancel, end running requests instead of waiting for them."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def send(self, text: str | None = None, **fields: Any) -> str:
        """Send a request without waiting for its answer, and return its id. fields: inputs of the model `faser`."""
        inputs = [infer_input(self._grpc, name, value) for name, value in _with_text(text, fields).items()]
        request_id = uuid.uuid4().hex  # random, since anyone who knows it can stop the request
        asked = {"error_codes": True}
        self._client.async_stream_infer(MODEL_NAME, inputs, request_id=request_id, parameters=asked)
        return request_id

    def receive(self, timeout_s: float | None = None) -> tuple[str, Response]:
        """Return (request id, response) of any open request; raise ResponseError, or queue.Empty after timeout_s."""
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise response_error(error.message(), str(error.status() or "UNKNOWN").removeprefix("StatusCode."))
        return result.get_response().id, response_of(result.as_numpy)

    def stream(self, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Iterator[Response]:
        """Send one request and yield its responses; raise like receive(). No other request may be open."""
        self.send(text, **{"stream": True} | fields)
        while True:
            _, response = self.receive(timeout_s)
            yield response
            if response.is_final:
                return


def stream_http(url: str, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Iterator[Response]:
    """Yield the responses of Triton's `generate_stream` (server-sent events). url: such as http://localhost:8000.

    Raises ResponseError, also if the stream ends before the last response: HTTP alone does not show that.
    """
    body, is_whole = _body(text, {"stream": True} | fields), False
    with _post(f"{url}/v2/models/{MODEL_NAME}/generate_stream", body, timeout_s) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                response = _response_of_json(line[6:])
                is_whole |= response.is_final
                yield response
    if not is_whole:
        raise ResponseError("the stream ended before its last response; send the request again", "UNAVAILABLE")


def generate_http(url: str, text: str | None = None, timeout_s: float = 60.0, **fields: Any) -> Response:
    """Return the answer of Triton's `generate`, which does not stream; raise ResponseError."""
    with _post(f"{url}/v2/models/{MODEL_NAME}/generate", _body(text, fields), timeout_s) as answer:
        return _response_of_json(answer.read())


def infer_input(grpcclient: Any, name: str, value: Any) -> Any:
    """Return a grpcclient.InferInput of the model `faser`, with batch size 1; raise like to_tensor()."""
    array = to_tensor(name, value)
    found = grpcclient.InferInput(name, list(array.shape), INPUT_DTYPES[name])
    found.set_data_from_numpy(array)
    return found


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
    """Return the message of an error response; generate_stream sends it as an event."""
    try:
        return str(parse_json(body.removeprefix(b"data: "))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the server gave no reason"


def to_tensor(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return an input's value as an array [1, n]; raise InvalidArgumentError if `faser` has no such input."""
    if name not in INPUT_DTYPES:
        raise InvalidArgumentError("is not an input of the model faser; leave it out", name)
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    if INPUT_DTYPES[name] == "BYTES":
        encoded = [item.encode() if isinstance(item, str) else item for item in values]
        return np.array([encoded], dtype=np.object_).reshape(1, len(encoded))
    kinds = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    return np.array([values], dtype=kinds[INPUT_DTYPES[name]])


def response_of(get: Any) -> Response:
    """Build a response from its output tensors. get(name) returns a tensor, or None if it was not sent."""

    def number(name: str) -> int | None:
        array = get(name)
        return None if array is None else int(array.reshape(-1)[0])

    def values(name: str) -> tuple[Any, ...]:
        array = get(name)
        return () if array is None else tuple(array.reshape(-1).tolist())

    def text(name: str) -> str | None:
        found = [one if isinstance(one, str) else one.decode() for one in values(name)]
        return found[0] if found else None

    def tops(name: str, num_places: int) -> list[Top]:
        ids, log_probs = values(f"{name}_top_ids"), values(f"{name}_top_log_probs")
        pairs, num_top = list(zip(ids, log_probs, strict=True)), len(ids) // max(1, num_places)
        return [pairs[place * num_top : (place + 1) * num_top] for place in range(num_places if pairs else 0)]

    token_ids, context_ids = values("output_ids"), values("context_ids")
    context = None
    if context_ids:
        context = Context(context_ids, values("context_log_probs"), tops("context", len(context_ids) - 1))
    histogram, accepted = values("acceptance_histogram"), number("accepted_prediction_tokens")
    acceptance = Acceptance(histogram, values("acceptance_drafted"), values("acceptance_accepted"))
    return Response(
        text=text("text_output") or "",
        token_ids=token_ids,
        finish_reason=text("finish_reason"),
        num_input_tokens=number("num_input_tokens"),
        num_output_tokens=number("num_output_tokens"),
        num_draft_tokens=number("total_draft_tokens"),
        num_accepted_tokens=number("total_accepted_draft_tokens"),
        batch_index=number("batch_index") or 0,
        sequence_index=number("sequence_index") or 0,
        log_probs=values("output_log_probs"),
        is_draft=values("output_is_draft"),
        num_cached_tokens=number("num_cached_tokens"),
        tops=tops("output", len(token_ids)),
        context=context,
        acceptance=acceptance if histogram else None,
        prediction=None if accepted is None else (accepted, number("rejected_prediction_tokens") or 0),
    )


def _response_of_json(text: bytes) -> Response:
    """Parse a JSON answer, which has no tensor shapes and no list around a single value; raise ResponseError."""
    try:
        answer = parse_json(text)
        if "error" not in answer:
            return response_of(lambda name: np.array(answer[name]) if name in answer else None)
        reason = str(answer["error"])
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        reason = f"the server's answer is not one of the model {MODEL_NAME} ({error})"
    raise ResponseError(reason)
