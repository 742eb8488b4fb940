"""The Triton model behind the API: one gRPC stream per sequence, so that each can be cancelled separately."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.openai.error import ModelError
from faser_trtllm.serving.text.finish_reason import read_finish

MODEL_NAME = "faser"

_DTYPES: Mapping[type, tuple[str, Any]] = {
    bool: ("BOOL", np.bool_),
    int: ("INT32", np.int32),
    float: ("FP32", np.float32),
}
_TOO_LONG = re.compile(r"(?: tokens, the engine takes at most \d+ \(| characters, )max_seq_len (\d+) ")
_CODE = re.compile(r"\[([A-Z_]+)\] ")
_END_TIMEOUT_S = 30.0
"""How long a stream that was left may take to end once the model was asked to stop."""
_UINT64_INPUTS = ("seed",)
_FIELDS = {"text_input": "prompt", "input_ids": "prompt", "stop_words": "stop"}
"""Input names that start an error message of the model -> field names of this API."""


Top = Sequence[tuple[int, float]]
"""The most probable tokens of a place and their log probs, best first."""


@dataclass(frozen=True, slots=True)
class Context:
    """Of a prompt: its tokens, and the log probs of all but the first. tops: beside them, or empty."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    tops: Sequence[Top]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a sequence and its tokens.

    log_probs, tops: one per token, or empty. context: with the first delta, if asked for. num_*: counts so far, 0 where
    they were not sent. Only the last delta has the rest.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    is_synthetic: bool = False  # the output is not the target's
    tops: Sequence[Top] = ()
    context: Context | None = None


