"""The dashboard, prometheus.yml and the documentation against each other, and against a running server."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from typer.testing import CliRunner

from faser_trtllm.commands.table import load
from faser_trtllm.serving.client import GrpcClient
from faser_trtllm.serving.observe.families import FAILURES, FAMILIES, HISTOGRAM_FAMILIES, READY, SUCCESSES, Stats
from faser_trtllm.serving.observe.scrape import parse_metrics
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server, free_ports
from tests.support.waiting import PATIENCE_S, wait_until

DOCS = Path(__file__).resolve().parents[3] / "docs"
OBSERVABILITY = DOCS / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
NAMES = [family.name for family in (*FAMILIES, *HISTOGRAM_FAMILIES, READY)] + [SUCCESSES[0], FAILURES[0]]
MAY_BE_ZERO = {
    *("faser_num_requests_waiting", "faser_price_tokens_per_second", "faser_engine_restarts_total"),
    *("faser_num_preemptions_total", "faser_spec_decode_num_pruned_rows_total", "faser_prefix_cache_hits_total"),
    *("faser_request_failures_total", "faser_spec_disabled", "faser_spec_fallbacks_total"),
    *("faser_synthetic_acceptance", "faser_spec_decode_num_branch_tokens_total", "faser_doubtful_costs"),
}
"""Zero on a healthy server without the policy price, early exits or repeated prompts, and with a poor draft model."""


def query_of(target):
    return target["expr"].replace("$__rate_interval", "15s").replace("$model", ".*")


def children(node):
    """The nodes right below a node of a parsed query."""
    found = []
    for name in ("lhs", "rhs", "expr", "args"):
        child = getattr(node, name, None)
        found += child if isinstance(child, list) else [child]
    return [child for child in found if child is not None]


def selectors(node):
    """Vector selectors below a node of a parsed query."""
    if isinstance(node, promql.VectorSelector):
        return [node]
    if isinstance(node, promql.MatrixSelector):
        return [node.vector_selector]
    return [selector for child in children(node) for selector in selectors(child)]


def kept_labels(node):
    """Labels that the result of a query has, which legends may name."""
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    if isinstance(node, promql.BinaryExpr):
        return kept_labels(node.lhs) | kept_labels(node.rhs)
    if isinstance(node, promql.Call):
        return set().union(*(kept_labels(arg) for arg in node.args)) - {"le"}
    return set()


def grouped_by(node):
    """Labels that aggregations below a node ask for, by the metrics they aggregate."""
    if isinstance(node, promql.AggregateExpr):
        labels = tuple(node.modifier.labels) if node.modifier else ()
        return [(selector.name, labels) for selector in selectors(node)]
    return [group for child in children(node) for group in grouped_by(child)]


def test_every_query_parses_and_names_metrics_there_are():
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES}
    for title, target in TARGETS:
        parsed = promql.parse(query_of(target))
        found = selectors(parsed)
        assert found, title
        for selector in found:
            assert selector.name in NAMES or re.sub(r"_(bucket|sum|count)$", "", selector.name) in bases, selector.name
            assert "model" in {matcher.name for matcher in selector.matchers.matchers}, (title, selector.name)
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= kept_labels(parsed), title
        if "}}" not in target["legendFormat"]:
            assert not kept_labels(parsed), f"{title}: series that the legend does not tell apart"


def test_a_ratio_of_labeled_series_leaves_out_series_that_count_nothing():
    """A drafter that is not used would be 0 / 0, a series of NaN."""
    parsed = [promql.parse(query_of(target)) for _, target in TARGETS]
    ratios = [node.rhs for node in parsed if str(getattr(node, "op", None)) == "/"]
    divisors = [node.expr if isinstance(node, promql.ParenExpr) else node for node in ratios]
    labeled = [node for node in divisors if kept_labels(node)]
    assert labeled
    for node in labeled:
        assert str(getattr(node, "op", None)) == ">", node.prettify()


def test_every_metric_is_on_the_dashboard_or_another_form_of_one():
    """A metric is left out only if another metric of the dashboard says the same."""
    shown = {selector.name for _, target in TARGETS for selector in selectors(promql.parse(query_of(target)))}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    left_out = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES} - shown
    assert left_out == {
        "nv_trt_llm_kv_cache_block_metrics",
        "nv_trt_llm_inflight_batcher_metrics",
        "nv_trt_llm_general_metrics",
    }


def test_the_dashboard_is_one_that_grafana_loads():
    assert DASHBOARD["uid"]
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval"}
    assert used == variables == {"datasource", "model"}
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def documented_metrics():
    """Return the list of metrics in the documentation."""
    text = (DOCS / "operate.md").read_text()
    return text[text.index("its HELP lines define each metric") : text.index("Counters survive a crash")]


def test_the_documentation_lists_exactly_the_metrics_there_are():
    listed = re.findall(r"`((?:nv|faser)_\w+)`", documented_metrics())
    assert len(listed) == len(set(listed))
    documented = {re.sub(r"_(bucket|sum|count)$", "", name) if "inter_token" in name else name for name in NAMES}
    assert set(listed) == documented


def test_the_documentation_lists_the_labels_values():
    text = " ".join(documented_metrics().split())
    for family in FAMILIES:
        if family.label not in ("", "le", "position", "length"):
            labels = f"({family.label}: {', '.join(family.read(Stats({})))})"
            before, after = text.split(f"`{family.name}`")
            assert after.startswith(f" {labels}") or labels in before.rpartition("- **")[2], family.name


def test_prometheus_yml_scrapes_the_default_port():
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8002"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"


class Traffic:
    """A server under load, until the context ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()
        assert self._error is None, self._error

    def _run(self):
        try:
            with GrpcClient(self._server.grpc_url) as client:
                while not self._stop.is_set():
                    ids = [client.send(f"hello {i}", max_tokens=24, end_id=-1, stream=True) for i in range(6)]
                    while ids:
                        request_id, response = client.receive(PATIENCE_S)
                        if response.is_final:
                            ids.remove(request_id)
                    time.sleep(0.05)
        except BaseException as error:
            self._error = error


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    engine_dir = make_engine_dir(directory, max_batch_size=4, max_seq_len=256, max_draft_len=4, tokens_per_block=16)
    with (
        Server(engine_dir, speculation="fixed:3", num_branches=2, log=directory / "log") as server,
        Traffic(server.wait_ready()),
    ):
        yield server


