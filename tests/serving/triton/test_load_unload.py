"""Load and unload of a model through the control API, many times: nothing grows in the server.

Memory is judged for the processes that live through all cycles; the engine process is new in each.

FASER_LOAD_CYCLES=100 does it a hundred times (pytest needs --timeout 600 then).
"""

from __future__ import annotations

import os
import time
import urllib.request

import pytest

from benchmarks.soak.growth import MIB, slope
from benchmarks.soak.verdict import POOL_SLACK
from benchmarks.soak.watch import ENGINE, LAUNCHER, SERVER, ServiceProcesses
from faser_trtllm.serving.client import generate_http
from faser_trtllm.serving.launch.process import command_line
from tests.support.effort import ONLY_ALL, pick
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

NUM_FIRST = 24  # cycles in which the server makes what it keeps: it grew by 4.5 MiB in these, by 0.2 in the next 36
NUM_JUDGED = int(os.environ.get("FASER_LOAD_CYCLES", pick("4", "6")))
MAX_GROWTH_MIB_PER_CYCLE = 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    output = make_engine_dir(directory, max_batch_size=8, max_seq_len=128, tokens_per_block=16)
    with Server(output, speculation="fixed:4", allow_control=True, log=directory / "log") as server:
        yield server.wait_ready()


def control(server, action):
    request = urllib.request.Request(f"{server.http_url}/v2/repository/models/faser/{action}", data=b"{}")
    urllib.request.urlopen(request, timeout=30).read()


def ask(server):
    return generate_http(server.http_url, "hello world", max_tokens=20, end_id=-1).text


@ONLY_ALL
def test_load_and_unload_again_and_again(server):
    processes = ServiceProcesses(server.process.pid)
    num_cycles = NUM_FIRST + NUM_JUDGED
    expected = ask(server)
    samples, seconds = [], []
    for cycle in range(num_cycles):
        started_s = time.monotonic()
        before = processes.pids()
        gone = {pid for role, pid in before.items() if role not in (LAUNCHER, SERVER)}
        assert len(gone) == 1, "the engine process"
        control(server, "unload")
        wait_until(lambda gone=gone: not any(command_line(pid) for pid in gone))
        assert processes.pids().keys() == {LAUNCHER, SERVER}
        control(server, "load")
        assert ask(server) == expected
        seconds.append(time.monotonic() - started_s)
        samples.append(processes.sample())
        assert samples[-1].processes.keys() == before.keys(), f"cycle {cycle}"
    assert server.process.poll() is None
    first, last = samples[NUM_FIRST - 1], samples[-1]
    for role in first.processes:
        counts = [(s.processes[role].num_fds, s.processes[role].num_threads) for s in samples[NUM_FIRST - 1 :]]
        assert max(fds for fds, _ in counts[1:]) <= counts[0][0] + POOL_SLACK, (role, counts)
        assert max(threads for _, threads in counts[1:]) <= counts[0][1] + POOL_SLACK, (role, counts)
    growth = {
        role: slope([(float(i), s.processes[role].rss_bytes / MIB) for i, s in enumerate(samples[NUM_FIRST:])])
        for role in (LAUNCHER, SERVER)
    }
    print(f"{num_cycles} cycles of {sum(seconds) / len(seconds):.2f} s, MiB per cycle: {growth}")
    print(f"after {NUM_FIRST}: {first}; at the end: {last}")
    assert growth[LAUNCHER] < 0.01
    assert growth[SERVER] < MAX_GROWTH_MIB_PER_CYCLE
    assert last.processes[ENGINE].pid != first.processes[ENGINE].pid, "memory of a process that lived on was not judged"
