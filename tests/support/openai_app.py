"""OpenAI's application, under uvicorn as `faser openai` runs it, over a model that gives the same text for ever."""

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import threading

from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.app import Service, build_app
from faser_trtllm.serving.openai.connection import http_server
from faser_trtllm.serving.openai.served_model import ServedModel
from tests.support.triton_server import ROOT
from tests.support.waiting import wait_until


class EndlessModel:
    """Gives max_tokens deltas a sequence, each of `num_chars` characters; counts the sequences that run."""

    def __init__(self, num_chars=3):
        self.num_chars = num_chars
        self.num_open = 0

    async def is_ready(self):
        return True

    async def close(self):
        pass

    async def generate(self, request_id, prompt, inputs, client_key=""):
        self.num_open += 1
        try:
            for i in range(inputs["max_tokens"]):
                await asyncio.sleep(0)
                is_last = i == inputs["max_tokens"] - 1
                yield Response("x" * self.num_chars, (i,), "length" if is_last else None, 1, i + 1)
        finally:
            self.num_open -= 1


class _Clients:
    """Connections to 127.0.0.1:port."""

    port: int

    def __init__(self):
        self._clients = contextlib.ExitStack()

    def connect(self, data=b""):
        """A connection that has sent `data`; it is closed at the end."""
        client = self._clients.enter_context(socket.create_connection(("127.0.0.1", self.port), 20))
        client.sendall(data)
        return client

    def ask(self, data):
        """The whole answer to a request on a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), 20) as client:
            client.sendall(data)
            return read_all(client)


class App(_Clients):
    """The application in a thread."""

    def __init__(self, max_connections, model=None):
        super().__init__()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        app = build_app(Service(model or EndlessModel(), ServedModel("faser")))
        self._server = http_server(app, max_connections)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *exception):
        self._clients.close()
        self._server.should_exit = True
        self._thread.join()


class AppProcess(_Clients):
    """The application in a process with a limit of open files of its own, and a log."""

    def __init__(self, log, max_connections, num_files):
        super().__init__()
        self.log = log
        with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as file:
            self.port = listener.getsockname()[1]
            numbers = (listener.fileno(), max_connections, num_files)
            command = [sys.executable, "-m", "tests.support.openai_app", *map(str, numbers)]
            descriptors = {"stdout": file, "stderr": file, "pass_fds": [listener.fileno()]}
            self._process = subprocess.Popen(command, cwd=ROOT, **descriptors)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._clients.close()
        self._process.kill()
        self._process.wait()


def read_all(client):
    """Return what the server sends until it closes or resets the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            answer += data
    return answer


def is_closed(client):
    """True if the server has closed the connection; it never waits."""
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        client.settimeout(20)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def completion(max_tokens, stream=False, close=True):
    """A request for a completion."""
    body = b'{"model": "faser", "prompt": "a", "max_tokens": %d, "stream": %s}' % (
        max_tokens,
        str(stream).lower().encode(),
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return head % len(body) + (b"Connection: close\r\n\r\n" if close else b"\r\n") + body


def main():
    descriptor, max_connections, num_files = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    server = http_server(build_app(Service(EndlessModel(), ServedModel("faser"))), max_connections)
    server.run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main()
