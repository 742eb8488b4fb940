"""Limits on the OpenAI server's connections: their number, and the time that each may take."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.launch.limits import raise_open_files
from faser_trtllm.serving.openai.log import set_up_log

HEADERS_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
_DRAIN_TIMEOUT_S = 30
_ACCEPTED_PER_TURN = 32
_BACKLOG = 2048
_OTHER_FILES = 256  # libraries, the listener, the connection to Triton, connections just accepted or closed
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

log = logging.getLogger("faser.openai")


class Server(uvicorn.Server):
    """A server that accepts few connections per turn of the event loop, so that a burst does not delay requests."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio's `backlog` also limits how many it accepts per turn


def http_server(app: ASGIApp, max_connections: int) -> uvicorn.Server:
    """Set up the log and return a server for the app; raise UnavailableError if the limit of open files is too low."""
    set_up_log()
    return Server(
        uvicorn.Config(
            app,
            http=_bounded_protocol(_possible_connections(max_connections)),
            ws="none",
            loop="asyncio",
            backlog=_ACCEPTED_PER_TURN,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_TIMEOUT_S,
        )
    )


def _possible_connections(wanted: int) -> int:
    """Set the limit of open files; return how many of the connections it allows, or raise UnavailableError."""
    num_files = raise_open_files()
    possible = min(wanted, num_files - _OTHER_FILES)
    if possible < 1:
        raise UnavailableError(
            f"this process may open {num_files} files, at least {_OTHER_FILES + 1} are needed; raise the "
            "limit (ulimit -Hn)"
        )
    return possible


def _bounded_protocol(max_connections: int) -> type[asyncio.Protocol]:
    """Return a protocol for uvicorn with at most max_connections connections.

    A connection that waits for a request is closed after HEADERS_TIMEOUT_S. If there are too many connections, the one
    that has waited longest for a request or the rest of its body is closed; if none waits, the new one gets 503. A
    client that does not read its response for READ_TIMEOUT_S is disconnected.
    """
    waiting: dict[BoundedProtocol, None] = {}  # connections without a complete request, longest wait first

    class BoundedProtocol(H11Protocol):
        _headers_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                if not waiting:
                    log.warning("a connection was refused, %d are open and busy", max_connections)
                    transport.write(_REFUSAL)
                    transport.close()
                    return
                oldest = next(iter(waiting))
                del waiting[oldest]
                oldest.transport.abort()
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            for timer in (self._headers_timer, self._read_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._note_request()

        def on_response_complete(self) -> None:
            self._wait()
            super().on_response_complete()  # starts the next request if it has arrived
            self._note_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._read_timer is not None:
                self._read_timer.cancel()

        def _wait(self) -> None:
            waiting.pop(self, None)
            waiting[self] = None
            if self._headers_timer is not None:
                self._headers_timer.cancel()
            self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._give_up)

        def _give_up(self) -> None:
            if self.transport.get_write_buffer_size():  # the client is still reading its response
                self._headers_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)
            else:
                self.transport.abort()

        def _note_request(self) -> None:
            """Stop the headers' timer once they are complete, and stop waiting once the request is complete."""
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                return
            if self._headers_timer is not None:
                self._headers_timer.cancel()
            if not cycle.more_body:
                waiting.pop(self, None)

    return BoundedProtocol
