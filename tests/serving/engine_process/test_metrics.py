"""Metrics: their table, what is published of which stats, and how the text format is read back."""

import math
import re
import time

import pytest

from faser_trtllm.errors import CancelledError, FaserError, InvalidArgumentError, UnavailableError
from faser_trtllm.executor.stats import HISTOGRAMS
from faser_trtllm.serving.engine_process.metrics import ModelMetrics
from faser_trtllm.serving.observe.families import FAMILIES, HISTOGRAM_FAMILIES, Stats
from faser_trtllm.serving.observe.scrape import parse_metrics, quantile
from tests.serving.engine_process.metric_recorder import MetricRecorder
from tests.support.counted_run import Run, some_requests
from tests.support.executor_harness import Setup


@pytest.fixture
def recorder():
    return MetricRecorder()


@pytest.fixture
def metrics(recorder):
    return ModelMetrics(recorder, "faser", "1")


@pytest.fixture
def value(recorder):
    return lambda name, **labels: recorder.values[(name, *sorted(labels.items()))]


@pytest.fixture(scope="module")
def run():
    return Run(Setup(policy="fixed:3", max_batch_size=4), some_requests(5))


def test_what_the_executor_counted_is_published(metrics, value, run):
    stats = run.stats
    metrics.publish(True, stats)
    assert value("faser_generation_tokens_total") == stats["num_output_tokens"] > 0
    assert value("faser_prompt_tokens_total") == stats["num_prompt_tokens"]
    assert value("faser_spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"] > 0
    accepted = [value("faser_spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)]
    assert sum(accepted) == value("faser_spec_decode_num_accepted_tokens_total") > 0
    assert sum(value("faser_spec_decode_verified_len_total", length=str(i)) for i in range(5)) > 0
    assert value("faser_steps_total", mode="serial") == stats["num_steps"]
    assert value("faser_steps_total", mode="ping_pong") == 0
    assert value("nv_trt_llm_request_metrics", request_type="max") == 4
    assert value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per") == 4
    assert value("nv_trt_llm_general_metrics", general_type="iteration_counter") == stats["num_steps"]
    assert abs(value("nv_trt_llm_general_metrics", general_type="timestamp") - time.time()) < 60


def test_the_gauges_of_the_last_step_rest_with_the_executor(metrics, value, run):
    assert run.stats["num_scheduled"] > 0
    metrics.publish(True, run.stats)
    for kind in ("active", "scheduled", "context", "waiting"):
        assert value("nv_trt_llm_request_metrics", request_type=kind) == 0


def test_histograms_have_the_counts_and_the_sum_of_what_was_measured(metrics, recorder, value, run):
    for _ in range(2):  # the second time nothing is new
        metrics.publish(True, run.stats)
    for family in HISTOGRAM_FAMILIES:
        found = recorder.histograms[(family.name, *family.labels)]
        assert found["bounds"] == list(HISTOGRAMS[family.key])
        assert found["counts"] == run.series(family.key), family.name
        assert found["sum"] == pytest.approx(sum(run.series(f"{family.key}_sum")))
        assert sum(found["counts"]) > 0
    total = sum(run.series("inter_token_latency_s"))
    bounds = [*map("{:g}".format, HISTOGRAMS["inter_token_latency_s"]), "+Inf"]
    counts = [value("faser_inter_token_latency_seconds_bucket", le=bound) for bound in bounds]
    assert counts == sorted(counts), "cumulative"
    assert counts[-1] == value("faser_inter_token_latency_seconds_count") == total > 0
    assert value("faser_inter_token_latency_seconds_sum") == pytest.approx(sum(run.series("inter_token_latency_s_sum")))


def test_vllm_s_dashboards_and_benchmarks_find_its_names(metrics, recorder, value, run):
    """Names, labels and values as vllm/v1/spec_decode/metrics.py and v1/metrics/loggers.py of 0.33.0 have them."""
    metrics.ended("stop")
    metrics.publish(True, run.stats)
    counts = {name: value(f"vllm:spec_decode_{name}_total") for name in ("num_drafts", "num_draft_tokens")}
    assert counts == {name: run.stats[name] for name in counts}
    accepted = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)]
    assert accepted == sorted(accepted, reverse=True)
    assert sum(accepted) == value("vllm:spec_decode_num_accepted_tokens_total") == run.stats["num_accepted_tokens"] > 0
    assert value("vllm:generation_tokens_total") == run.stats["num_output_tokens"]
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"):
        assert value(f"vllm:{name}") == value(f"faser_{name}")
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert recorder.histograms[(f"vllm:{name}",)] == recorder.histograms[(f"faser_{name}",)]
    last = value("vllm:inter_token_latency_seconds_bucket", le="+Inf")
    assert last == value("vllm:inter_token_latency_seconds_count") > 0


def test_before_the_first_request_the_counters_are_there(metrics, value):
    """vLLM's benchmark leaves speculation out if they are missing before its load."""
    metrics.publish(True, Run(Setup(policy="fixed:3"), []).stats)
    assert value("vllm:spec_decode_num_drafts_total") == 0
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="3") == 0