def scrape(server):
    return parse_metrics(metrics_text(server))


def metrics_text(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[2]}/metrics", timeout=PATIENCE_S) as answer:
        return answer.read().decode()


@pytest.mark.triton
@pytest.mark.slow
def test_every_series_of_the_dashboard_exists_and_has_data(server):
    ended = "faser_e2e_request_latency_seconds_count"
    wait_until(lambda: scrape(server).get(ended))
    before = scrape(server).get(ended)
    # What is published together is not scraped together: a later publication tells that all of this one is there.
    wait_until(lambda: scrape(server).get(ended) > before)
    found = scrape(server)
    for title, target in TARGETS:
        parsed = promql.parse(query_of(target))
        for selector in selectors(parsed):
            samples = found.samples.get(selector.name, [])
            assert samples, f"{title}: {selector.name} is not served"
            for matcher in selector.matchers.matchers:
                if matcher.name == "__name__":
                    continue
                assert all(matcher.name in sample.labels for sample in samples), (title, matcher.name)
                pattern = re.compile(matcher.value if str(matcher.op) == "MatchOp.Re" else re.escape(matcher.value))
                samples = [sample for sample in samples if pattern.fullmatch(sample.labels[matcher.name])]
            assert samples, f"{title}: no series of {selector.name} matches"
            if selector.name not in MAY_BE_ZERO and matches_can_be_counted(selector):
                assert any(sample.value > 0 for sample in samples), f"{title}: {selector.name} has no data"
        for name, labels in grouped_by(parsed):
            assert all(set(labels) <= sample.labels.keys() for sample in found.samples[name]), (title, labels)


