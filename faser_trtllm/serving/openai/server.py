"""`faser openai`: runs the application with uvicorn, for a running Triton server or one that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.request_field import Bounds
from faser_trtllm.errors import InvalidArgumentError, UnavailableError, install
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.launch.launcher import keep_serving
from faser_trtllm.serving.launch.limits import MAX_OPEN_FILES
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.signals import stop_on_signals
from faser_trtllm.serving.launch.tritonserver import is_loopback
from faser_trtllm.serving.openai.drafts.records import LEVELS
from faser_trtllm.serving.openai.served_model import ServedModel
from faser_trtllm.serving.parsers.registry import detect, parser_names

if TYPE_CHECKING:
    import uvicorn

KEY_VARIABLE = "FASER_API_KEY"
MAX_STREAM_PADDING = 16 << 10
_WATCH_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """The options of `faser openai`.

    triton.engine_dir also has the tokenizer and chat template; with url and without it, chat and logprobs are refused.
    """

    url: str | None = None  # gRPC endpoint of a running Triton server; None starts one with the options `triton`
    host: str = "127.0.0.1"
    port: int = 9000
    served_model_name: str = "faser"
    chat_template: Path | None = None  # overrides the model's
    tool_call_parser: str | None = None  # a name or "none"; None detects it from the chat template
    reasoning_parser: str | None = None  # a name or "none"; None detects it from the chat template
    per_request_spec_decode_metrics: str = "none"  # one of records.LEVELS
    max_body_bytes: int | None = None
    max_connections: int = 4096
    stream_padding: int = 0  # pads events of streams to a multiple of this many bytes; 0: only if the client asks
    api_key: str | None = None  # must be sent by clients
    allow_no_key: bool = False  # listen on any host without a key
    allowed_origins: tuple[str, ...] = ()  # of web pages, for CORS
    metrics_url: str | None = None  # Triton's metrics; None: those of the server started here
    triton: ServeOptions = field(default_factory=ServeOptions)


def serve_openai(options: OpenAIOptions) -> int:
    """Serve until SIGTERM or SIGINT. Return 0 after a drain, 1 if the Triton server ended by itself.

    A Triton server that a signal ended is started again, as by `faser serve`. Raises FaserError if it cannot start.
    """
    _check_installed()
    Bounds(1, 65535).check("port", options.port)
    if options.max_body_bytes is not None:
        Bounds(1024, 64 << 20).check("max_body_bytes", options.max_body_bytes)
    Bounds(1, MAX_OPEN_FILES).check("max_connections", options.max_connections)
    Bounds(0, MAX_STREAM_PADDING).check("stream_padding", options.stream_padding)
    if options.per_request_spec_decode_metrics not in LEVELS:
        raise InvalidArgumentError(
            f"is {options.per_request_spec_decode_metrics}, allowed are {', '.join(LEVELS)}",
            "per_request_spec_decode_metrics",
        )
    if options.api_key is not None and not re.fullmatch(r"[!-~]{1,256}", options.api_key):
        raise InvalidArgumentError("api_key must have 1 to 256 visible ASCII characters; choose another")
    if options.api_key is None and not options.allow_no_key and not is_loopback(options.host):
        raise InvalidArgumentError(
            f"is {options.host}, where anyone who can reach it may send requests, since there is no API key; set "
            "FASER_API_KEY, listen on 127.0.0.1 next to a proxy that authenticates, or add --allow_no_key",
            "host",
        )
    os.environ.pop(KEY_VARIABLE, None)  # Triton and the engine process inherit the rest
    _check_url(options)
    served = _served_model(options)
    stop, hurry, draft_changed = (threading.Event() for _ in range(3))
    # When it ends, uvicorn raises the signals that it got again: the default handlers would end this before Triton.
    with _listen(options.host, options.port) as listener, stop_on_signals(stop, hurry, draft_changed):
        if options.url is not None:
            asyncio.run(_serve(options, served, _grpc_address(options.url), listener, None, stop))
            return 0
        triton = _OwnTriton(options.triton, hurry, draft_changed)
        try:
            if triton.wait_ready(stop):
                address = f"{options.triton.host}:{options.triton.grpc_port}"
                asyncio.run(_serve(options, served, address, listener, triton, stop))
        finally:
            code = triton.stop()
        return code


class _OwnTriton:
    """A Triton server that is kept running in a thread."""

    def __init__(self, options: ServeOptions, hurry: threading.Event, draft_changed: threading.Event) -> None:
        self._options = options
        self._hurry, self._draft_changed = hurry, draft_changed
        self._ready, self._stop = threading.Event(), threading.Event()
        self._code = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="faser-triton")
        self._thread.start()

    @property
    def is_kept(self) -> bool:
        """True while the server runs or is started again."""
        return self._thread.is_alive()

    def wait_ready(self, stop: threading.Event) -> bool:
        """Wait until it serves for the first time; return False if `stop` was set or it ended first."""
        while self.is_kept and not stop.is_set():
            if self._ready.wait(_WATCH_PERIOD_S):
                return True
        return False

    def stop(self) -> int:
        """Drain it; return 1 if it had ended by itself. Raise what ended its thread, such as a failed start."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._code

    def _run(self) -> None:
        try:
            self._code = keep_serving(
                self._options, self._stop, self._hurry, lambda *_: self._note_ready(), self._draft_changed
            )
        except Exception as error:
            self._error = error

    def _note_ready(self) -> None:
        if self._ready.is_set():
            print("the server is ready again", file=sys.stderr, flush=True)
        self._ready.set()


