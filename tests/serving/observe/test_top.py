"""`faser top`: numbers from two scrapes, on 80 columns, and what it says when there is nothing to see."""

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from faser_trtllm.commands import top as top_command
from faser_trtllm.commands.table import load
from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.observe.view import fetch, make_view
from tests.support.scrapes import STATS, metrics_text, rendered, scrape
from tests.support.waiting import PATIENCE_S

LATER = STATS | {
    "timestamp": 1002.0,
    "num_steps_serial": 125.0,
    "num_steps_ping_pong": 75.0,
    "num_output_tokens": 1500.0,
    "num_draft_tokens": 500.0,
    "num_accepted_tokens": 350.0,
    "num_drafts": 250.0,
    "verify_ms": 5000.0,
}


def test_rates_and_shares_are_those_of_the_window():
    view = make_view(scrape(LATER, successes=14.0, waits=4), scrape(STATS))
    assert view.window_s == 2.0
    assert not view.is_since_start
    assert view.requests["running"] == 3
    assert view.requests["waiting"] == 7
    assert view.requests["max"] == 8
    assert view.requests["ended_per_s"] == 2.0
    assert view.requests["failed_per_s"] == 0.0
    assert view.throughput["generation_tokens_per_s"] == 250.0
    assert view.throughput["steps_per_s"] == 50.0
    assert view.steps["mode"] == {"serial": 0.5, "draft_ahead": 0.0, "ping_pong": 0.5}
    assert view.steps["busy"]["verify"] == 0.5
    assert view.steps["busy"]["draft"] == 0.0
    assert view.speculation["acceptance_rate"] == 0.5
    assert view.speculation["mean_acceptance_length"] == 2.0
    assert view.cache["usage"] == 0.25
    assert view.cache["blocks_used"] == 25
    assert view.latency_s["queue"]["p50"] == pytest.approx(0.175)
    assert view.latency_s["inter_token"]["p50"] is None


def test_drafts_are_shown_by_who_drafted():
    counts = {"suffix": (200.0, 150.0), "model": (80.0, 20.0)}
    stats = {f"num_tested_drafts_{name}": tested for name, (tested, _) in counts.items()}
    stats |= {f"num_passed_drafts_{name}": passed for name, (_, passed) in counts.items()}
    stats |= {"draft_ms": 40.0, "free_draft_ms": 3.0}
    drafters = make_view(scrape(STATS | stats)).speculation["drafters"]
    assert drafters == {
        "suffix": {"acceptance_rate": 0.75, "share": 0.15, "ms_per_accepted_token": pytest.approx(0.02)},
        "model": {"acceptance_rate": 0.25, "share": 0.02, "ms_per_accepted_token": pytest.approx(2.0)},
    }
    assert make_view(scrape(STATS)).speculation["drafters"] == {}
    screen = rendered(make_view(scrape(STATS | stats)))
    assert "suffix (0.02 ms each)" in screen
    assert "model (2.00 ms each)" in screen
    assert "15" in screen
    alone = {key: value for key, value in stats.items() if "suffix" in key}
    assert "suffix (" not in rendered(make_view(scrape(STATS | alone)))


def test_an_idle_window_shows_acceptance_since_the_start():
    view = make_view(scrape(STATS | {"timestamp": 1005.0}), scrape(STATS))
    assert view.is_since_start
    assert view.throughput["generation_tokens_per_s"] == 0.0
    assert view.speculation["acceptance_rate"] == 0.75
    assert view.speculation["accepted_by_position"] == [0.9, 0.6]
    assert view.speculation["verified_by_length"] == [0.25, 0.25, 0.5]
    assert view.speculation["oracle_fraction"] == 0.9
    assert view.cache["hit_rate"] == 0.2
    assert set(view.steps["mode"].values()) == {None}


def test_one_scrape_has_no_rates():
    view = make_view(scrape(STATS))
    assert view.throughput == {
        "generation_tokens_per_s": None,
        "prompt_tokens_per_s": None,
        "steps_per_s": None,
    }
    assert view.speculation["acceptance_rate"] == 0.75
    assert view.is_since_start


def test_a_server_that_was_started_anew_counts_from_its_start():
    view = make_view(scrape(STATS | {"timestamp": 1010.0, "num_output_tokens": 40.0}), scrape(STATS))
    assert view.throughput["generation_tokens_per_s"] == 4.0


def test_positions_beyond_nine_are_in_order():
    more = {f"num_accepted_tokens_per_pos[{i}]": 200.0 - i for i in range(12)}
    shares = make_view(scrape(STATS | more)).speculation["accepted_by_position"]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 12


def test_everything_fits_80_columns():
    text = rendered(make_view(scrape(LATER | {"price_tokens_per_ms": 123.456}, waits=4), scrape(STATS)))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in (
        "3 of 8",
        "250",
        "50%",
        "ping_pong",
        "2.00",
        "25 of 100",
        "123,456",
        "175",
        "last 2 s",
        "engine ready",
    ):
        assert part in text, part