def matches_can_be_counted(selector):
    """A gauge of the moment may be 0 in between."""
    return selector.name not in ("faser_num_requests_running", "faser_kv_cache_usage_perc") and not any(
        matcher.value == "context" for matcher in selector.matchers.matchers
    )


@pytest.mark.triton
@pytest.mark.slow
def test_metrics_served_are_the_documented_ones_with_their_types(server):
    text = metrics_text(server)
    found, types = parse_metrics(text), dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    served = {name for name in types if name.startswith(("faser_", "nv_trt_llm", "nv_llm"))}
    assert served == set(NAMES)
    for family in FAMILIES:
        assert types[family.name] == family.kind
    for family in HISTOGRAM_FAMILIES:
        assert types[family.name] == "histogram"
    assert found.by_label("faser_generation_tokens_total", "model").keys() == {"faser"}
    assert found.by_label("faser_generation_tokens_total", "version").keys() == {"1"}


@pytest.mark.triton
@pytest.mark.slow
def test_scraping_a_hundred_times_a_second_changes_nothing(server):
    """Reading metrics while they are written, and writing them from another thread, crash some of Triton's versions."""
    before, started_s = scrape(server).get("faser_generation_tokens_total"), time.monotonic()
    for i in range(150):
        scrape(server)
        time.sleep(max(0.0, started_s + 0.01 * (i + 1) - time.monotonic()))
    wait_until(lambda: scrape(server).get("faser_generation_tokens_total") > before)


@pytest.mark.triton
@pytest.mark.slow
def test_faser_top_shows_the_running_server(server):
    url = f"127.0.0.1:{server.ports[2]}"
    views = []

    def saw_news():
        """Metrics come once a second, or later from a machine that is busy."""
        result = CliRunner().invoke(load("top"), ["--url", url, "--once", "--json", "--interval", "1"])
        assert result.exit_code == 0, result.output
        views.append(json.loads(result.stdout))
        return views[-1]["window_s"]

    wait_until(saw_news)
    view = views[-1]
    assert view["engine"] == {"is_ready": True, "num_restarts": 0.0}
    assert view["requests"]["max"] == 4
    assert view["throughput"]["generation_tokens_per_s"] > 0
    assert view["requests"]["ended_per_s"] > 0
    assert 0.0 < view["steps"]["busy"]["verify"] < 1.0
    assert view["steps"]["mode"]["serial"] == 1.0
    assert 0.0 < view["speculation"]["acceptance_rate"] <= 1.0
    assert sum(view["speculation"]["verified_by_length"]) == pytest.approx(1.0)
    assert view["cache"]["blocks_max"] > 0
    assert all(0.0 < values["p50"] <= values["p99"] < 10.0 for values in view["latency_s"].values())


def find_prometheus():
    return os.environ.get("FASER_PROMETHEUS") or shutil.which("prometheus")


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.skipif(not find_prometheus(), reason="no prometheus binary on the path or in FASER_PROMETHEUS")
def test_a_real_prometheus_answers_every_query(server, tmp_path):
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.ports[2]}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = [
        find_prometheus(),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            left = dict(enumerate(TARGETS))
            deadline_s = time.monotonic() + 30
            while left:
                time.sleep(1.0)
                assert process.poll() is None, (tmp_path / "log").read_text()
                left = {i: item for i, item in left.items() if not has_data(port, query_of(item[1]))}
                titles = [f"{title}: {target['expr']}" for title, target in left.values()]
                assert time.monotonic() < deadline_s, f"no data for {titles}"
        finally:
            process.terminate()


def has_data(port, query):
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            result = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
    except OSError:
        return False  # not up yet
    return bool(result) and all(series["value"][1] not in ("NaN", "+Inf", "-Inf") for series in result)
