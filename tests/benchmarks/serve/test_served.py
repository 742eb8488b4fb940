"""`faser bench serve` against `faser openai`, real engines and a real Triton server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serve.options import ServeBenchOptions
from benchmarks.serve.report import ServeReport
from benchmarks.serve.runner import run_serve_bench
from tests.support.engine_dirs import make_engine_dir
from tests.support.openai_frontend import TEMPLATE, Frontend
from tests.support.triton_server import Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]


def measure(arguments: list[object], directory: Path) -> ServeReport:
    with Frontend(directory / "log", *arguments) as frontend:
        frontend.wait_ready()
        options = ServeBenchOptions(
            "mt_bench",
            directory / "question.jsonl",
            base_url=f"http://127.0.0.1:{frontend.port}/v1",
            request_rate=50.0,
            output_len=16,
            ignore_eos=True,
        )
        return run_serve_bench(options, lambda line: None)


def test_records_by_category_are_the_servers_counters(tmp_path: Path) -> None:
    sizes = {"max_batch_size": 16, "max_seq_len": 256, "max_draft_len": 4, "tokens_per_block": 16}
    engine_dir = make_engine_dir(tmp_path / "pair", TEMPLATE, **sizes)
    rows = [{"category": ("math", "qa")[i % 2], "turns": [f"what is {i}", "and then"]} for i in range(8)]
    rows.append({"category": "qa", "turns": ["too long " * 400]})
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments: list[object] = ["--engine_dir", engine_dir, "--per_request_spec_decode_metrics", "summary"]
    with Server(engine_dir, speculation="fixed:3", log=tmp_path / "triton.log") as triton:
        triton.wait_ready()
        arguments += [
            "--url",
            f"grpc://{triton.grpc_url}",
            "--metrics_url",
            f"http://127.0.0.1:{triton.ports[2]}/metrics",
        ]
        report = measure(arguments, tmp_path)
    load = report.load
    assert (load.num_requests, load.num_completed) == (17, 16)
    (error,) = load.errors
    assert error.startswith("HTTP 400: ")
    assert (load.num_output_tokens, load.num_uncounted) == (16 * 16, 0)
    assert set(load.acceptance) == {"math", "qa"}
    assert load.num_recorded == 16
    assert report.counters is not None
    assert sum(acceptance.num_accepted for acceptance in load.acceptance.values()) == report.counters.num_accepted > 0
    # Drafts that still waited for their test when a request ended are in the counter alone.
    assert 0 < sum(acceptance.num_drafts for acceptance in load.acceptance.values()) <= report.counters.num_drafts
