"""`faser openai`: runs the application under uvicorn, with a running Triton server or one that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.errors import InvalidArgumentError, UnavailableError, install
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.openai.request import ServedModel

if TYPE_CHECKING:
    import uvicorn

_DRAIN_TIMEOUT_S = 30
_WATCH_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """The options of `faser openai`.

    url: gRPC endpoint of a running Triton server; None starts one with the options `triton`.
    triton.engine_dir: also has the tokenizer and chat template; None with url: no chat and no logprobs.
    chat_template: overrides the model's. api_key: that clients must send. allowed_origins: of web pages, for CORS.
    metrics_url: Triton's metrics page; None is that of the server started here.
    """

    url: str | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    served_model_name: str = "faser"
    chat_template: Path | None = None
    max_body_bytes: int | None = None
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    metrics_url: str | None = None
    triton: ServeOptions = field(default_factory=ServeOptions)


def serve_openai(options: OpenAIOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a drain, 1 if the Triton server ended by itself.

    Raises FaserError if it cannot start.
    """
    _check_installed()
    if not 1 <= options.port <= 65535:
        raise InvalidArgumentError(f"port is {options.port}, allowed is 1 to 65535")
    if options.max_body_bytes is not None and not 1024 <= options.max_body_bytes <= 64 << 20:
        raise InvalidArgumentError(f"max_body_bytes is {options.max_body_bytes}, allowed is 1024 to {64 << 20}")
    if options.api_key is not None and not re.fullmatch(r"[!-~]{1,256}", options.api_key):
        raise InvalidArgumentError("api_key has other characters than 1 to 256 visible ASCII ones; choose another")
    served = _served_model(options)
    stop = threading.Event()
    with _listen(options.host, options.port) as listener, contextlib.ExitStack() as stack:
        if options.url is not None:
            stack.enter_context(_signals(stop))
            return asyncio.run(_serve(options, served, _grpc_address(options.url), listener, None, stop))
        launcher = stack.enter_context(Launcher(options.triton))
        stack.enter_context(_signals(stop, launcher))
        launcher.start()
        code = 0
        if launcher.wait_ready(stop):
            address = f"{options.triton.host}:{options.triton.grpc_port}"
            code = asyncio.run(_serve(options, served, address, listener, launcher, stop))
        launcher.stop()
        return code


async def _serve(
    options: OpenAIOptions,
    served: ServedModel,
    address: str,
    listener: socket.socket,
    launcher: Launcher | None,
    stop: threading.Event,
) -> int:
    import uvicorn

    from faser_trtllm.serving.openai.app import MAX_BODY_BYTES, Service, build_app
    from faser_trtllm.serving.openai.model import Model

    model = Model(address)
    if launcher is None and not await model.is_ready():
        await model.close()
        raise UnavailableError(f"no Triton server with a ready model answers at {address}; start it or correct --url")
    metrics_url = options.metrics_url
    if launcher is not None:
        metrics_url = f"http://{options.triton.host}:{options.triton.metrics_port}/metrics"
    limit = options.max_body_bytes or MAX_BODY_BYTES
    app = build_app(Service(model, served, limit, metrics_url, options.api_key, options.allowed_origins))
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_TIMEOUT_S,
    )
    server = uvicorn.Server(config)
    watch = asyncio.create_task(_watch(server, options, launcher, stop))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    if launcher is not None and not launcher.is_running():
        print("the Triton server ended by itself; see its messages", file=sys.stderr, flush=True)
        return 1
    return 0


async def _watch(
    server: uvicorn.Server, options: OpenAIOptions, launcher: Launcher | None, stop: threading.Event
) -> None:
    """Print when requests are served; stop with the Triton server, or on a signal that uvicorn did not see."""
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"ready: {options.served_model_name} on http://{options.host}:{options.port}/v1", flush=True)
    while not stop.is_set() and (launcher is None or launcher.is_running()):
        await asyncio.sleep(_WATCH_PERIOD_S)
    server.should_exit = True


def _served_model(options: OpenAIOptions) -> ServedModel:
    engine_dir = options.triton.engine_dir
    if engine_dir is None:
        if options.url is None:
            raise InvalidArgumentError("engine_dir is not set; pass --engine_dir, or a running server with --url")
        if options.chat_template is not None:
            raise InvalidArgumentError("chat_template needs the tokenizer's files; pass --engine_dir")
        return ServedModel(options.served_model_name)
    from faser_trtllm.serving.openai.chat_template import ChatTemplate

    engines = EngineDir.load(engine_dir)
    tokenizer = Tokenizer.load(engines.tokenizer_dir)
    template = ChatTemplate.load(engines.tokenizer_dir, tokenizer, options.chat_template)
    return ServedModel(options.served_model_name, tokenizer, template, engines.build_config.max_seq_len)


def _grpc_address(url: str) -> str:
    """host:port of grpc://host:port."""
    scheme, found, address = url.rpartition("://")
    host, _, port = address.rstrip("/").rpartition(":")
    if (found and scheme != "grpc") or not host or not port.isdigit():
        raise InvalidArgumentError(f"url is {url!r}, it must look like grpc://127.0.0.1:8001")
    return f"{host}:{port}"


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; binding comes first, so that a port in use is noticed before anything is started."""
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


@contextlib.contextmanager
def _signals(stop: threading.Event, launcher: Launcher | None = None) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second signal skips the wait for running requests.

    uvicorn installs its own handlers while it runs and raises the signal again afterwards: without these handlers that
    would end the process before the Triton server.
    """

    def on_signal(signum: int, frame: object) -> None:
        if stop.is_set() and launcher is not None:
            launcher.hurry.set()
        stop.set()

    previous = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _check_installed() -> None:
    try:
        import jinja2
        import starlette
        import tritonclient.grpc
        import uvicorn
    except ImportError as error:
        raise InvalidArgumentError(f"the package {error.name} is missing; run {install('serve,openai')}") from error
    del jinja2, starlette, tritonclient, uvicorn
