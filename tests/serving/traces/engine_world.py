"""Runs traces on an engine process with real engines, over its socket: all that Triton does not do."""

from __future__ import annotations

import heapq
import itertools
import struct
import threading
import time

from faser_trtllm.serving.client import to_tensor
from faser_trtllm.serving.engine_process.wire import FromBackend, ToBackend
from tests.serving.traces.trace import HANG_UP, STOP, Ask, Result, Trace
from tests.support.backend_frames import read_responses
from tests.support.backend_peer import Backend
from tests.support.metric_frames import Metrics
from tests.support.waiting import PATIENCE_S, wait_until

ENGINE = "faser_trtllm.serving.engine_process.main"
OUTPUTS = ("text_output", "finish_reason", "sequence_index", "output_ids", "output_log_probs", "output_top_ids")
FREE = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free"}'
ALL = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}'
_PING_S = 0.1


class EngineWorld:
    """Use as a context manager. name: of its configuration."""

    def __init__(self, engine_dir, directory, name, config):
        self.name = name
        path = directory / f"{name.replace(':', '-')}.yaml"
        path.write_text(config)
        self._backend = Backend(engine_dir, config=str(path), module=ENGINE)
        self._handles = itertools.count(1)
        self._results = {}  # by handle, of requests that are open
        self._metrics = Metrics()
        self._opened = None  # then the sentence of an error, or nothing
        self._changed = threading.Condition()
        self._send = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self):
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._ping)]
        self._backend.hello()
        self._backend.open(0)
        for thread in self._threads:
            thread.start()
        with self._changed:
            assert self._changed.wait_for(lambda: self._opened is not None, PATIENCE_S)
        assert self._opened == b"", self._opened
        return self

    def __exit__(self, *exception):
        self._closed.set()
        self._backend.process.kill()
        self._backend.process.wait()
        for thread in self._threads:
            thread.join()
        self._backend.__exit__(*exception)

    def run(self, trace: Trace) -> list[Result]:
        """Send the requests at their times, and wait until all have ended, or for PATIENCE_S."""
        begun_s, found, open_ = time.monotonic(), [Result() for _ in trace], {}
        events = [(ask.at_ms, number, "send") for number, ask in enumerate(trace)]
        events += [(ask.at_ms + ask.after_ms, number, ask.end) for number, ask in enumerate(trace) if ask.end != "read"]
        heapq.heapify(events)
        while events:
            at_ms, number, what = heapq.heappop(events)
            time.sleep(max(0.0, begun_s + at_ms / 1e3 - time.monotonic()))
            if what == "send":
                open_[number] = self._ask(trace[number].fields, found[number], f"{id(trace)}.{number}")
            elif what == HANG_UP:
                self._say(FromBackend.CANCEL, struct.pack("<Q", open_[number]))
            elif what == STOP:
                self._ask({"text_input": "", "stop": True}, Result(), f"{id(trace)}.{number}")
        with self._changed:
            self._changed.wait_for(lambda: all(result.is_ended for result in found), PATIENCE_S)
        return found

    @staticmethod
    def adapt(trace: Trace) -> Trace:
        return trace

    def alone(self, ask: Ask) -> Result:
        """Return the result that the request gets while nothing else runs."""
        (result,) = self.run((Ask(0.0, {**ask.alone, "stream": True}),))
        assert result.is_ended, ask
        return result

    def check_idle(self) -> None:
        """Wait until nothing runs or waits and every block is free."""
        wait_until(self._is_idle)

    def _is_idle(self) -> bool:
        with self._changed:
            values = dict(self._metrics.values)
        busy = values.get("faser_num_requests_running", 1) + values.get("faser_num_requests_waiting", 1)
        return not busy and values[FREE] == values[ALL]

    def is_alive(self) -> bool:
        return self._backend.process.poll() is None

    def _ask(self, fields, result, request_id):
        handle = next(self._handles)
        with self._changed:
            self._results[handle] = result
        arrays = {name: to_tensor(name, value) for name, value in fields.items()}
        with self._send:
            self._backend.ask(0, handle, outputs=OUTPUTS, request_id=request_id, **arrays)
        return handle

    def _say(self, kind, content=b""):
        with self._send:
            self._backend.send(kind, content)

    def _ping(self):
        while not self._closed.wait(_PING_S):
            self._say(FromBackend.PING)

    def _read(self):
        while not self._closed.is_set():
            try:
                kind, body = self._backend.frame()
            except (AssertionError, OSError):
                return
            with self._changed:
                if kind is ToBackend.METRICS:
                    self._metrics.apply(body)
                elif kind is ToBackend.OPENED:
                    self._opened = body[10:]
                elif kind is ToBackend.RESPONSES:
                    for handle, is_final, outputs, error in read_responses(body):
                        self._take(handle, is_final, outputs, error)
                self._changed.notify_all()

    def _take(self, handle, is_final, outputs, error):
        result = self._results[handle]
        assert not result.is_ended, "nothing follows the final response"
        if error is not None:
            result.error = error.message
        elif "text_output" in outputs:
            sequence = struct.unpack("<i", outputs["sequence_index"][2])[0] if "sequence_index" in outputs else 0
            reason = outputs["finish_reason"][2][4:].decode() if "finish_reason" in outputs else None
            result.add(sequence, outputs["text_output"][2][4:].decode(), reason)
        if is_final:
            result.is_ended = True
            del self._results[handle]
