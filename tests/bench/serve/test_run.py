"""`faser bench serve` against a real service over real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.bench.serve.generator import run_closed, run_open
from faser_trtllm.bench.serve.options import Objectives, ServeBenchOptions
from faser_trtllm.bench.serve.outcome import Ending
from faser_trtllm.bench.serve.report import render_markdown
from faser_trtllm.bench.serve.runner import run_serve_bench
from faser_trtllm.bench.serve.served import Served
from faser_trtllm.bench.serve.workload import ServeJob
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from tests.support.engine_dirs import make_engine_dir

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_batch_size": 32, "max_seq_len": 256, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def served(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with Served(engine_dir, "fixed:4", tmp_path_factory.mktemp("log") / "server.log") as served:
        yield served


@pytest.fixture
def options(engine_dir: Path, tmp_path: Path) -> ServeBenchOptions:
    return ServeBenchOptions(
        engine_dir=engine_dir,
        output_dir=tmp_path / "out",
        request_rate=40.0,
        num_requests=40,
        prompt_len=20,
        max_tokens=24,
        requests_per_stream=2,
        concurrency=4,
        rounds=1,
        command_line=("faser", "bench", "serve"),
    )


def test_open_loop_accounts_for_every_request(served: Served, options: ServeBenchOptions) -> None:
    options = replace(options, url=served.url, cancel_share=0.2, objectives=Objectives(ttft_ms=60_000.0))
    report = run_serve_bench(options, lambda line: None)
    assert report.load is not None
    # A request whose point of cancellation is in its last response completes instead.
    assert report.load.num_completed + report.load.num_cancelled == 40
    assert 1 <= report.load.num_cancelled <= 8
    assert report.load.num_failed == 0
    assert report.load.goodput_share == 1.0
    assert report.load.duration_s >= 0.5
    assert report.load.num_output_tokens >= 24 * report.load.num_completed
    assert report.load.acceptance_rate is not None
    written = json.loads((options.output_dir / "serve.json").read_text())
    assert written["load"]["ttft"]["p50_ms"] > 0.0
    assert written["load"]["cancelled_share"] == report.load.cancelled_share
    assert str(options.engine_dir) not in (options.output_dir / "serve.json").read_text()
    text = (options.output_dir / "serve.md").read_text()
    assert text == render_markdown(report)
    assert "| completed, cancelled by the bench, failed |" in text
    assert "goodput at ttft_ms 60000" in text


def test_in_process_and_served_give_the_same_tokens(served: Served, options: ServeBenchOptions) -> None:
    report = run_serve_bench(
        replace(options, url=served.url, speculation="fixed:4", in_process=True), lambda line: None
    )
    assert report.overhead is not None
    assert (report.overhead.num_different, report.overhead.num_compared) == (0, 16)
    ((own, there),) = report.overhead.rounds
    assert own.tokens_per_s > 0.0 < there.tokens_per_s
    assert own.cpu.service == 0.0
    assert there.cpu.service is None  # the service at --url is not ours to look into
    assert "Tokens identical on both sides: 16 of 16" in render_markdown(report)


def test_failures_are_told_and_do_not_stop_the_rest(served: Served) -> None:
    jobs = [ServeJob((5, 6, 7), 8), ServeJob((5, 6, 7), 0), ServeJob((5, 6, 9999), 8), ServeJob((5, 6, 7), 8)]
    outcomes = run_open(served.url, jobs, 0.0, 20.0)
    assert [o.ending for o in outcomes] == [Ending.COMPLETED, Ending.FAILED, Ending.FAILED, Ending.COMPLETED]
    assert outcomes[0].token_ids == outcomes[3].token_ids
    assert outcomes[0].num_tokens == 8
    assert "max_tokens is 0" in str(outcomes[1].error)
    assert "token id 9999" in str(outcomes[2].error)
    assert all(o.ended_s >= o.due_s for o in outcomes)


def test_closed_loop_has_no_more_than_concurrency_in_flight(served: Served) -> None:
    outcomes = run_closed(served.url, [ServeJob((5, 6, 7), 40)] * 9, 3, 20.0)
    edges = sorted([(o.sent_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    in_flight = most = 0
    for _, change in edges:
        in_flight += change
        most = max(most, in_flight)
    assert most == 3
    assert all(o.ending is Ending.COMPLETED and o.num_tokens == 40 for o in outcomes)


def test_a_request_that_takes_too_long_fails_by_its_own_deadline(served: Served) -> None:
    # Many, since grpc ends a few of them in its own ways: those whose deadline meets their being sent.
    outcomes = run_open(served.url, [ServeJob((5, 6, 7), 200)] * 300, 0.0, 0.001)
    assert {o.ending for o in outcomes} == {Ending.FAILED}
    assert {str(o.error).split(":")[0] for o in outcomes} == {"DEADLINE_EXCEEDED"}


def test_nobody_at_the_address() -> None:
    with pytest.raises(UnavailableError, match=r"no service answers at 127\.0\.0\.1:1 .*mend --url"):
        run_open("127.0.0.1:1", [ServeJob((1,), 1)], 0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals": "now"}, "arrivals is 'now', it must be one of poisson, gamma, bursts, trace"),
        ({"arrivals": "trace"}, "--arrivals trace and --trace FILE go together"),
        ({"request_rate": 0.0}, "request_rate is 0, it must be more than 0"),
        ({"request_rate": float("nan")}, "request_rate is nan"),
        ({"num_requests": 0}, "num_requests is 0, it must be 1 or more"),
        ({"cancel_share": 1.5}, "cancel_share is 1.5, allowed is 0 to 1"),
        ({"peak_ratio": 0.5}, "peak_ratio is 0.5, it must be 1 or more"),
        ({"objectives": Objectives(tpot_ms=-1.0)}, "tpot_ms is -1, it must be more than 0"),
        ({"url": "localhost:8001", "speculation": "off"}, "--speculation is for a service that the bench starts"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: ServeBenchOptions, change: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        replace(options, **change).validate()
    assert message in str(caught.value)


def test_the_command_starts_and_ends_a_service_of_its_own(engine_dir: Path, tmp_path: Path) -> None:
    arguments = {
        "engine_dir": engine_dir,
        "output_dir": tmp_path / "out",
        "speculation": "fixed:2",
        "request_rate": 30,
        "prompt_len": 20,
        "arrivals": "bursts",
        "period_s": 0.5,
    }
    flags = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "faser_trtllm.cli", "bench", "serve", "--quick", *flags],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "| requests | 24 in" in done.stdout
    assert "Shares of all cores' time here: bench" in done.stdout
    report = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert report["load"]["num_completed"] == 24
    assert report["load_cpu"]["service"] > 0.0