def test_the_fullest_screen_fits_24_lines_and_no_length_is_left_out():
    counts = {f"num_verified_by_len[{n}]": 10.0 * n for n in range(9)} | {"num_verified_by_len[8]": 40.0}
    counts |= {f"num_accepted_tokens_per_pos[{n}]": 10.0 for n in range(8)}
    drafters = {f"num_{kind}_drafts_{name}": 9.0 for kind in ("tested", "passed") for name in ("suffix", "model")}
    view = make_view(scrape(STATS | counts | drafters | {"price_tokens_per_ms": 9.0, "is_synthetic": 1.0}, waits=4))
    lines = rendered(view).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    (longest,) = (line for line in lines if "6+ " in line)
    assert f"{100 * (60 + 70 + 40) / (10 * 28 + 40):.0f}%" in longest


def test_costs_that_do_not_fit_are_named():
    well = make_view(scrape(STATS))
    assert "doubtful_costs" not in well.engine
    assert "COSTS" not in rendered(well)
    view = make_view(scrape(STATS | {"doubtful_costs_draft_rows": 1.0, "doubtful_costs_verify": 1.0}))
    assert view.engine["doubtful_costs"] == ["verify", "draft_rows"]
    assert "engine ready, DOUBTFUL COSTS: verify, draft_rows" in rendered(view, width=120)


def test_a_server_that_is_down_is_seen_to_be():
    text = rendered(make_view(scrape(STATS | {"is_ready": 0.0, "num_restarts": 2.0})))
    assert "engine NOT READY, 2 restarts" in text


class Serving(BaseHTTPRequestHandler):
    def do_GET(self):
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def metrics_server():
    server = HTTPServer(("127.0.0.1", 0), Serving)
    server.answers = [metrics_text(STATS), metrics_text(LATER, successes=14.0)]
    server.url = f"http://127.0.0.1:{server.server_port}/metrics"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments):
    return CliRunner().invoke(load("top"), arguments)


def test_once_prints_the_screen(metrics_server):
    result = run("--url", metrics_server.url, "--once", "--interval", "0.1")
    assert result.exit_code == 0
    assert "output tokens/s" in result.stdout
    assert "\x1b" not in result.stdout, "no colors where no terminal is"


@pytest.mark.parametrize("form", ["127.0.0.1:{port}", "http://127.0.0.1:{port}/", "http://127.0.0.1:{port}/metrics"])
def test_once_as_json(metrics_server, form):
    url = form.format(port=metrics_server.server_port)
    result = run("--url", url, "--once", "--json", "--interval", "0.1")
    view = json.loads(result.stdout)
    assert view["throughput"]["generation_tokens_per_s"] == 250.0
    assert view["requests"]["ended_per_s"] == 2.0
    assert view["engine"] == {"is_ready": True, "num_restarts": 0.0}


def test_a_pipe_gets_frame_after_frame(metrics_server):
    command = [sys.executable, "-m", "faser_trtllm.cli", "top", "--url", metrics_server.url, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(PATIENCE_S, process.kill)
        killer.start()
        num_frames = 0
        while num_frames < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            num_frames += "output tokens/s" in line
        process.stdout.close()
        assert process.wait() == 1, "it ends as its reader does"
        assert process.stderr.read() == ""
        killer.cancel()


def test_watching_goes_on_while_the_server_is_away(metrics_server, monkeypatch, capsys):
    metrics_server.answers = [metrics_text(STATS), metrics_text(LATER), "<html>", metrics_text(LATER)]
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) >= 5:
            raise KeyboardInterrupt

    # Not time.sleep itself: threads that earlier tests left behind would sleep here.
    monkeypatch.setattr(top_command, "time", SimpleNamespace(sleep=sleep))
    top_command._watch(metrics_server.url, 1.0)
    text = capsys.readouterr().out
    assert text.count("not in Prometheus' text format") == 1
    assert text.count("output tokens/s") == 4, "the last numbers stay"


def test_no_server_is_one_sentence():
    result = run("--url", "http://127.0.0.1:9", "--once")
    assert isinstance(result.exception, UnavailableError)
    assert "no metrics at http://127.0.0.1:9/metrics" in str(result.exception)
    assert "start `faser serve`" in str(result.exception)


def test_a_port_of_another_protocol_is_one_sentence():
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"\x00\x00\x18\x04\x00\r\n")  # as HTTP/2 begins

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        result = run("--url", f"127.0.0.1:{listener.getsockname()[1]}", "--once")
        thread.join(PATIENCE_S)
    assert isinstance(result.exception, UnavailableError)
    assert "what listens there does not speak HTTP/1.1" in str(result.exception)


def test_another_server_s_metrics_are_refused(metrics_server):
    metrics_server.answers = ["up 1\n"]
    with pytest.raises(UnavailableError, match="has no metrics of faser_trtllm; name the metrics port"):
        fetch(metrics_server.url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "add --once"),
        (["--interval", "0"], "interval is 0, allowed is 0.1 to 3600"),
        (["--interval", "nan"], "interval is nan"),
        (["--url", "http://[", "--once"], "url is"),
        (["--url", "file:///etc/hosts", "--once"], "url is 'file:///etc/hosts'; it must start with http://"),
    ],
)
def test_bad_flags_are_one_sentence(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, InvalidArgumentError)
    assert message in str(result.exception)
