"""OpenAI's API under many short requests, streamed, whole and left early: nothing grows, and SIGTERM ends all at once.

tritonserver once kept 6 KiB of every request, because the front ended each stream before its end.
"""

from __future__ import annotations

import http.client
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.soak.growth import MIB, slope
from benchmarks.soak.verdict import POOL_SLACK
from benchmarks.soak.watch import ProcessSample, process_sample
from tests.support.effort import ONLY_ALL
from tests.support.engine_dirs import make_engine_dir
from tests.support.openai_frontend import TEMPLATE, Frontend
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow, ONLY_ALL]

NUM_FIRST, NUM_JUDGED = 4, 6  # rounds; in the first ones processes make what they keep
NUM_CLIENTS, NUM_REQUESTS = 8, 400  # of a round, of which an eighth is left early and a quarter is not streamed
MAX_GROWTH_MIB = NUM_REQUESTS / 1024  # per round: 1 KiB a request
BODY = {"model": "faser", "messages": [{"role": "user", "content": "hello world"}], "temperature": 0}


@pytest.fixture
def frontend(tmp_path):
    sizes = {"max_batch_size": 16, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 16}
    engine_dir = make_engine_dir(tmp_path, TEMPLATE, **sizes)
    with Server(engine_dir, speculation="fixed:4", log=tmp_path / "triton.log") as triton:
        triton.wait_ready()
        arguments = ("--url", f"grpc://{triton.grpc_url}", "--engine_dir", engine_dir)
        with Frontend(tmp_path / "front.log", *arguments) as frontend:
            yield frontend.wait_ready(), triton


def ask(port: int, number: int) -> str:
    """One request, by a connection of its own -> its text."""
    is_streamed, is_left = number % 4 != 0, number % 8 == 1
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    fields = {"stream": is_streamed, "max_tokens": 400 if is_left else 16, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY | fields), headers)
    response = connection.getresponse()
    try:
        assert response.status == 200, response.read()
        if is_left:
            response.readline()
            return ""
        if not is_streamed:
            return json.loads(response.read())["choices"][0]["message"]["content"]
        lines = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line.startswith(b"data: {")]
        chunks = [json.loads(line) for line in lines]
        assert all("choices" in chunk for chunk in chunks), chunks[-1]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    finally:
        connection.close()


def test_nothing_grows_and_all_ends(frontend) -> None:
    front, triton = frontend
    pids = {"front": front.process.pid, "server": triton.triton_pid(), "engine": triton.engine_pid()}
    rounds: list[dict[str, ProcessSample | None]] = []
    texts: set[str] = set()
    begun_s = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for _ in range(NUM_FIRST + NUM_JUDGED):
            texts |= set(clients.map(lambda number: ask(front.port, number), range(NUM_REQUESTS)))
            wait_until(lambda: triton.metric("faser_num_requests_running") == 0)
            rounds.append({role: process_sample(pid) for role, pid in pids.items()})
    assert len(texts - {""}) == 1, "a text does not depend on what runs beside it"
    judged = rounds[NUM_FIRST - 1 :]
    for role in pids:
        samples = [found[role] for found in judged]
        growth = slope([(float(i), sample.rss_bytes / MIB) for i, sample in enumerate(samples)])
        print(f"{role}: {growth:.3f} MiB a round, {[round(s.rss_bytes / MIB, 1) for s in samples]}, last {samples[-1]}")
        assert growth < MAX_GROWTH_MIB, role
        for name in ("num_fds", "num_threads"):
            counts = [getattr(sample, name) for sample in samples]
            assert max(counts[1:]) <= counts[0] + POOL_SLACK, (role, name, counts)
    print(f"{len(rounds) * NUM_REQUESTS} requests in {time.monotonic() - begun_s:.0f} s")
    for process in (front.process, triton.process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "Exit timeout expired" not in triton.output()