def test_only_what_changed_is_told_to_triton(metrics, recorder, run):
    metrics.publish(True, run.stats)
    before = recorder.num_changes
    metrics.publish(True, run.stats)
    assert recorder.num_changes == before + 1, "the timestamp"


def test_a_gauge_is_set_even_to_zero_when_its_model_is_loaded(metrics, recorder, value):
    """Triton keeps the series of a model that was unloaded, with their values."""
    metrics.publish(True, {"num_running": 3.0})
    ModelMetrics(recorder, "faser", "1").publish(True, {"num_running": 0.0})
    assert value("faser_num_requests_running") == 0.0


def test_ends_are_counted_by_reason_and_code(metrics, value):
    for reason in ("length", "length", "stop", "timeout"):
        metrics.ended(reason)
    other = FaserError("")
    other.code = "NEW_CODE"
    for error in (CancelledError(""), other, InvalidArgumentError("")):
        metrics.ended(None, error)
    metrics.publish(True)
    metrics.publish(True)  # the second time nothing is new
    successes = {r: value("faser_request_success_total", finished_reason=r) for r in ("length", "stop", "timeout")}
    assert successes == {"length": 2, "stop": 1, "timeout": 1}
    failures = {
        c: value("faser_request_failures_total", code=c)
        for c in ("CANCELLED", "INTERNAL", "INVALID_ARG", "UNAVAILABLE")
    }
    assert failures == {"CANCELLED": 1, "INTERNAL": 1, "INVALID_ARG": 1, "UNAVAILABLE": 0}


def test_a_model_without_stats_publishes_its_own_requests_only(metrics, recorder, value):
    metrics.ended("stop")
    metrics.publish(False)
    names = {key[0] for key in recorder.values}
    successes = {"faser_request_success_total", "vllm:request_success_total"}
    assert names == {"faser_engine_ready", "faser_request_failures_total"} | successes
    assert not recorder.histograms
    assert value("faser_engine_ready") == 0
    metrics.publish(True)
    assert value("faser_engine_ready") == 1


def test_a_failure_to_publish_does_not_end_publishing(metrics, value, caplog):
    metrics.publish(True, {"num_running": "?"})
    assert "metrics could not be published" in caplog.text
    metrics.publish(True, {"num_running": 3.0})
    assert value("faser_num_requests_running") == 3


def test_names_are_what_prometheus_expects():
    names = [family.name for family in (*FAMILIES, *HISTOGRAM_FAMILIES)]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.help
        if family.kind == "counter" and "inter_token" not in family.name:
            assert family.name.endswith("_total")


def test_series_are_read_in_order():
    stats = Stats({"a[1]": 2.0, "a[0]": 1.0, "a[3]": 9.0})
    assert stats.series("a") == [1.0, 2.0]
    assert stats.series("b") == []
    assert stats["b"] == 0.0


TEXT = r"""
# HELP x_total what x is
# TYPE x_total counter
x_total{a="1",b="quote \" backslash \\ newline \n end"} 3
x_total{b="2",a="1"} 4.5e1
x_total 7 1700000000000
# TYPE y_bucket counter
y_bucket{le="1"} 2
# TYPE h histogram
h_bucket{le="0.1"} 2
h_bucket{le="+Inf"} 6
h_bucket{le="1"} 6
nan NaN
"""


def test_the_text_format_is_read():
    scrape = parse_metrics(TEXT)
    assert scrape.get("x_total") == 55.0
    assert scrape.get("x_total", a="1") == 48.0
    assert scrape.by_label("x_total", "b") == {'quote " backslash \\ newline \n end': 3.0, "2": 45.0}
    assert scrape.buckets("h") == {0.1: 2.0, 1.0: 6.0, math.inf: 6.0}
    assert math.isnan(scrape.get("nan"))
    assert scrape.get("missing") == 0.0
    assert scrape.get("y_bucket") == 2.0, "a counter keeps its name"


def test_tensorrt_llm_s_metrics_have_its_model_s_name(recorder, run):
    """Its dashboards ask for model="tensorrt_llm", whichever of our models runs the engine."""
    ModelMetrics(recorder, "ensemble", "1").publish(True, run.stats)
    assert {model for name, model in recorder.models if name.startswith("nv_")} == {"tensorrt_llm"}
    assert {model for name, model in recorder.models if not name.startswith("nv_")} == {"ensemble"}


@pytest.mark.parametrize("text", ["<html>", "x{", "x y", 'x{a="1"}'])
def test_other_text_is_refused(text):
    with pytest.raises(UnavailableError, match="not in Prometheus' text format"):
        parse_metrics(text)


@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, {1.0: 10, 2.0: 10, math.inf: 10}, 0.5),
        (0.9, {1.0: 5, 2.0: 10, math.inf: 10}, 1.8),
        (0.5, {1.0: 0, 2.0: 4, math.inf: 4}, 1.5),
        (0.99, {1.0: 1, math.inf: 10}, 1.0),
        (0.5, {1.0: 0, math.inf: 0}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles_as_prometheus_has_them(q, counts, expected):
    found = quantile(q, counts)
    assert found is None if expected is None else found == pytest.approx(expected)
