"""OpenTelemetry spans per request: llm_request contains queue, prefill and decode; decode contains draft and verify.

The executor's thread only records the times of each step; another thread turns them into spans when the request has
ended. Attributes have vLLM's names (gen_ai.*) where it has them, otherwise names under faser.*.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from faser_trtllm.core.clock import Clock, MonotonicClock
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.errors import ConfigError, install
from faser_trtllm.executor.stats import StepWatcher

log = logging.getLogger("faser.spans")

MAX_STEPS = 64  # steps of a request that get spans; later steps only count in the attributes of decode
_FLUSH_S = 0.25
_TRACES_PATH = "/v1/traces"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the executor, with counts for each request. Times are (start, end) in seconds of its clock."""

    draft_s: tuple[float, float]
    verify_s: tuple[float, float]
    mode: str
    num_drafts: list[int]
    num_verified: list[int]
    num_accepted: list[int]  # like num_tokens, only for the requests that got tokens, which come first
    num_tokens: list[int]
    num_running: int  # requests that have rows, which come first; the step only drafted for the others


@dataclass(slots=True)
class _Timeline:
    parts: list[tuple[_Step, int]] = field(default_factory=list)  # a step and the request's index in it
    num_steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    ended_s: float | None = None


class SpanRecorder(StepWatcher):
    """Writes spans to a tracer provider of the OpenTelemetry SDK."""

    def __init__(self, provider: Any, clock: Clock | None = None) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("faser_trtllm")
        self._clock = clock or MonotonicClock()
        self._offset_ns = self._measured_offset_ns()
        self._open: dict[Request, _Timeline] = {}
        self._ended: list[Request] = []
        self._done: list[tuple[Request, _Timeline]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="faser-spans", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        rows, drafts, result = record.plan.scheduled, record.drafts, record.result
        draft_s, verify_s = drafts.draft_ms / 1e3, result.verify_ms / 1e3
        step = _Step(
            (record.scheduled_s, record.scheduled_s + draft_s),
            (record.verified_s - verify_s, record.verified_s),
            record.plan.mode.value,
            drafts.num_new_drafts.tolist(),
            result.num_verified.tolist(),
            result.num_accepted.tolist(),
            result.num_tokens.tolist(),
            rows.num_running,
        )
        with self._lock:
            for index, request in enumerate(rows.requests):
                timeline = self._open.get(request)
                if timeline is None:
                    if request.is_finished:
                        continue  # written already
                    timeline = self._open[request] = _Timeline()
                timeline.num_steps += 1
                timeline.draft_s += draft_s if step.num_drafts[index] else 0.0
                timeline.verify_s += verify_s if index < rows.num_running else 0.0
                if len(timeline.parts) < MAX_STEPS:
                    timeline.parts.append((step, index))
            self._settle()

    def finished(self, request: Request) -> None:
        with self._lock:
            self._open.setdefault(request, _Timeline()).ended_s = self._clock.now_s()
            self._ended.append(request)
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Export the requests that have ended; wait at most timeout_s."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _settle(self) -> None:
        """Move requests that have ended, and whose last step is recorded, to the list to be written."""
        self._done += [(request, self._open.pop(request)) for request in self._ended]
        self._ended.clear()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            if not self._closing:
                time.sleep(_FLUSH_S)  # the step that ends a request is recorded after finished()
            self._wake.clear()
            self._offset_ns = self._measured_offset_ns()
            with self._lock:
                self._settle()
                done, self._done = self._done, []
            for request, timeline in done:
                try:
                    self._write(request, timeline)
                except Exception:
                    log.exception("the spans of a request could not be written")
        self._provider.force_flush()

    def _measured_offset_ns(self) -> int:
        return time.time_ns() - round(1e9 * self._clock.now_s())

    def _epoch_ns(self, clock_s: float) -> int:
        return self._offset_ns + round(1e9 * clock_s)

    def _write(self, request: Request, timeline: _Timeline) -> None:
        stats, params = request.stats, request.params
        end_s = timeline.ended_s
        assert end_s is not None
        reason = request.finish_reason or FinishReason.STOP
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.prompt_tokens": request.prompt_len,
            "gen_ai.usage.completion_tokens": request.num_output_tokens,
            "gen_ai.response.finish_reasons": [reason.value],
            "gen_ai.latency.e2e": end_s - request.arrival_s,
            "faser.num_draft_tokens": stats.num_draft_tokens,
            "faser.num_accepted_tokens": stats.num_accepted_tokens,
            "faser.num_pruned_rows": stats.num_pruned_rows,
            "faser.num_cached_tokens": stats.num_cached_tokens,
            "faser.num_preemptions": stats.num_preemptions,
        }
        first_scheduled_s = stats.first_scheduled_s
        if first_scheduled_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = first_scheduled_s - request.arrival_s
        if stats.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = stats.first_token_s - request.arrival_s
        root = self._start("llm_request", None, request.arrival_s, attributes, kind=self._trace.SpanKind.SERVER)
        if reason is FinishReason.ERROR:
            root.set_status(self._trace.StatusCode.ERROR, request.error or "the engine failed on this request")
        queued_until_s = end_s if first_scheduled_s is None else first_scheduled_s
        self._span("queue", root, request.arrival_s, queued_until_s, {})
        if first_scheduled_s is not None:
            first_token_s = end_s if stats.first_token_s is None else stats.first_token_s
            self._span("prefill", root, first_scheduled_s, first_token_s, {"faser.num_tokens": request.prompt_len})
            if stats.first_token_s is not None and stats.last_token_s is not None:
                self._write_decode(root, timeline, stats.first_token_s, stats.last_token_s)
        root.end(end_time=self._epoch_ns(end_s))

    def _write_decode(self, root: Any, timeline: _Timeline, first_token_s: float, last_token_s: float) -> None:
        attributes = {
            "faser.num_steps": timeline.num_steps,
            "faser.draft_ms": 1e3 * timeline.draft_s,
            "faser.verify_ms": 1e3 * timeline.verify_s,
            "faser.num_steps_without_spans": timeline.num_steps - len(timeline.parts),
        }
        decode = self._start("decode", root, first_token_s, attributes)
        for step, index in timeline.parts:
            if step.verify_s[1] <= first_token_s:
                continue  # a chunk of the prompt
            common = {"faser.mode": step.mode, "faser.num_requests": len(step.num_drafts)}
            if step.num_drafts[index]:
                drafted = {"faser.num_draft_tokens": step.num_drafts[index]}
                self._span("draft", decode, *step.draft_s, common | drafted)
            if index < step.num_running:
                is_sampled = index < len(step.num_tokens)
                found = {
                    "faser.num_verified_tokens": step.num_verified[index],
                    "faser.num_accepted_tokens": step.num_accepted[index] if is_sampled else 0,
                    "faser.num_tokens": step.num_tokens[index] if is_sampled else 0,
                }
                self._span("verify", decode, *step.verify_s, common | found)
        decode.end(end_time=self._epoch_ns(last_token_s))

    def _span(self, name: str, parent: Any, start_s: float, end_s: float, attributes: dict[str, Any]) -> None:
        self._start(name, parent, start_s, attributes).end(end_time=self._epoch_ns(end_s))

    def _start(
        self, name: str, parent: Any | None, start_s: float, attributes: dict[str, Any], kind: Any | None = None
    ) -> Any:
        context = None if parent is None else self._trace.set_span_in_context(parent)
        kind = kind or self._trace.SpanKind.INTERNAL
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=self._epoch_ns(start_s)
        )


