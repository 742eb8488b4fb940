"""The ASGI application: OpenAI's routes over the Triton model."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.client import CLIENT_HEADER, ResponseError
from faser_trtllm.serving.client import Response as Delta
from faser_trtllm.serving.observe.page import fresh_page
from faser_trtllm.serving.openai.error import RequestError, error_object, status_of
from faser_trtllm.serving.openai.generation import Generation
from faser_trtllm.serving.openai.intake import Intake, Parse
from faser_trtllm.serving.openai.model import Model
from faser_trtllm.serving.openai.reply import LAST_EVENT, Reply, encode, event
from faser_trtllm.serving.openai.request import (
    GenerationRequest,
    parse_chat,
    parse_completion,
    unknown_model,
)
from faser_trtllm.serving.openai.responses.reply import ResponsesReply, named_event
from faser_trtllm.serving.openai.responses.request import parse_responses
from faser_trtllm.serving.openai.served_model import ServedModel

log = logging.getLogger("faser.openai")

MAX_BODY_BYTES = 4 << 20
DEFAULT_PADDING = 512  # bytes; an event with the text of a step and few log probs is smaller
_RETRY_AFTER_S = "1"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by the routes."""

    model: Model
    served: ServedModel
    max_body_bytes: int = MAX_BODY_BYTES
    metrics_url: str | None = None  # Triton's metrics; without it there is no /metrics
    api_key: str | None = None  # required for /v1, if set
    allowed_origins: tuple[str, ...] = ()  # web pages that may read answers; "*" allows all
    stream_padding: int = 0  # bytes; for requests that do not set include_obfuscation

    def padding(self, request: GenerationRequest) -> int:
        """Return n if each event of the stream is padded to a multiple of n bytes; 0 for no padding."""
        is_padded = request.options.include_obfuscation
        if is_padded is None:
            return self.stream_padding
        return (self.stream_padding or DEFAULT_PADDING) if is_padded else 0


def build_app(service: Service) -> Starlette:
    """Build the application; its shutdown closes the connection to the model."""
    started_s = int(time.time())
    intake = Intake(service.served, service.max_body_bytes)
    card = {"id": service.served.name, "object": "model", "created": started_s, "owned_by": "faser"}
    if service.served.max_seq_len is not None:
        card["max_model_len"] = service.served.max_seq_len

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": [card]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.served.name:
            return _error(unknown_model(name, service.served.name))
        return _json(card)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if await service.model.is_ready() else 503)

    async def metrics(request: Request) -> Response:
        if service.metrics_url is None:
            return _error(RequestError("there are no metrics here; start the server with --metrics_url", status=404))
        try:
            page = await fresh_page(service.metrics_url)
        except OSError:
            return _error(UnavailableError("the Triton server's metrics cannot be reached; try again in a moment"))
        return Response(page, media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.model.close()

    responses = _Api(parse_responses, ResponsesReply, named_event, last_event=b"")
    return Starlette(
        routes=[
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/v1/completions", _Endpoint(service, intake, _Api(parse_completion)), methods=["POST"]),
            Route("/v1/chat/completions", _Endpoint(service, intake, _Api(parse_chat)), methods=["POST"]),
            Route("/v1/responses", _Endpoint(service, intake, responses), methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=_middleware(service),
        exception_handlers={HTTPException: _on_http_error},
        lifespan=lifespan,
    )


def _middleware(service: Service) -> list[Middleware]:
    """Return the middleware, outermost first. CORS comes before the key, which preflight requests do not have."""
    layers = []
    if service.allowed_origins:
        origins = list(service.allowed_origins)
        layers.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    if service.api_key is not None:
        layers.append(Middleware(_Keyed, api_key=service.api_key))
    return layers


class _Keyed:
    """Requires the key for /v1; health and metrics are open, as in vLLM."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
                error = RequestError(message, status=401, reason="invalid_api_key")
                await _error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Api:
    """How a route reads requests and writes answers."""

    parse: Parse
    reply: type[Reply | ResponsesReply] = Reply
    event: Callable[[Any, int], bytes] = event
    last_event: bytes = LAST_EVENT  # ends a stream


class _Endpoint:
    """A route that generates text. It is plain ASGI, so that all work for a request ends with its connection."""

    def __init__(self, service: Service, intake: Intake, api: _Api) -> None:
        self._service = service
        self._intake = intake
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(scope, receive, send)
        try:
            request = await self._intake.read(scope, receive, self._api.parse)
            if request is not None:
                await _while_connected(receive, self._answer(request, _client_key(scope), writer))
        except FaserError as error:
            await writer.fail(error)
        except Exception:
            log.exception("a request failed")
            await writer.fail(FaserError("the request failed in the server; see its log"))

    async def _answer(self, request: GenerationRequest, client_key: str, writer: _Writer) -> None:
        service = self._service
        reply = self._api.reply(request, service.served.name, service.served.tokenizer)
        try:
            async with Generation(service.model, reply.id, request, client_key) as generation:
                if request.stream:
                    await _stream(generation.deltas(), reply, self._api, writer, service.padding(request))
                    return
                async for index, delta in generation.deltas():
                    await _spelled(reply.add, index, delta)
        except ResponseError as error:
            raise request.named(error) from error
        await writer.respond(_json(reply.whole()))


async def _stream(
    deltas: AsyncIterator[tuple[int, Delta]], reply: Reply | ResponsesReply, api: _Api, writer: _Writer, padding: int
) -> None:
    """Stream the answer. Nothing is sent before the first delta, so that a refused request gets an HTTP status."""
    async for index, delta in deltas:
        chunks = await _spelled(reply.chunks, index, delta)
        if not writer.has_started:
            await writer.start_events()
            chunks = [*reply.first_chunks(), *chunks]
        if chunks:
            await writer.write(b"".join(api.event(chunk, padding) for chunk in chunks))
    await writer.write(b"".join(api.event(chunk, padding) for chunk in reply.last_chunks()) + api.last_event)
    await writer.end()


async def _spelled(spell: Callable[[int, Delta], T], index: int, delta: Delta) -> T:
    """Format a delta, in a thread if it has a prompt's tokens, since other streams must not wait for long prompts."""
    return spell(index, delta) if delta.context is None else await asyncio.to_thread(spell, index, delta)


class _Writer:
    """Writes the response of one request, either whole or as a stream of events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.has_started = False

    async def respond(self, response: Response) -> None:
        self.has_started = True
        await response(self._scope, self._receive, self._send)

    async def start_events(self) -> None:
        self.has_started = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: FaserError) -> None:
        """Send an error as the response, or as the last event of a stream."""
        if not self.has_started:
            await self.respond(_error(error))
            return
        await self.write(event(error_object(error)))
        await self.end()


def _client_key(scope: Scope) -> str:
    """Return the key of the client that the proxy names, or ""; raise RequestError."""
    value: bytes = dict(scope["headers"]).get(CLIENT_HEADER.encode(), b"")
    if not re.fullmatch(rb"[ -~]*", value):
        raise RequestError(
            f"the header {CLIENT_HEADER} is {value.decode('latin-1')!r:.80}; it must hold only printable ASCII "
            "characters (space to ~); leave out the others"
        )
    return value.decode()


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work` and cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        has_ended = task.done()
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if has_ended:
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def _error(error: FaserError) -> Response:
    status = status_of(error)
    return _json(error_object(error), status, {"Retry-After": _RETRY_AFTER_S} if status == 503 else None)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:100]}"
    message = f"{what} is not served here; see /v1/models, /v1/completions, /v1/chat/completions and /v1/responses"
    return _error(RequestError(message, status=error.status_code))
