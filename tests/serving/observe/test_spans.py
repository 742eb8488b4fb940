"""Spans say when a request queued, read its prompt, drafted and verified; off unless it was asked for."""

import builtins
import re
import signal
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from faser_trtllm.core.request import FinishReason
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.serving.client import generate_http
from faser_trtllm.serving.engine_process.wire import OpenStatus
from faser_trtllm.serving.observe.spans import MAX_STEPS, SpanRecorder, open_span_recorder
from tests.support.backend_peer import Backend
from tests.support.engine_dirs import make_engine_dir
from tests.support.executor_harness import Collector, Setup
from tests.support.triton_server import Server

DRAFT_S, VERIFY_S, REST_S = 0.002, 0.006, 0.002


class Traced:
    """An executor over toy engines that take their time by a manual clock, and the spans it led to."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.collector = setup, Collector()
        self.executor = setup.open()
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.recorder = SpanRecorder(provider, setup.clock)
        self.executor.watch(self.recorder)
        self._take_time(setup.target, "forward", VERIFY_S)
        if setup.draft is not None:
            self._take_time(setup.draft, "draft", DRAFT_S)

    def _take_time(self, engine, name, seconds):
        inner = getattr(engine, name)

        def timed(*args):
            result = inner(*args)
            self.setup.clock.advance(seconds)
            return result

        setattr(engine, name, timed)

    def submit(self, name, prompt, **fields):
        timeout_s = fields.pop("timeout_s", None)
        params = SamplingParams(**fields)
        self.executor.submit(name, prompt, params, self.collector.sink(name), timeout_s=timeout_s)

    def step(self):
        busy = self.executor.step()
        self.setup.clock.advance(REST_S)
        return busy

    def spans(self):
        """Return request id -> its root, and the spans below it by name, in order of their start."""
        self.executor.close()
        self.recorder.close()
        spans = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)
        roots = {s.attributes["gen_ai.request.id"]: s for s in spans if s.name == "llm_request"}
        found = {}
        for name, root in roots.items():
            below = [s for s in spans if s.context.trace_id == root.context.trace_id and s is not root]
            found[name] = root, {kind: [s for s in below if s.name == kind] for kind in {s.name for s in below}}
        assert sum(1 + sum(map(len, kinds.values())) for _, kinds in found.values()) == len(spans)
        return found


def ms(span):
    return round((span.end_time - span.start_time) / 1e6, 3)


@pytest.mark.parametrize("mode", ["serial", "draft_ahead", "ping_pong"])
def test_a_request_s_spans_add_up_to_its_life(mode):
    traced = Traced(Setup(policy=f"fixed:3:{mode}", noise=0.5))
    traced.submit("a", [1, 2, 3], max_tokens=12)
    traced.submit("b", [1, 2, 3, 4], max_tokens=20)
    while traced.step():
        pass
    found = traced.spans()
    assert set(found) == {"a", "b"}
    for name, (root, kinds) in found.items():
        (queue,), (prefill,), (decode,) = kinds["queue"], kinds["prefill"], kinds["decode"]
        assert {s.parent.span_id for s in (queue, prefill, decode)} == {root.context.span_id}
        assert {s.parent.span_id for s in kinds["draft"] + kinds["verify"]} == {decode.context.span_id}
        assert root.start_time == queue.start_time
        assert queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time
        assert abs(root.end_time - decode.end_time) < 10e6
        request = traced.collector.requests[name]
        attributes = root.attributes
        assert attributes["gen_ai.usage.prompt_tokens"] == request.prompt_len
        assert attributes["gen_ai.usage.completion_tokens"] == request.params.max_tokens
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        drafted = sum(s.attributes["faser.num_draft_tokens"] for s in kinds["draft"])
        accepted = sum(s.attributes["faser.num_accepted_tokens"] for s in kinds["verify"])
        assert drafted == attributes["faser.num_draft_tokens"] == request.stats.num_draft_tokens > 0
        assert accepted == attributes["faser.num_accepted_tokens"] == request.stats.num_accepted_tokens
        tokens = sum(s.attributes["faser.num_tokens"] for s in kinds["verify"])
        assert tokens == request.params.max_tokens - 1, "the first token is the prefill's"
        assert {s.attributes["faser.mode"] for s in kinds["verify"]} == {mode}
        assert len(kinds["verify"]) == request.stats.num_steps - 1
        if mode == "serial":
            assert {ms(s) for s in kinds["draft"]} == {1e3 * DRAFT_S}
            assert {ms(s) for s in kinds["verify"]} == {1e3 * VERIFY_S}
            assert all(d.end_time <= v.start_time for d, v in zip(kinds["draft"], kinds["verify"], strict=False))


def test_times_of_queue_and_prefill():
    traced = Traced(Setup(policy="fixed:2", max_batch_size=1, max_num_tokens=4, chunk_unit_size=2))
    traced.submit("first", [1, 2], max_tokens=3)
    traced.submit("second", [1, 2, 3, 4, 1, 2, 3], max_tokens=3)
    while traced.step():
        pass
    _, first = traced.spans()["first"]
    root, second = traced.spans()["second"]
    (queue,), (prefill,) = second["queue"], second["prefill"]
    assert ms(first["queue"][0]) == 0.0
    assert ms(queue) == round(1e3 * root.attributes["gen_ai.latency.time_in_queue"], 3) > 0
    assert queue.end_time >= first["decode"][0].end_time
    assert ms(prefill) == 1e3 * (2 * VERIFY_S + REST_S), "the prompt is longer than a pass"
    assert prefill.attributes["faser.num_tokens"] == 7


def test_requests_that_never_ran_have_only_queued():
    traced = Traced(Setup(max_batch_size=1))
    traced.submit("runs", [1], max_tokens=30)
    traced.submit("late", [2], max_tokens=5, timeout_s=0.005)
    traced.submit("cancelled", [2], max_tokens=5)
    for _ in range(4):
        traced.step()
    traced.executor.cancel("cancelled")
    while traced.step():
        pass
    found = traced.spans()
    for name, reason in (("late", "timeout"), ("cancelled", "cancelled")):
        root, kinds = found[name]
        assert set(kinds) == {"queue"}
        assert root.attributes["gen_ai.response.finish_reasons"] == (reason,)
        assert kinds["queue"][0].end_time == root.end_time
        assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_a_request_cancelled_while_nothing_follows_is_written_all_the_same():
    traced = Traced(Setup(policy="fixed:2"))
    traced.submit("a", [1], max_tokens=40)
    for _ in range(3):
        traced.step()
    traced.executor.cancel("a")
    assert not traced.step()
    root, kinds = traced.spans()["a"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert set(kinds) == {"queue", "prefill", "decode", "draft", "verify"}


def test_long_requests_have_a_bounded_number_of_spans():
    traced = Traced(Setup(max_seq_len=400, num_blocks=200))
    traced.submit("long", [1], max_tokens=3 * MAX_STEPS)
    while traced.step():
        pass
    _, kinds = traced.spans()["long"]
    decode = kinds["decode"][0]
    assert len(kinds["verify"]) == MAX_STEPS - 1
    assert decode.attributes["faser.num_steps"] == 3 * MAX_STEPS
    assert decode.attributes["faser.num_steps_without_spans"] == 2 * MAX_STEPS
    assert decode.attributes["faser.verify_ms"] == pytest.approx(3 * MAX_STEPS * 1e3 * VERIFY_S)


def test_an_error_is_marked():
    traced = Traced(Setup())
    traced.submit("a", [1], max_tokens=5)
    traced.step()
    (request,) = traced.executor._scheduler.running
    traced.executor._scheduler.finish(request, FinishReason.ERROR, "broken")
    traced.recorder.finished(request)
    root, _ = traced.spans()["a"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "broken"


def test_off_unless_asked_for(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    num_threads = threading.active_count()
    assert open_span_recorder(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_span_recorder(None) is None
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_a_wrong_endpoint_is_one_sentence(endpoint):
    with pytest.raises(ConfigError, match="OTLP/HTTP collector, such as http://localhost:4318"):
        open_span_recorder(endpoint)


def test_without_the_packages(monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    with pytest.raises(ConfigError, match=re.escape("pip install -c constraints.txt -e '.[observability]'")):
        open_span_recorder("http://localhost:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert open_span_recorder(None) is None
    assert "tracing is off" in caplog.text


class Collecting(BaseHTTPRequestHandler):
    """An OTLP/HTTP collector."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.server.received.append((self.path, request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def collector():
    server = HTTPServer(("127.0.0.1", 0), Collecting)
    server.received = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("by_option", [True, False])