async def _serve(
    options: OpenAIOptions,
    served: ServedModel,
    address: str,
    listener: socket.socket,
    triton: _OwnTriton | None,
    stop: threading.Event,
) -> None:
    from faser_trtllm.serving.openai.app import MAX_BODY_BYTES, Service, build_app
    from faser_trtllm.serving.openai.connection import http_server
    from faser_trtllm.serving.openai.model import Model

    model = Model(address)
    if triton is None and not await model.is_ready():
        await model.close()
        raise UnavailableError(f"no Triton server with a ready model answers at {address}; start it or correct --url")
    metrics_url = options.metrics_url
    if triton is not None:
        metrics_url = f"http://{options.triton.host}:{options.triton.metrics_port}/metrics"
    service = Service(
        model,
        served,
        options.max_body_bytes or MAX_BODY_BYTES,
        metrics_url,
        options.api_key,
        options.allowed_origins,
        options.stream_padding,
    )
    server = http_server(build_app(service), options.max_connections)
    watch = asyncio.create_task(_watch(server, options, triton, stop))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(
    server: uvicorn.Server, options: OpenAIOptions, triton: _OwnTriton | None, stop: threading.Event
) -> None:
    """Print when the server is ready; stop with the Triton server, or on a signal that uvicorn did not get."""
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"ready: {options.served_model_name} on http://{options.host}:{options.port}/v1", flush=True)
    while not stop.is_set() and (triton is None or triton.is_kept):
        await asyncio.sleep(_WATCH_PERIOD_S)
    server.should_exit = True


def _served_model(options: OpenAIOptions) -> ServedModel:
    engine_dir = options.triton.engine_dir
    if engine_dir is None:
        if options.url is None:
            raise InvalidArgumentError("engine_dir is not set; pass --engine_dir, or a running server with --url")
        if options.chat_template is not None:
            raise InvalidArgumentError("chat_template needs the tokenizer's files; pass --engine_dir")
        return ServedModel(options.served_model_name, spec_decode_metrics=options.per_request_spec_decode_metrics)
    from faser_trtllm.serving.openai.chat_template import ChatTemplate

    engines = EngineDir.load(engine_dir)
    tokenizer = Tokenizer.load(engines.tokenizer_dir, engines.vocab_size)
    template = ChatTemplate.load(engines.tokenizer_dir, tokenizer, options.chat_template)
    found = (None, None) if template is None else detect(template.source)
    known = parser_names()
    return ServedModel(
        options.served_model_name,
        tokenizer,
        template,
        engines.build_config.max_seq_len,
        _parser("tool_call_parser", options.tool_call_parser, found[0], known[0]),
        _parser("reasoning_parser", options.reasoning_parser, found[1], known[1]),
        options.per_request_spec_decode_metrics,
    )


def _parser(option: str, asked: str | None, detected: str | None, known: Sequence[str]) -> str | None:
    """Return the requested parser, or else the detected one."""
    if asked is None:
        return detected
    if asked not in ("none", *known):
        raise InvalidArgumentError(f"is {asked}, allowed are none, {', '.join(known)}", option)
    return None if asked == "none" else asked


def _check_url(options: OpenAIOptions) -> None:
    """Refuse options that only apply to a server started here."""
    for name in ("config", "speculation", "drafters", "num_branches"):
        value = getattr(options.triton, name)
        if options.url is not None and value is not None:
            raise InvalidArgumentError(
                f"{name} is {value}, which only applies when a Triton server starts, but the one at url {options.url} "
                "is already running; start that server with it, or leave url out"
            )


def _grpc_address(url: str) -> str:
    """Return host:port of grpc://host:port."""
    scheme, found, address = url.rpartition("://")
    host, _, port = address.rstrip("/").rpartition(":")
    if (found and scheme != "grpc") or not host or not port.isdigit():
        raise InvalidArgumentError(f"url is {url!r}; it must look like grpc://127.0.0.1:8001")
    return f"{host}:{port}"


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket. This comes first, so that a port in use is noticed before anything is started."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InvalidArgumentError(
                f"port {port} on {host} cannot be used, it is taken or not allowed; stop what uses it or take another "
                "with --port"
            ) from error
        yield listener


def _check_installed() -> None:
    try:
        import jinja2
        import starlette
        import tritonclient.grpc
        import uvicorn
    except ImportError as error:
        raise InvalidArgumentError(f"the package {error.name} is missing; run {install('serve,openai')}") from error
    del jinja2, starlette, tritonclient, uvicorn
