"""The client of the Triton model: one gRPC stream per sequence, so that each can be cancelled separately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.client import (
    CLIENT_HEADER,
    MODEL_NAME,
    Response,
    ResponseError,
    infer_input,
    response_error,
    response_of,
)

_END_TIMEOUT_S = 30.0
"""How long an abandoned stream may take to end after the model was asked to stop it."""


class Model:
    """A connection to a running Triton server. All methods must run on one event loop."""

    def __init__(self, url: str, name: str = MODEL_NAME) -> None:
        """url: host:port of the server's gRPC endpoint."""
        import tritonclient.grpc.aio as grpcclient

        self._grpc = grpcclient
        self._client = grpcclient.InferenceServerClient(url)
        self._name = name
        self._left: set[asyncio.Task[None]] = set()  # tasks that read abandoned streams to their end

    async def close(self) -> None:
        """Close the connection after abandoned streams have ended, or after _END_TIMEOUT_S."""
        if self._left:
            await asyncio.wait(self._left, timeout=_END_TIMEOUT_S)
        await self._client.close()

    async def is_ready(self) -> bool:
        """Return True if the server answers and the model is ready."""
        from tritonclient.utils import InferenceServerException

        try:
            return bool(await self._client.is_model_ready(self._name, client_timeout=5.0))
        except InferenceServerException:
            return False

    async def generate(
        self, request_id: str, prompt: str | Sequence[int], inputs: Mapping[str, Any], client_key: str = ""
    ) -> AsyncIterator[Response]:
        """Yield the responses of one sequence; leaving the iteration or cancelling the task stops it in the server.

        Every stream is read to its end before the last delta or the error is passed on, since Triton 2.51 never frees a
        stream that is cancelled after its last response, and waits for it on shutdown. If the iteration is left early,
        a stop request on the same stream therefore makes the stream end by itself.

        request_id: must differ from those of other running requests. prompt: text or token ids. inputs: further inputs
        of the Triton model by name. client_key: the client that the proxy names. Raises ResponseError with the model's
        message, or UnavailableError if the server cannot be reached.
        """
        import grpc

        name = "text_input" if isinstance(prompt, str) else "input_ids"
        first = self._request(request_id, {name: prompt, **inputs})
        is_left = asyncio.get_running_loop().create_future()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield first
            if await is_left:
                yield self._request(request_id, {"text_input": "", "stop": True})

        answers = self._client.stream_infer(requests(), headers={CLIENT_HEADER: client_key} if client_key else None)
        reading: asyncio.Future[Any] | None = None
        last: Response | FaserError | None = None
        try:
            while True:
                reading = asyncio.ensure_future(anext(answers))
                result, error = await asyncio.shield(reading)  # cancelling the read would cancel the stream
                if error is not None:
                    last = response_error(error.message(), "UNAVAILABLE")
                else:
                    delta = response_of(result.as_numpy)
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
        if not isinstance(last, Response):
            raise last or ResponseError("the server ended the stream early; send the request again", "UNAVAILABLE")
        yield last

    def _end(self, answers: Any, reading: asyncio.Future[Any]) -> None:
        """Read an abandoned stream to its end in the background. reading: its pending read."""
        task = asyncio.create_task(_read_to_end(answers, reading))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _request(self, request_id: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model_name": self._name,
            "inputs": [infer_input(self._grpc, key, value) for key, value in inputs.items()],
            "request_id": request_id,
            "parameters": {"error_codes": True},
        }


def _has_ended(reading: asyncio.Future[Any]) -> bool:
    """Return True if the read has reached the stream's end or failed."""
    return reading.done() and (reading.cancelled() or reading.exception() is not None)


async def _read_to_end(answers: Any, reading: asyncio.Future[Any]) -> None:
    """Read a stream whose model was asked to stop; cancel it if it does not end."""
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


def _failure(error: Any) -> FaserError:
    """Return the error for a failed gRPC call. Errors of the model arrive as answers instead."""
    if error.code().name == "UNAVAILABLE":
        return UnavailableError("the Triton server cannot be reached; try again in a moment")
    return response_error(error.details() or "", error.code().name)
