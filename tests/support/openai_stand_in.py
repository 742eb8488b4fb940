"""A small OpenAI server that shares no code with ours: it streams words, with vLLM's records and counters.

It refuses every field that vLLM's own server would not know, so that a client that passes here sends nothing of ours.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {"model", "stream", "stream_options", "temperature", "seed", "ignore_eos"}
KNOWN_OF = {
    "/v1/completions": KNOWN | {"prompt", "max_tokens"},
    "/v1/chat/completions": KNOWN | {"messages", "max_tokens", "max_completion_tokens"},
}


class StandIn:
    """Answers in num_pieces pieces of two tokens, piece_s apart, the first after first_s. Use as a context manager.

    fail: status of the answer to a prompt, 200 if all is well; 0 breaks the stream off. records: whether answers have
    vLLM's record. counts: whether /metrics has its counters. bodies: what was asked, in order.
    """

    def __init__(
        self,
        *,
        num_pieces: int = 3,
        first_s: float = 0.0,
        piece_s: float = 0.0,
        records: bool = True,
        counts: bool = True,
        usage: bool = True,
        fail: Callable[[str], int] = lambda prompt: 200,
    ) -> None:
        self.num_pieces, self.first_s, self.piece_s = num_pieces, first_s, piece_s
        self.records, self.counts, self.usage, self.fail = records, counts, usage, fail
        self.bodies: list[dict[str, Any]] = []
        self.arrived_s: list[float] = []
        self.most_running = 0
        self._running = 0
        self._lock = threading.Lock()
        self.num_steps = self.num_accepted = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                stand_in._get(self)

            def do_POST(self) -> None:
                stand_in._post(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            _send(handler, 200, json.dumps({"object": "list", "data": [{"id": "stand-in"}]}))
        elif handler.path == "/metrics" and self.counts:
            names = {"num_drafts": self.num_steps, "num_draft_tokens": 3 * self.num_steps}
            names["num_accepted_tokens"] = self.num_accepted
            lines = [f'vllm:spec_decode_{name}_total{{engine="0"}} {float(value)}' for name, value in names.items()]
            for position in range(3):
                value = self.num_accepted if position == 0 else 0
                lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {value}')
            _send(handler, 200, "\n".join(lines) + "\n")
        else:
            _send(handler, 404, json.dumps({"error": {"message": "not here"}}))

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        is_chat = handler.path.endswith("chat/completions")
        with self._lock:
            self.bodies.append(body)
            self.arrived_s.append(time.perf_counter())
            self._running += 1
            self.most_running = max(self.most_running, self._running)
        try:
            if unknown := set(body) - KNOWN_OF[handler.path]:
                _send(handler, 400, json.dumps({"error": {"message": f"unknown fields {sorted(unknown)}"}}))
                return
            prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
            status = self.fail(prompt)
            if status not in (0, 200):
                _send(handler, status, json.dumps({"error": {"message": f"refused {prompt}"}}))
                return
            self._stream(handler, is_chat, prompt, status == 0)
        finally:
            with self._lock:
                self._running -= 1

    def _stream(self, handler: BaseHTTPRequestHandler, is_chat: bool, prompt: str, is_broken: bool) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()

        def send(choices: list[dict[str, Any]], **more: Any) -> None:
            handler.wfile.write(b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\r\n\r\n")
            handler.wfile.flush()

        if is_chat:
            send([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        time.sleep(self.first_s)
        for number in range(self.num_pieces):
            if number:
                time.sleep(self.piece_s)
            text, is_last = f"{prompt}{number} ", number + 1 == self.num_pieces
            if is_broken and is_last:
                handler.close_connection = True
                return
            part = {"delta": {"content": text}} if is_chat else {"text": text}
            send([{"index": 0, **part, "finish_reason": "stop" if is_last else None}])
        with self._lock:
            self.num_steps += self.num_pieces
            self.num_accepted += self.num_pieces
        record = {
            "num_spec_steps": self.num_pieces,
            "num_draft_tokens": 3 * self.num_pieces,
            "num_accepted_draft_tokens": self.num_pieces,
            "acceptance_histogram": [0, self.num_pieces, 0, 0],
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 1 / 3,
            "num_spec_tokens": 3,
        }
        metrics = {"metrics": {"speculative_decoding": record}} if self.records else {}
        if self.usage:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 2 * self.num_pieces}
            send([], usage=usage, **metrics)
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True


def _send(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    data = text.encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
