"""The backend `faser` watches its engine process: crashes, hangs, slow steps and starts that do not end."""

import json
import os
import re
import signal
import time

import pytest

from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from tests.support.effort import ONLY_ALL
from tests.support.fake_engine import CRASH_TOKEN, ENDLESS, HANG_TOKEN
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

READY = "faser_engine_ready"
SUCCESSES = 'faser_request_success_total{finished_reason="length"'


@pytest.fixture
def serve(fake_engine_dir, tmp_path):
    """A server whose engine process is the fake one, or the module of this text."""
    servers = []

    def start(settings, module=None):
        config = tmp_path / "faser.yaml"
        config.write_text("restart_backoff_s: 0.05\n" + settings)
        environment = {}
        if module is not None:
            (tmp_path / "own_engine.py").write_text(module)
            environment = {"FASER_ENGINE_MODULE": "own_engine", "PYTHONPATH": str(tmp_path)}
        server = Server(fake_engine_dir, is_fake=True, config=config, environment=environment, log=tmp_path / "log")
        servers.append(server)
        return server.wait_ready()

    yield start
    for server in servers:
        server.__exit__()


def answers(server):
    return generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"


def send_token(server, token):
    """The error that a request with this token ends with."""
    with GrpcClient(server.grpc_url) as client, pytest.raises(ResponseError) as caught:
        list(client.stream(input_ids=(token,), max_tokens=3))
    return str(caught.value)


def wait_restarted(server, number):
    wait_until(lambda: server.metric("faser_engine_restarts_total") == number)
    wait_until(lambda: server.metric(READY) == 1)


def test_a_request_that_kills_the_engine_again_and_again_does_not_end_the_service(serve):
    """Its counters go on where they were."""
    server = serve("health_timeout_s: 7200\nhang_timeout_s: 7200\n")
    for number in (1, 2):
        assert answers(server)
        wait_until(lambda number=number: server.metric(SUCCESSES) == number)
        assert "send the request again" in send_token(server, CRASH_TOKEN)
        wait_restarted(server, number)
    assert answers(server)
    wait_until(lambda: server.metric(SUCCESSES) == 3)


def test_a_crash_in_native_code_leaves_its_stacks_in_the_log(serve):
    server = serve("health_timeout_s: 7200\nhang_timeout_s: 7200\n")
    os.kill(server.engine_pid(), signal.SIGSEGV)
    wait_restarted(server, 1)
    assert "Segmentation fault" in server.output()
    assert "engine_process/main.py" in server.output(), "the stacks of its threads"
    assert f"the engine process ended with status -{int(signal.SIGSEGV)}" in server.output()


def test_an_executor_that_hangs_is_seen_though_its_process_answers_and_is_started_again(serve):
    server = serve("health_timeout_s: 2\nhang_timeout_s: 8\n")
    assert answers(server)
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:  # without work it is healthy, however long
        assert server.metric(READY) == 1
        time.sleep(0.1)
    pid = server.engine_pid()
    with GrpcClient(server.grpc_url) as client:
        client.send(input_ids=(HANG_TOKEN,), max_tokens=3)
        wait_until(lambda: server.metric(READY) == 0)
        with pytest.raises(ResponseError, match=r"has been in one step for \d+ s"):
            answers(server)
        assert server.engine_pid() == pid
        with pytest.raises(ResponseError, match="send the request again"):
            client.receive(PATIENCE_S)
    wait_restarted(server, 1)
    assert server.engine_pid() != pid
    assert answers(server)


@pytest.mark.parametrize("paused", ["launcher and server", "all"])
def test_a_pause_of_the_machine_ends_no_stream(serve, paused):
    """A virtual machine or a container may rest for longer than hang_timeout_s, and nobody is at fault."""
    server = serve("health_timeout_s: 2\nhang_timeout_s: 4\n")
    pids = [server.process.pid, server.triton_pid()] + ([server.engine_pid()] if paused == "all" else [])
    with GrpcClient(server.grpc_url) as client:
        client.send(input_ids=(65, 66), max_tokens=ENDLESS, stream=True)
        client.receive(PATIENCE_S)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        until_s = time.monotonic() + 5  # longer than the limit again
        while time.monotonic() < until_s:
            client.receive(PATIENCE_S)
        client.close(cancel=True)
    assert server.metric("faser_engine_restarts_total") == 0
    assert server.triton_pid() == pids[1]


PACED = """
import json, pathlib
from faser_trtllm.executor.stats import Progress
from tests.support import fake_engine

def progress(self):
    age_s, slow_step_s = json.loads(pathlib.Path({path!r}).read_text())
    return Progress(7, True, age_s, slow_step_s)

fake_engine.EchoExecutor.progress = progress
fake_engine.main(opener=fake_engine.open_echo)
"""


@ONLY_ALL
def test_a_step_is_judged_by_the_steps_before_it(serve, tmp_path):
    path = tmp_path / "progress"

    def report(age_s, slow_step_s):
        """Seconds of the running step, and of a slow one before it."""
        scratch = tmp_path / "scratch"
        scratch.write_text(json.dumps([age_s, slow_step_s]))
        scratch.replace(path)

    report(0.0, 0.0)
    server = serve("health_timeout_s: 40\nhang_timeout_s: 600\n", PACED.format(path=str(path)))
    # Far from the limits, since the backend adds the time since the last answer.
    for age_s, slow_step_s, is_ready in (
        (50.0, 0.0, False),
        (20.0, 0.0, True),
        (50.0, 1.0, False),  # never later for fast steps
        (50.0, 20.0, True),
        (90.0, 20.0, False),
        (500.0, 300.0, True),
    ):
        report(age_s, slow_step_s)
        wait_until(lambda wanted=float(is_ready): server.metric(READY) == wanted)
    pid = server.engine_pid()
    report(610.0, 300.0)
    wait_until(lambda: server.metric(READY) == 0)
    wait_until(lambda: re.search(r"the engine process has hung for \d+ s and is restarted", server.output()))
    report(0.0, 0.0)
    wait_until(lambda: server.metric(READY) == 1)
    assert server.engine_pid() != pid


SLOW_SECOND = """
import pathlib, time
runs = pathlib.Path({path!r})
with runs.open("a") as file:
    file.write("x")
if runs.read_text() == "xx":
    time.sleep(600)
from tests.support import fake_engine
fake_engine.main(opener=fake_engine.open_echo)
"""


@ONLY_ALL
def test_an_engine_that_does_not_come_up_again_is_started_once_more(serve, tmp_path):
    """The second start hangs before it is ready, as a device might."""
    server = serve("startup_timeout_s: 15\n", SLOW_SECOND.format(path=str(tmp_path / "runs")))
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until(lambda: "the engine process was not ready within 15 s and is restarted" in server.output())
    wait_until(lambda: server.metric(READY) == 1)
    assert answers(server)
    assert (tmp_path / "runs").read_text() == "xxx"


JUMPING = """
import random, time
real = time.time
time.time = lambda: real() + random.choice((-3600.0, 0.0, 3600.0))
from tests.support import fake_engine
fake_engine.main(opener=fake_engine.open_echo)
"""


def test_a_wall_clock_that_jumps_an_hour_to_and_fro_has_no_effect(serve):
    server = serve("", JUMPING)
    until_s = time.monotonic() + 2.5  # some pings
    while time.monotonic() < until_s:
        assert generate_http(server.http_url, "abc", max_tokens=20, timeout_ms=60_000.0).text.startswith("abcabc")
        assert server.metric(READY) == 1
    assert server.metric("faser_engine_restarts_total") == 0
