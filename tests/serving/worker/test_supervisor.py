"""The supervisor with a real child process, whose executor is a fake."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.executor.stats import Progress
from faser_trtllm.serving.worker import messages
from faser_trtllm.serving.worker import supervisor as supervisor_module
from faser_trtllm.serving.worker.messages import Failed
from faser_trtllm.serving.worker.supervisor import EngineState, Supervisor
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS, HANG_TOKEN
from tests.support.streams import Stream
from tests.support.waiting import wait_until

COMMAND = (sys.executable, "-m", "tests.support.fake_engine")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    return directory


@pytest.fixture
def supervisor(engine_dir):
    with started(engine_dir) as supervisor:
        yield supervisor


@pytest.fixture
def frequent_pings(monkeypatch):
    """So that a health timeout of 2 s forgives a busy machine a late answer."""
    monkeypatch.setattr(supervisor_module, "PING_PERIOD_S", 0.5)


@contextlib.contextmanager
def started(engine_dir, **settings):
    fields = {"drain_timeout_s": 0.3, "restart_backoff_s": 0.05} | settings
    supervisor = Supervisor(ServiceConfig(engine_dir=str(engine_dir), **fields), COMMAND)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.close()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_requests_run_side_by_side(supervisor):
    streams = [Stream(supervisor, text=text) for text in ("abc", "xyz", "hello")]
    for stream in streams:
        assert stream.wait().finish_reason == "length"
    assert [stream.text for stream in streams] == ["abcabc", "xyzxyz", "helloh"]


def test_bad_requests_fail_alone(supervisor):
    bad, good = Stream(supervisor, max_tokens=0), Stream(supervisor)
    assert (bad.wait().code, good.wait().finish_reason) == ("INVALID_ARG", "length")
    assert "max_tokens is 0" in bad.events[-1].message


def test_cancel_ends_the_stream(supervisor):
    stream = Stream(supervisor, max_tokens=ENDLESS)
    wait_until(lambda: stream.events)
    supervisor.cancel(stream.id)
    assert stream.wait().code == "CANCELLED"
    supervisor.cancel(stream.id)
    assert supervisor.num_open == 0


def test_kill_fails_all_streams_at_once_and_the_child_comes_back(engine_dir):
    """No timeout tells it: they are hours."""
    hours = {"health_timeout_s": 7200.0, "hang_timeout_s": 7200.0}
    with started(engine_dir, **hours) as supervisor:
        refusals = []

        class Insisting(Stream):
            """Asks again as soon as it is told that the child is gone."""

            def _on_event(self, event):
                if isinstance(event, Failed):
                    with pytest.raises(UnavailableError) as caught:
                        Stream(supervisor)
                    refusals.append(str(caught.value))
                super()._on_event(event)

        streams = [Insisting(supervisor, max_tokens=ENDLESS) for _ in range(50)]
        wait_until(lambda: all(stream.events for stream in streams))
        killed_pid = supervisor.pid
        os.kill(killed_pid, signal.SIGKILL)
        assert {stream.wait().code for stream in streams} == {"UNAVAILABLE"}
        assert len(refusals) == 50
        assert all("try again in" in refusal for refusal in refusals)
        wait_until(lambda: supervisor.is_ready)
        assert supervisor.pid != killed_pid
        assert Stream(supervisor).wait().finish_reason == "length"
        assert supervisor.stats()["num_restarts"] == 1


def test_a_crash_in_native_code_leaves_its_stacks_in_the_log(engine_dir, capfd):
    with started(engine_dir) as supervisor:
        os.kill(supervisor.pid, signal.SIGSEGV)
        wait_until(lambda: supervisor.stats()["num_restarts"] == 1)
    log = capfd.readouterr().err
    assert "Segmentation fault" in log
    assert "engine_process.py" in log, "the stacks of its threads"


def test_a_request_that_kills_the_child_again_and_again_does_not_end_the_service(supervisor):
    for _ in range(2):
        assert Stream(supervisor, text=None, token_ids=(319,)).wait().code == "UNAVAILABLE"
        wait_until(lambda: supervisor.is_ready)
    assert Stream(supervisor).wait().finish_reason == "length"


def test_a_stopped_child_is_not_ready_and_recovers_with_its_streams(engine_dir, frequent_pings):
    with started(engine_dir, health_timeout_s=2.0) as supervisor:
        stream, pid = Stream(supervisor, max_tokens=300), supervisor.pid
        wait_until(lambda: stream.events)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: not supervisor.is_ready)
            with pytest.raises(UnavailableError, match="has not answered"):
                Stream(supervisor)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: supervisor.is_ready)
        assert Stream(supervisor).wait().finish_reason == "length"
        assert stream.wait().finish_reason == "length"
        assert supervisor.pid == pid


def test_an_executor_that_hangs_is_seen_though_its_process_answers_and_is_started_again(engine_dir, frequent_pings):
    with started(engine_dir, health_timeout_s=1.5, hang_timeout_s=4.0) as supervisor:
        pid = supervisor.pid
        stuck = Stream(supervisor, text=None, token_ids=(HANG_TOKEN,))
        wait_until(lambda: not supervisor.is_ready)
        wait_until(lambda: supervisor._stalls)  # the next answer says that it is in a step
        with pytest.raises(UnavailableError, match=r"has been in one step for \d+ s"):
            Stream(supervisor)
        assert supervisor.stats()["num_requests"] == 1, "the process still answers pings"
        assert supervisor.pid == pid
        assert stuck.wait().code == "UNAVAILABLE"
        wait_until(lambda: supervisor.is_ready)
        assert supervisor.pid != pid
        assert Stream(supervisor).wait().finish_reason == "length"


def test_a_step_is_judged_by_the_steps_before_it(engine_dir):
    """Not started: what a child would send is handed in."""
    config = ServiceConfig(engine_dir=str(engine_dir), health_timeout_s=4.0, hang_timeout_s=60.0)
    supervisor = Supervisor(config)
    supervisor._handle(messages.Ready(320, 512, 4))

    def is_ready(age_s, slow_step_s):
        supervisor._handle(messages.Pong({}, Progress(7, True, age_s, slow_step_s)))
        return supervisor.is_ready

    assert is_ready(3.0, 0.0)
    assert not is_ready(5.0, 0.0)
    assert is_ready(5.0, 2.0)
    assert not is_ready(9.0, 2.0)
    assert not is_ready(5.0, 0.1), "it never judges sooner than health_timeout_s, nor later for fast steps"
    assert is_ready(50.0, 30.0)
    assert not is_ready(61.0, 30.0), "a child that is about to be killed is not ready"


def test_an_engine_without_work_is_healthy_however_long(engine_dir, frequent_pings):
    with started(engine_dir, health_timeout_s=2.0) as supervisor:
        assert Stream(supervisor).wait().finish_reason == "length"
        for _ in range(23):
            time.sleep(0.1)
            assert supervisor.is_ready
        assert Stream(supervisor).wait().finish_reason == "length"


def test_sigterm_drains(engine_dir):
    with started(engine_dir, drain_timeout_s=1.5) as supervisor:
        short, long = Stream(supervisor, max_tokens=20), Stream(supervisor, max_tokens=ENDLESS)
        wait_until(lambda: short.events and long.events)
        pid = supervisor.pid
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: supervisor.state is EngineState.DRAINING)
        with pytest.raises(UnavailableError, match="shutting down"):
            Stream(supervisor)
        assert short.wait().finish_reason == "length"
        assert (long.wait().code, "shutting down" in long.events[-1].message) == ("UNAVAILABLE", True)
        wait_until(lambda: not is_alive(pid))
        time.sleep(0.2)
        assert supervisor.pid is None


def test_close_leaves_no_process_and_fails_what_is_open(engine_dir):
    supervisor = Supervisor(ServiceConfig(engine_dir=str(engine_dir)), COMMAND)
    supervisor.start()
    stream, pid = Stream(supervisor, max_tokens=ENDLESS), supervisor.pid
    supervisor.close()
    assert stream.wait(0).code == "UNAVAILABLE"
    assert not is_alive(pid)
    assert not any(thread.name.startswith("faser-supervisor") for thread in threading.enumerate())


def test_a_failed_start_says_why(tmp_path):
    supervisor = Supervisor(ServiceConfig(engine_dir=str(tmp_path)), COMMAND)
    with pytest.raises(FaserError, match=r"tokenizer\.json is missing"):
        supervisor.start()


def test_a_child_that_ends_before_it_is_ready_is_an_error():
    supervisor = Supervisor(ServiceConfig(engine_dir="x"), (sys.executable, "-c", "pass", "--"))
    with pytest.raises(UnavailableError, match="ended before it was ready"):
        supervisor.start()


def test_the_child_dies_with_its_supervisor(engine_dir, tmp_path):
    """kill -9 of the process that holds the supervisor leaves no engine behind."""
    script = (
        "import sys, time\n"
        "from faser_trtllm.config import ServiceConfig\n"
        "from faser_trtllm.serving.worker.supervisor import Supervisor\n"
        f"s = Supervisor(ServiceConfig(engine_dir={str(engine_dir)!r}), {COMMAND!r})\n"
        "s.start(); print(s.pid, flush=True); time.sleep(60)\n"
    )
    import subprocess

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    wait_until(lambda: not is_alive(pid))


def test_a_child_that_does_not_come_up_again_is_started_once_more(engine_dir, tmp_path):
    """The second start hangs before it is ready, as a device might."""
    script = (
        "import pathlib, sys, time\n"
        f"runs = pathlib.Path({str(tmp_path)!r}, 'runs')\n"
        "with runs.open('a') as file: file.write('x')\n"
        "if runs.read_text() == 'xx': time.sleep(120)\n"
        "from tests.support.fake_engine import main, open_echo\n"
        "main(sys.argv[1:], opener=open_echo)\n"
    )
    config = ServiceConfig(engine_dir=str(engine_dir), restart_backoff_s=0.05)
    supervisor = Supervisor(config, (sys.executable, "-c", script))
    supervisor.start()
    supervisor._config = config.model_copy(update={"startup_timeout_s": 2.5})
    try:
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not supervisor.is_ready)
        wait_until(lambda: supervisor.is_ready)
        assert Stream(supervisor).wait().finish_reason == "length"
        assert supervisor.stats()["num_restarts"] >= 2
    finally:
        supervisor.close()
