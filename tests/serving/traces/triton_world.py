"""Runs traces on a real Triton server: every request by a client of its own, over HTTP or gRPC.

gRPC clients stop by a second request on their stream and HTTP clients hang up, since a stream that its client cancels
can end Triton 2.51 (docs/serve.md).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import replace

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.bystander.canary import STREAM
from benchmarks.bystander.cases import Case
from faser_trtllm.serving.observe.view import fetch
from tests.serving.traces.trace import HANG_UP, READ, STOP, Ask, Result, Trace
from tests.support.waiting import PATIENCE_S, wait_until

BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


class TritonWorld:
    """Use as a context manager, around a server that is ready."""

    def __init__(self, name, server):
        self.name = name
        self._server = server
        self._engine_pid = server.engine_pid()
        self._channels = [grpc.insecure_channel(server.grpc_url) for _ in range(4)]
        self._number = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for channel in self._channels:
            channel.close()

    def run(self, trace: Trace) -> list[Result]:
        """Send the requests at their times, and wait until all have ended, or for PATIENCE_S."""
        found, begun_s = [Result() for _ in trace], time.monotonic()
        self._number += 1
        threads = [
            threading.Thread(target=self._ask, args=(ask, result, begun_s, f"{self._number}.{number}"), daemon=True)
            for number, (ask, result) in enumerate(zip(trace, found, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return found

    @staticmethod
    def adapt(trace: Trace) -> Trace:
        """The trace with the ways to end a request that its door has."""
        return tuple(
            ask if ask.end == READ else replace(ask, end=HANG_UP if ask.door == "http" else STOP) for ask in trace
        )

    def check_idle(self) -> None:
        """Wait until nothing runs or waits and every block is free."""
        wait_until(self._is_idle, poll_s=0.2)

    def _is_idle(self) -> bool:
        scrape = fetch(f"http://127.0.0.1:{self._server.ports[2]}/metrics")
        busy = scrape.get("faser_num_requests_running") + scrape.get("faser_num_requests_waiting")
        blocks = scrape.by_label(BLOCKS, "kv_cache_block_type")
        return not busy and blocks["free"] == blocks["max"] > 0

    def is_alive(self) -> bool:
        return self._server.process.poll() is None and self._server.engine_pid() == self._engine_pid

    def _ask(self, ask: Ask, result: Result, begun_s: float, request_id: str) -> None:
        time.sleep(max(0.0, begun_s + ask.at_ms / 1e3 - time.monotonic()))
        send = self._http if ask.door == "http" else self._grpc
        try:
            send(ask, result, request_id)
        except (OSError, http.client.HTTPException) as error:
            result.error = f"{type(error).__name__}: {error}"
        except grpc.RpcError as error:
            result.error = f"{error.code().name} {error.details()}"
        result.is_ended = True

    def _http(self, ask: Ask, result: Result, request_id: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.ports[0], timeout=PATIENCE_S)
        body = json.dumps({"id": request_id, **ask.fields})
        connection.request("POST", "/v2/models/faser/generate_stream", body)
        socket = connection.sock
        timer = threading.Timer(ask.after_ms / 1e3, lambda: socket.shutdown(2))
        if ask.end == HANG_UP:
            timer.start()
        try:
            for line in connection.getresponse():
                answer = json.loads(line.removeprefix(b"data: ")) if line.strip() else {}
                if "error" in answer:
                    result.error = answer["error"]
                elif "text_output" in answer:
                    result.add(answer.get("sequence_index", 0), answer["text_output"], answer.get("finish_reason"))
        except (OSError, http.client.HTTPException, ValueError):
            if ask.end != HANG_UP:
                raise
        finally:
            timer.cancel()
            with contextlib.suppress(OSError):
                connection.close()

    def _grpc(self, ask: Ask, result: Result, request_id: str) -> None:
        is_over = threading.Event()

        def requests():
            yield Case("", ask.fields, "grpc", request_id=request_id).body()
            if ask.end == STOP and not is_over.wait(ask.after_ms / 1e3):
                yield Case("", {"text_input": "", "stop": True}, "grpc", request_id=request_id).body()

        stream = self._channels[ask.client].stream_stream(STREAM)
        try:
            for message in stream(requests(), timeout=PATIENCE_S):
                self._take(service_pb2.ModelStreamInferResponse.FromString(message), result)
        finally:
            is_over.set()

    def _take(self, message, result: Result) -> None:
        if message.error_message:
            result.error = message.error_message
            return
        answer = message.infer_response
        found = {o.name: raw for o, raw in zip(answer.outputs, answer.raw_output_contents, strict=False)}
        if "text_output" in found:
            reason = found["finish_reason"][4:].decode() if "finish_reason" in found else None
            sequence = int.from_bytes(found.get("sequence_index", b"\0"), "little")
            result.add(sequence, found["text_output"][4:].decode(), reason)
