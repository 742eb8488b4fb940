"""Workers of ours behind NVIDIA Dynamo's frontend, all processes on this machine, and a client of its OpenAI API."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_S, wait_until

MODEL = "toy"


class Cluster:
    """A frontend that routes by KV cache, and two workers. Use a `with` block."""

    def __init__(self, engine_dir: Path, model_path: Path, directory: Path) -> None:
        self._directory = directory
        self._engine_dir, self._model_path = engine_dir, model_path
        self._stack = ExitStack()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

    def __enter__(self) -> Cluster:
        with ExitStack() as guard:
            guard.callback(self._stack.close)
            planes = ("--event-plane", "zmq")
            routing = ("--http-port", str(self.port), "--http-host", "127.0.0.1", "--router-mode", "kv")
            self._start("frontend", "dynamo.frontend", "--discovery-backend", "file", *planes, *routing)
            self.workers = [self._start_worker(index) for index in range(2)]
            wait_until(self._is_ready)
            guard.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A greedy completion, whole; asked again while the frontend has not noticed that a worker is gone."""
        status, body = self._post(prompt, max_tokens)
        deadline_s = time.monotonic() + PATIENCE_S
        while status == 503 and time.monotonic() < deadline_s:
            status, body = self._post(prompt, max_tokens)
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def num_cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the worker had."""
        details = self.complete(prompt, 2)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    def stream(self, prompt: list[int], max_tokens: int) -> Stream:
        """A greedy completion, streamed by a thread."""
        found = Stream()
        threading.Thread(target=found.read, args=(self.port, _request(prompt, max_tokens, True)), daemon=True).start()
        return found

    def _post(self, prompt: list[int], max_tokens: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", _request(prompt, max_tokens, False), _HEADERS)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def _log(self, name: str) -> str:
        text = (self._directory / f"{name}.log").read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def _is_ready(self) -> bool:
        for process in self.workers:
            assert process.poll() is None, self._log("worker0") + self._log("worker1")
        routed_to = set(re.findall(r"Adding worker WorkerWithDpRank \{ worker_id: (\d+)", self._log("frontend")))
        return len(routed_to) == len(self.workers) and self._has_model()

    def _has_model(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", "/v1/models")
        return bool(json.loads(connection.getresponse().read())["data"])

    def _start_worker(self, index: int) -> subprocess.Popen[bytes]:
        arguments = ("--engine_dir", str(self._engine_dir), "--model_path", str(self._model_path))
        planes = ("--discovery_backend", "file", "--event_plane", "zmq", "--speculation", "fixed:4")
        module = "faser_trtllm.serving.dynamo.worker"
        return self._start(f"worker{index}", module, *arguments, "--served_model_name", MODEL, *planes)

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        environment = os.environ | {"DYN_FILE_KV": str(self._directory / "discovery")}
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._stack.callback(_kill, process)
        return process


@dataclass
class Stream:
    """text, and how it ended: by a finish reason, or an error, or neither, which is what must not be."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)

    def read(self, port: int, request: str) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * PATIENCE_S)
            connection.request("POST", "/v1/completions", request, _HEADERS)
            response = connection.getresponse()
            if response.status != 200:
                self.error = f"{response.status} {response.read()!r}"
                return
            for line in response:
                self._take(line.decode().strip())
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            self.has_ended.set()

    def _take(self, line: str) -> None:
        if line.startswith("event: error"):
            self.error = line
        elif line.startswith("data: {"):
            data = json.loads(line.removeprefix("data: "))
            if "error" in data or "choices" not in data:
                self.error = line
                return
            for choice in data["choices"]:
                self.text += choice["text"]
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


_HEADERS = {"Content-Type": "application/json"}


def _request(prompt: list[int], max_tokens: int, stream: bool) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return json.dumps(body | {"ignore_eos": True})


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