class Model:
    """A connection to a running Triton server. All methods must run on one event loop."""

    def __init__(self, url: str, name: str = MODEL_NAME) -> None:
        """url: host:port of the server's gRPC endpoint."""
        import tritonclient.grpc.aio as grpcclient

        self._grpc = grpcclient
        self._client = grpcclient.InferenceServerClient(url)
        self._name = name
        self._left: set[asyncio.Task[None]] = set()  # they end the streams that were left

    async def close(self) -> None:
        """Close the connection once the streams that were left have ended, or do not."""
        if self._left:
            await asyncio.wait(self._left, timeout=_END_TIMEOUT_S)
        await self._client.close()

    async def is_ready(self) -> bool:
        """Whether the server answers and the model is ready."""
        from tritonclient.utils import InferenceServerException

        try:
            return bool(await self._client.is_model_ready(self._name, client_timeout=5.0))
        except InferenceServerException:
            return False

    async def generate(
        self, request_id: str, prompt: str | Sequence[int], inputs: Mapping[str, Any]
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one sequence; leaving the iteration or cancelling the task stops it in the server.

        Every stream is read to its end, after which the last delta or the error comes: Triton 2.51 never frees a stream
        that is cancelled after its last response, and waits for it when it stops. So one that is left early asks the
        model to stop, on the same stream, and ends by itself.

        request_id: no other that runs has it. prompt: text or token ids. inputs: further inputs of the Triton model by
        name, as Python values. Raises ModelError with the model's message, UnavailableError if the server cannot be
        reached.
        """
        import grpc

        name = "text_input" if isinstance(prompt, str) else "input_ids"
        first = self._request(request_id, {name: prompt, **inputs})
        is_left = asyncio.get_running_loop().create_future()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield first
            if await is_left:
                yield self._request(request_id, {name: prompt, "stop": True})

        answers = self._client.stream_infer(requests())
        reading: asyncio.Future[Any] | None = None
        last: Delta | FaserError | None = None
        try:
            while True:
                reading = asyncio.ensure_future(anext(answers))
                result, error = await asyncio.shield(reading)  # a read that is cancelled cancels its stream
                if error is not None:
                    last = _error_of(error.message())
                else:
                    delta = _delta_of(result.as_numpy)
                    if delta.finish_reason is None:
                        yield delta
                        continue
                    last = delta
                if not is_left.done():
                    is_left.set_result(False)
        except StopAsyncIteration:
            pass
        except grpc.aio.AioRpcError as error:
            last = last or _failure(error)
        finally:
            if not is_left.done():
                is_left.set_result(True)
            if reading is not None and not _has_ended(reading):
                self._end(answers, reading)
        if not isinstance(last, Delta):
            raise last or ModelError("the server ended the stream early; send the request again", "UNAVAILABLE")
        yield last

    def _end(self, answers: Any, reading: asyncio.Future[Any]) -> None:
        """Read a stream that was left to its end, in the background; reading: its read under way."""
        task = asyncio.create_task(_read_to_end(answers, reading))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _request(self, request_id: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model_name": self._name,
            "inputs": [self._tensor(key, value) for key, value in inputs.items()],
            "request_id": request_id,
            "parameters": {"error_codes": True},
        }

    def _tensor(self, name: str, value: Any) -> Any:
        """An input of batch size 1."""
        values: list[Any] = [value] if isinstance(value, str | bool | int | float) else list(value)
        if isinstance(values[0], str):
            dtype, array = "BYTES", np.array([[text.encode() for text in values]], dtype=np.object_)
        else:
            dtype, kind = ("UINT64", np.uint64) if name in _UINT64_INPUTS else _DTYPES[type(values[0])]
            array = np.array([values], dtype=kind)
        tensor = self._grpc.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        return tensor


def _has_ended(reading: asyncio.Future[Any]) -> bool:
    """Whether this read found the stream's end, or its failure."""
    return reading.done() and (reading.cancelled() or reading.exception() is not None)


async def _read_to_end(answers: Any, reading: asyncio.Future[Any]) -> None:
    """Read a stream whose model was asked to stop; one that does not end is cancelled."""
    import grpc

    async def read() -> None:
        await reading
        async for _ in answers:
            pass

    try:
        await asyncio.wait_for(read(), _END_TIMEOUT_S)
    except StopAsyncIteration:
        pass
    except (grpc.aio.AioRpcError, asyncio.TimeoutError, asyncio.CancelledError):
        answers.cancel()


def _delta_of(get: Any) -> Delta:
    def number(name: str) -> int:
        array = get(name)
        return 0 if array is None else int(array.reshape(-1)[0])

    def values(name: str) -> tuple[Any, ...]:
        array = get(name)
        return () if array is None else tuple(array.reshape(-1).tolist())

    def tops(name: str) -> list[Top]:
        ids, log_probs = get(f"{name}_top_ids"), get(f"{name}_top_log_probs")
        if ids is None:
            return []
        return [
            list(zip(*pair, strict=True)) for pair in zip(ids[0, 0].tolist(), log_probs[0, 0].tolist(), strict=True)
        ]

    context = None
    if get("context_ids") is not None:
        context = Context(values("context_ids"), values("context_log_probs"), tops("context"))
    reason = get("finish_reason")
    finish, is_synthetic = (None, False) if reason is None else read_finish(reason.reshape(-1)[0].decode())
    return Delta(
        text=get("text_output").reshape(-1)[0].decode(),
        token_ids=values("output_ids"),
        log_probs=values("output_log_probs"),
        finish_reason=finish,
        is_synthetic=is_synthetic,
        num_input_tokens=number("num_input_tokens"),
        num_output_tokens=number("num_output_tokens"),
        num_cached_tokens=number("num_cached_tokens"),
        tops=tops("output"),
        context=context,
    )


def _failure(error: Any) -> FaserError:
    """The error for a failed gRPC call."""
    code = str(error.code()).removeprefix("StatusCode.")
    message = _message_of(error.details())
    if code == "UNAVAILABLE" and ("connect" in message or "Socket closed" in message):
        return UnavailableError("the Triton server cannot be reached; try again in a moment")
    return ModelError(message, code)


def _message_of(details: str | None) -> str:
    """The server's message on one line, with this API's name for the field."""
    first, space, rest = " ".join((details or "the server gave no reason").split()).partition(" ")
    return f"{_FIELDS.get(first, first)}{space}{rest}"


def _error_of(details: str) -> ModelError:
    """An error of the model (prefixed with its code), or of Triton itself, which counts as UNAVAILABLE."""
    found = _CODE.match(details)
    if found is None:
        return ModelError(_message_of(details), "UNAVAILABLE")
    message = _message_of(details[found.end() :])
    if too_long := _TOO_LONG.search(message):
        # The words of OpenAI's own message, since clients such as litellm look for them and not for the code.
        message = f"this model's maximum context length is {too_long[1]} tokens: {message}"
        return ModelError(message, found[1], "context_length_exceeded")
    return ModelError(message, found[1])
