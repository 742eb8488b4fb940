"""`faser bench serve` against an OpenAI server that is not ours."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serve.__main__ import flags, main
from benchmarks.serve.dataset import Conversation
from benchmarks.serve.options import ServeBenchOptions
from benchmarks.serve.report import ServeReport, render_markdown
from benchmarks.serve.runner import choose, run_serve_bench
from faser_trtllm.errors import FaserError, InvalidArgumentError, UnavailableError
from tests.support.checkpoints import write_tokenizer
from tests.support.openai_stand_in import StandIn


def write(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(tmp_path: Path) -> ServeBenchOptions:
    rows = [{"category": "math", "turns": [f"p{i}", f"q{i}"]} for i in range(2)]
    rows += [{"category": "qa", "turns": [f"r{i}"]} for i in range(2)]
    return ServeBenchOptions("mt_bench", write(tmp_path, rows), output_dir=tmp_path / "out", output_len=9)


def run(options: ServeBenchOptions, stand_in: StandIn) -> ServeReport:
    return run_serve_bench(replace(options, base_url=stand_in.url), lambda line: None)


def test_every_turn_is_a_request_that_has_the_answers_before_it(options: ServeBenchOptions) -> None:
    with StandIn() as stand_in:
        report = run(options, stand_in)
    assert (report.load.num_requests, report.load.num_completed) == (6, 6)
    assert report.model == "stand-in"
    talks = [[m["content"] for m in body["messages"]] for body in stand_in.bodies]
    assert ["p0", "p00 p01 p02 ", "q0"] in talks
    for body in stand_in.bodies:
        assert body["max_completion_tokens"] == 9
        assert (body["model"], body["stream"], body["temperature"]) == ("stand-in", True, 0.0)
    load = report.load
    assert (load.num_output_tokens, load.num_uncounted) == (36, 0)
    assert 6 <= load.num_pieces <= 18  # pieces that are read at once are one
    assert {name: (a.num_steps, a.length) for name, a in load.acceptance.items()} == {"math": (12, 2.0), "qa": (6, 2.0)}
    assert report.counters is not None
    assert (report.counters.num_steps, report.counters.num_accepted) == (18, 18)


def test_the_report_is_printed_and_written(options: ServeBenchOptions) -> None:
    with StandIn() as stand_in:
        report = run(replace(options, goodput=(("ttft", 60_000.0),)), stand_in)
    assert options.output_dir is not None
    text = (options.output_dir / "serve.md").read_text()
    assert text == render_markdown(report)
    for row in (
        "| completed, failed | 6, 0 |",
        "| math | 2.00 | 0.33 | 12 |",
        "| all | 2.00 |",
        "| server's counters |",
    ):
        assert row in text
    assert "goodput at ttft 60000 ms" in text
    written = json.loads((options.output_dir / "serve.json").read_text())
    assert (written["completed"], written["failed"], written["options"]["request_rate"]) == (6, 0, "inf")
    assert written["acceptance_by_category"]["qa"]["mean_acceptance_length"] == 2.0
    assert written["acceptance_of_server"]["per_position_acceptance_rates"] == [1.0]
    assert written["p99_ttft_ms"] > 0.0
    assert str(options.output_dir) not in json.dumps(written)


def test_without_records_the_counters_tell_and_without_both_nothing(options: ServeBenchOptions) -> None:
    with StandIn(records=False) as stand_in:
        text = render_markdown(run(options, stand_in))
    assert "| server's counters | 2.00 |" in text
    assert "run with --category" in text
    with StandIn(records=False, counts=False, usage=False) as stand_in:
        report = run(options, stand_in)
    assert report.load.num_uncounted == 6
    assert report.load.tpot is None
    assert "The server reports nothing about speculation" in render_markdown(report)


def test_failures_are_counted_by_their_reason_and_end_their_conversation(options: ServeBenchOptions) -> None:
    fail = {"p0": 503, "q1": 400, "r0": 0}
    with StandIn(fail=lambda prompt: fail.get(prompt, 200)) as stand_in:
        report = run(options, stand_in)
    assert (report.load.num_requests, report.load.num_completed, report.load.num_failed) == (6, 2, 4)
    assert report.load.errors == {
        "HTTP 503: refused p0": 1,
        "the turn before it failed": 1,
        "HTTP 400: refused q1": 1,
        "the stream ended before the answer did": 1,
    }
    assert "- 1 x HTTP 503: refused p0" in render_markdown(report)
    assert report.load.ttft is not None
    assert report.load.ttft.count == 2


def test_a_run_without_one_answer_is_an_error(options: ServeBenchOptions, capsys: pytest.CaptureFixture[str]) -> None:
    with StandIn(fail=lambda prompt: 500) as stand_in:
        arguments = ["--dataset", "mt_bench", "--dataset_path", str(options.dataset_path), "--base_url", stand_in.url]
        with pytest.raises(FaserError, match="all 6 requests failed"):
            main(arguments)
    assert "- 1 x HTTP 500: refused r1" in capsys.readouterr().out


def test_a_request_that_takes_too_long_fails(options: ServeBenchOptions) -> None:
    with StandIn(first_s=1.0) as stand_in:
        report = run(replace(options, timeout_s=0.05, category="qa"), stand_in)
    assert report.load.errors == {"the request took longer than 0.05 s": 2}


def test_an_open_loop_does_not_wait_for_answers(options: ServeBenchOptions) -> None:
    """All arrive within a fraction of what one answer takes, so all but the first arrive while others run."""
    with StandIn(first_s=2.0) as stand_in:
        report = run(replace(options, request_rate=1000.0, num_prompts=8, category="qa"), stand_in)
    assert report.load.num_completed == 8
    assert stand_in.most_running == 8


def test_waiting_for_a_slot_counts_as_latency(options: ServeBenchOptions) -> None:
    """Arrivals that max_concurrency holds back are late, and the wait is in their times: no coordinated omission."""
    with StandIn(first_s=0.2) as stand_in:
        held = replace(options, request_rate=1000.0, num_prompts=4, category="qa", max_concurrency=1)
        report = run(held, stand_in)
    assert stand_in.most_running == 1
    assert report.load.late is not None
    assert report.load.ttft is not None
    # The last waited for three answers of 200 ms each, whatever else the machine did.
    assert report.load.late.max_ms >= 600.0
    assert report.load.ttft.max_ms >= 800.0


def test_a_closed_loop_keeps_to_its_concurrency(options: ServeBenchOptions) -> None:
    with StandIn(first_s=0.05) as stand_in:
        report = run(replace(options, max_concurrency=3, num_prompts=9), stand_in)
    assert stand_in.most_running == 3
    assert report.load.num_failed == 0


def test_completions_send_first_turns_as_text(options: ServeBenchOptions) -> None:
    with StandIn() as stand_in:
        report = run(replace(options, backend="openai"), stand_in)
    assert sorted(body["prompt"] for body in stand_in.bodies) == ["p0", "p1", "r0", "r1"]
    assert all(body["max_tokens"] == 9 for body in stand_in.bodies)
    assert report.load.num_output_tokens == 24


def test_human_eval_is_completed_and_a_length_of_the_file_is_kept(tmp_path: Path) -> None:
    human = ServeBenchOptions("humaneval", write(tmp_path, [{"task_id": "HumanEval/0", "prompt": "def f():\n"}]))
    with StandIn() as stand_in:
        run(human, stand_in)
        run(ServeBenchOptions("custom", write(tmp_path, [{"prompt": "a", "output_tokens": 5}])), stand_in)
    assert [body.get("prompt") for body in stand_in.bodies] == ["def f():\n", None]
    assert stand_in.bodies[1]["max_completion_tokens"] == 5


def test_warmups_come_before_and_do_not_count(options: ServeBenchOptions) -> None:
    with StandIn() as stand_in:
        report = run(replace(options, num_warmups=3, category="qa"), stand_in)
    assert len(stand_in.bodies) == 5
    assert report.load.num_requests == 2
    assert report.counters is not None
    assert report.counters.num_steps == 6


def test_a_field_that_the_server_does_not_know_is_told(options: ServeBenchOptions) -> None:
    with StandIn() as stand_in:
        report = run(replace(options, extra_body={"num_draft_tokens": 0}, category="qa"), stand_in)
    assert report.load.errors == {"HTTP 400: unknown fields ['num_draft_tokens']": 2}


FOUND = [Conversation((f"p{i}",), "math" if i % 2 else "qa") for i in range(40)]


def prompts(options: ServeBenchOptions, **change: Any) -> list[str]:
    return [conversation.turns[0] for conversation in choose(replace(options, **change), FOUND)]


def test_the_order_is_the_seeds(options: ServeBenchOptions) -> None:
    ordered = [c.turns[0] for c in FOUND]
    assert prompts(options, disable_shuffle=True) == ordered
    assert prompts(options) == prompts(options) != prompts(options, seed=1)
    assert sorted(prompts(options)) == sorted(ordered)


def test_more_prompts_than_there_are_repeat_the_dataset(options: ServeBenchOptions) -> None:
    chosen = prompts(options, num_prompts=100)
    counts = np.unique(chosen, return_counts=True)[1]
    assert (len(chosen), counts.min(), counts.max()) == (100, 2, 3)
    assert len(prompts(options, num_prompts=7)) == 7
    assert set(prompts(options, category="qa")) == {c.turns[0] for c in FOUND if c.category == "qa"}


def test_a_tokenizer_gives_share_gpts_lengths_and_vllms_limits(options: ServeBenchOptions, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 320)
    texts = [("hello there, you", "a fine answer to that"), ("x", "too short a prompt"), ("a prompt that is long", "")]
    found = [Conversation((prompt,), "sharegpt", reference=answer) for prompt, answer in texts]
    share = replace(options, dataset="sharegpt", tokenizer=tmp_path)
    (kept,) = choose(share, found)
    assert kept.turns == ("hello there, you",)
    assert kept.output_len is not None
    assert kept.output_len >= 4
    with pytest.raises(InvalidArgumentError, match="no conversation of the dataset is within vLLM's limits"):
        choose(share, found[1:])


def test_nobody_at_the_address(options: ServeBenchOptions) -> None:
    with pytest.raises(
        UnavailableError, match=r"no OpenAI server answers at http://127\.0\.0\.1:1/v1/models .*base_url"
    ):
        run_serve_bench(replace(options, base_url="http://127.0.0.1:1/v1"), lambda line: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "alpaca"}, "dataset is 'alpaca'; it must be one of spec_bench, speed_bench, mt_bench, humaneval"),
        ({"backend": "vllm"}, "backend is 'vllm'; it must be openai or openai-chat"),
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'; it must begin with http://"),
        ({"request_rate": 0.0}, "request_rate is 0; it must be more than 0, or inf"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"burstiness": 0.0}, "burstiness is 0; it must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency is 0, allowed is 1 to"),
        ({"num_prompts": 10**9}, "num_prompts is 1000000000, allowed is 1 to 1000000"),
        ({"num_warmups": -1}, "num_warmups is -1, allowed is 0"),
        ({"temperature": -1.0}, "temperature is -1; it must be 0 or more"),
        ({"goodput": (("ttfb", 5.0),)}, "goodput has ttfb:5; it must be ttft, tpot, e2el and ms"),
        ({"extra_body": {"stream": False}}, "extra_body has stream, which the bench sets"),
        ({"tokenizer": Path("here")}, "tokenizer is for the dataset sharegpt"),
        ({"category": "cooking"}, "category is 'cooking', the dataset has math, qa"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: ServeBenchOptions, change: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        run_serve_bench(replace(options, **change), lambda line: None)
    assert message in str(caught.value)


def test_flags_spell_a_dataset_as_its_authors_do() -> None:
    parsed = flags().parse(
        [
            "--dataset",
            "SPEED-Bench",
            "--dataset_path",
            "f",
            "--goodput",
            "ttft:5",
            "e2el:9.5",
            "--extra_body",
            '{"a": 1}',
        ]
    )
    assert parsed.dataset == "speed_bench"
    assert parsed.extra_body == {"a": 1}
    assert list(parsed.goodput) == [("ttft", 5.0), ("e2el", 9.5)]
    for wrong in (["--goodput", "ttft"], ["--extra_body", "[1]"], ["--extra_body", "{"]):
        with pytest.raises(InvalidArgumentError, match="it must be"):
            flags().parse(["--dataset", "custom", "--dataset_path", "f", *wrong])