def open_span_recorder(endpoint: str | None) -> SpanRecorder | None:
    """Return a recorder that exports to an endpoint, or as the OTEL_* variables configure it; None if tracing is off.

    endpoint: an OTLP/HTTP collector, such as http://localhost:4318. If tracing cannot work, raises ConfigError, or logs
    a warning and returns None if only the environment asked for it.
    """
    in_environment = any(os.environ.get(name) for name in _ENDPOINTS)
    if _is_off() or not (endpoint or in_environment):
        return None
    try:
        url = check_endpoint(endpoint)
    except ConfigError as error:
        if endpoint:
            raise
        log.warning("%s; tracing is off", error)
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=url)
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "faser_trtllm"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanRecorder(provider)


def check_endpoint(endpoint: str | None) -> str | None:
    """Return the URL for spans, or None to use the environment's; raise ConfigError if tracing cannot work."""
    if _is_off():
        return None
    url = _traces_url(endpoint) if endpoint else None
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError:
        wanted = f"otlp_traces_endpoint is {endpoint!r}" if endpoint else "the environment sets OTEL_EXPORTER_OTLP_*"
        raise ConfigError(f"{wanted}, but OpenTelemetry is not installed; {install('observability')}") from None
    return url


def _is_off() -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none"


def _traces_url(endpoint: str) -> str:
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("http", "https") or not rest.strip("/"):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be the URL of an OTLP/HTTP collector, such as "
            "http://localhost:4318"
        )
    return endpoint if "/" in rest.rstrip("/") else endpoint.rstrip("/") + _TRACES_PATH
