"""Reads and parses request bodies, with limits on time, memory and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.types import Receive, Scope

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.fields import parse_object
from faser_trtllm.serving.openai.request import GenerationRequest
from faser_trtllm.serving.openai.served_model import ServedModel

BODY_TIMEOUT_S = 30.0
SMALL_BODY_BYTES = 16 << 10
MAX_BODIES_BYTES = 256 << 20  # in all bodies read or parsed at a time; small bodies are always read
MAX_WAITING_BODIES = 64
NUM_PARSERS = 2
_DRAINED_BODIES = 4  # bodies are read up to this many times their limit, so that the client gets the error

Parse = Callable[[Mapping[str, Any], ServedModel], GenerationRequest]


class Intake:
    """Reads bodies; parses small ones in any thread and others in order on NUM_PARSERS threads. For one event loop."""

    def __init__(self, served: ServedModel, max_body_bytes: int) -> None:
        self._served = served
        self._max_body_bytes = max_body_bytes
        self._parsers = ThreadPoolExecutor(NUM_PARSERS, "faser-parser")
        self._num_waiting = 0
        self._num_bytes = 0

    async def read(self, scope: Scope, receive: Receive, parse: Parse) -> GenerationRequest | None:
        """Read a request; return None if the client disconnected. Raises RequestError or UnavailableError.

        Only application/json is accepted: browsers let pages of other origins post other types without a preflight.
        """
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RequestError(
                f"content-type is {content_type[:60] or 'missing'!r}, allowed is application/json", status=415
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > _DRAINED_BODIES * self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            if not await asyncio.wait_for(self._read_body(receive, body), BODY_TIMEOUT_S):
                return None
            return await self._parse(body, parse)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it faster"
            raise RequestError(message, status=408) from None
        finally:
            self._num_bytes -= len(body)

    async def _read_body(self, receive: Receive, body: bytearray) -> bool:
        """Read into `body`; return False if the client disconnected. Raises RequestError or UnavailableError."""
        num_bytes = 0
        while num_bytes <= _DRAINED_BODIES * self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes <= self._max_body_bytes:
                if self._num_bytes + len(chunk) > MAX_BODIES_BYTES and num_bytes > SMALL_BODY_BYTES:
                    raise _busy()
                body += chunk
                self._num_bytes += len(chunk)
            if not message.get("more_body", False):
                break
        if num_bytes > self._max_body_bytes:
            raise self._too_large()
        return True

    async def _parse(self, body: bytearray, parse: Parse) -> GenerationRequest:
        """Parse in a thread, since templates and tokenizers can take long and other streams must not wait for them."""

        def work() -> GenerationRequest:
            return parse(parse_object(bytes(body)), self._served)

        if len(body) <= SMALL_BODY_BYTES:
            return await asyncio.to_thread(work)
        if self._num_waiting >= MAX_WAITING_BODIES:
            raise _busy()
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._parsers, work)
        finally:
            self._num_waiting -= 1

    def _too_large(self) -> RequestError:
        limit = self._max_body_bytes
        return RequestError(f"the body has more than {limit} bytes (max_body_bytes); shorten it", status=413)


def _busy() -> UnavailableError:
    return UnavailableError("the server is reading as many large requests as it can; try again in a moment")
