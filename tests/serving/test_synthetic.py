"""Where synthetic acceptance shows: in each answer, the metrics, faser top, the bench's report and OpenAI's JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.serve.outcome import Outcome
from benchmarks.serve.summary import summarize_load
from faser_trtllm.serving.client import Response
from faser_trtllm.serving.observe.view import make_view
from faser_trtllm.serving.openai.reply import Reply
from faser_trtllm.serving.openai.request import ServedModel, parse_completion
from faser_trtllm.serving.text.finish_reason import spell_finish
from faser_trtllm.trtllm.convert.synthetic import FORCED_ACCEPTANCE
from tests.support.engine_dirs import make_engine_dir
from tests.support.scrapes import STATS, rendered, scrape
from tests.support.triton_server import Server


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_batch_size=2, max_num_tokens=64, max_seq_len=96)


def _faser(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "faser_trtllm.cli", *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)


def test_generate_marks_its_json_and_says_so_at_the_start(engine_dir: Path) -> None:
    arguments = ("generate", "--engine_dir", engine_dir, "--prompt", "and then", "--max_tokens", 12, "--json")
    forced = _faser(*arguments, "--speculation", "fixed:4", **{FORCED_ACCEPTANCE: "3"})
    assert json.loads(forced.stdout)["synthetic_acceptance"] is True
    assert "OUTPUTS ARE NOT THE TARGET'S" in forced.stderr
    exact = _faser(*arguments, "--speculation", "fixed:4")
    assert "synthetic" not in exact.stdout + exact.stderr


@pytest.mark.triton
@pytest.mark.slow
def test_a_server_marks_answers_metrics_and_top(engine_dir: Path, tmp_path: Path) -> None:
    environment = {FORCED_ACCEPTANCE: "1.5"}
    with Server(engine_dir, speculation="fixed:3", environment=environment, log=tmp_path / "log") as server:
        server.wait_ready()
        body = json.dumps({"text_input": "and then", "max_tokens": 8, "end_id": -1}).encode()
        with urllib.request.urlopen(f"{server.http_url}/v2/models/faser/generate", data=body, timeout=30) as answer:
            assert json.load(answer)["finish_reason"] == "length; synthetic_acceptance"
        top = _faser("top", "--url", f"127.0.0.1:{server.ports[2]}", "--once", "--json", "--interval", "1")
        assert json.loads(top.stdout)["engine"]["is_synthetic"] is True
        assert server.metric("faser_synthetic_acceptance") == 1.0
        assert "OUTPUTS ARE NOT THE TARGET'S" in server.output()


@pytest.mark.parametrize("marked", [False, True])
def test_faser_top_says_so_in_its_title(marked: bool) -> None:
    view = make_view(scrape(STATS | {"synthetic_acceptance": float(marked)}))
    assert ("SYNTHETIC ACCEPTANCE" in rendered(view, width=120)) == marked


@pytest.mark.parametrize("marked", [False, True])
def test_openai_answers_carry_it_as_the_system_fingerprint(marked: bool) -> None:
    request = parse_completion({"model": "faser", "prompt": "a"}, ServedModel("faser"))
    reply = Reply(request, "faser", None)
    delta = Response("b", (1,), spell_finish("length", marked), 1, 1)
    expected = "synthetic_acceptance" if marked else None
    assert [chunk.get("system_fingerprint") for chunk in reply.chunks(0, delta)] == [expected]
    whole = Reply(request, "faser", None)
    whole.add(0, delta)
    assert whole.whole().get("system_fingerprint") == expected
    assert whole.whole()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("marked", [False, True])
def test_the_benchs_summary_counts_it(marked: bool) -> None:
    outcomes = [Outcome(0.0, ended_s=1.0, chunk_s=[0.5], num_tokens=1, is_synthetic=marked) for _ in range(3)]
    assert summarize_load(outcomes, {}).num_synthetic == 3 * marked