def test_the_engine_process_sends_spans_to_a_collector(tmp_path, collector, monkeypatch, by_option):
    engine_dir = make_engine_dir(tmp_path, max_batch_size=4, max_seq_len=128)
    url = f"http://127.0.0.1:{collector.server_port}"
    if not by_option:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    config = tmp_path / "faser.yaml"
    config.write_text(
        "speculation: fixed:2\nnum_threads: 1\n" + (f"otlp_traces_endpoint: {url}\n" if by_option else "")
    )
    with Backend(engine_dir, str(config), module="faser_trtllm.serving.engine_process.main") as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        before_ns = time.time_ns()
        ten, none = np.array([[10]], np.int32), np.array([[-1]], np.int32)
        backend.ask(0, 1, text_input=b"hello", max_tokens=ten, end_id=none)
        backend.answers(1)
        backend.process.send_signal(signal.SIGTERM)
        assert backend.closed() == 0
        after_ns = time.time_ns()
    path, export = collector.received[0]
    assert path == "/v1/traces"
    (resource,) = export.resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
    assert service == ("faser_trtllm" if by_option else "mine")
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    names = Counter(span.name for span in spans)
    assert names["llm_request"] == names["queue"] == names["prefill"] == names["decode"] == 1
    assert names["draft"] > 0
    assert names["verify"] > 0
    assert all(before_ns - 1e7 < s.start_time_unix_nano <= s.end_time_unix_nano < after_ns for s in spans)


@pytest.mark.triton
@pytest.mark.slow
def test_a_server_that_is_stopped_sends_what_it_has_first(tmp_path, collector, monkeypatch):
    """The SDK would send after an hour; the server is stopped before that."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    engine_dir = make_engine_dir(tmp_path, max_batch_size=4, max_seq_len=128)
    with Server(engine_dir, speculation="fixed:2", log=tmp_path / "log") as server:
        server.wait_ready()
        for _ in range(3):
            generate_http(server.http_url, "hello", max_tokens=5)
        assert not collector.received
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    spans = [
        span
        for _, export in collector.received
        for r in export.resource_spans
        for s in r.scope_spans
        for span in s.spans
    ]
    assert Counter(span.name for span in spans)["llm_request"] == 3
