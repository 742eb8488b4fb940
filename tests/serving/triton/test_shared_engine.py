"""One engine child for several models: who runs it, who joins it, and what happens when it or its owner goes."""

import contextlib
import os
import signal
import sys
import threading

import pytest

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.triton.shared_engine import SharedEngine, open_run_dir
from faser_trtllm.serving.worker.engine_process import open_listener
from faser_trtllm.serving.worker.messages import Failed
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS
from tests.support.streams import Stream
from tests.support.waiting import wait_until

COMMAND = (sys.executable, "-m", "tests.support.fake_engine")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    return directory


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def engines(engine_dir, run_dir):
    """Starts engines of one configuration, and closes them."""
    started = []

    def start(on_stats=None, **fields):
        config = ServiceConfig(
            engine_dir=str(engine_dir), drain_timeout_s=1.0, restart_backoff_s=0.05, restart_backoff_max_s=0.2, **fields
        )
        engine = SharedEngine(config, COMMAND, on_stats)
        started.append(engine)
        engine.start()
        return engine

    yield start
    for engine in started:
        engine.close()


def test_the_first_runs_the_child_and_the_others_join_it(engines, run_dir):
    stats = []
    first = engines(lambda values: stats.append("first"))
    others = [engines(lambda values: stats.append("other")) for _ in range(2)]
    assert [engine.runs_engine for engine in (first, *others)] == [True, False, False]
    assert [engine.pid is None for engine in (first, *others)] == [False, True, True]
    streams = [Stream(engine, text=text) for engine, text in zip((first, *others), ("ab", "cd", "ef"), strict=True)]
    assert [stream.wait().finish_reason for stream in streams] == ["length"] * 3
    assert [stream.text for stream in streams] == ["ababab", "cdcdcd", "efefef"]
    assert len({stream.id for stream in streams}) == 1  # the same id on each connection
    wait_until(lambda: stats)
    assert set(stats) == {"first"}


def test_who_runs_the_child_no_more_says_so(engines):
    seen = [[], []]
    first, second = (engines(values.append) for values in seen)
    wait_until(lambda: seen[0])
    first.close()
    assert seen[0][-1] == {}
    wait_until(lambda: seen[1])
    assert second.runs_engine
    assert seen[1][-1]


def test_another_configuration_has_a_child_of_its_own(engines):
    first, second = engines(), engines(max_queue_size=7)
    assert first.runs_engine
    assert second.runs_engine
    assert first.pid != second.pid


def test_cancel_and_stop_reach_the_child_over_every_connection(engines):
    for engine in (engines(), engines()):
        cancelled, stopped = (Stream(engine, text="abc", max_tokens=ENDLESS) for _ in range(2))
        wait_until(lambda s=stopped: s.events)
        engine.cancel(cancelled.id)
        engine.stop(stopped.id)
        assert cancelled.wait().code == "CANCELLED"
        final = stopped.wait()
        assert final.finish_reason == "cancelled"
        assert final.statistics.num_output_tokens == len(stopped.text) > 0


def test_a_model_that_leaves_takes_only_its_own_requests_along(engines):
    first, second = engines(), engines()
    left, kept = Stream(second, text="abc", max_tokens=ENDLESS), Stream(first, text="abc", max_tokens=60)
    wait_until(lambda: left.events and kept.events)
    second.close()
    assert left.wait().code == "UNAVAILABLE"
    assert kept.wait().finish_reason == "length"
    wait_until(lambda: first.stats().get("num_requests") == 0.0)


def test_a_killed_child_fails_all_streams_and_everybody_gets_the_next_one(engines):
    first, second = engines(), engines()
    streams = [Stream(engine, text="abc", max_tokens=ENDLESS) for engine in (first, second)]
    wait_until(lambda: all(stream.events for stream in streams))
    os.kill(first.pid, signal.SIGKILL)
    for stream in streams:
        assert isinstance(stream.wait(), Failed)
        assert stream.events[-1].code == "UNAVAILABLE"
    wait_until(lambda: first.is_ready and second.is_ready)
    assert first.runs_engine != second.runs_engine
    assert first.stats()["num_restarts"] + second.stats()["num_restarts"] == 1
    assert [Stream(engine, text="ab").wait().finish_reason for engine in (first, second)] == ["length"] * 2


def test_when_the_owner_goes_another_takes_over(engines, run_dir):
    first, second, third = engines(), engines(), engines()
    stream = Stream(third, text="abc", max_tokens=ENDLESS)
    wait_until(lambda: stream.events)
    first.close()
    assert stream.wait().code == "UNAVAILABLE"
    wait_until(lambda: second.is_ready and third.is_ready)
    assert second.runs_engine != third.runs_engine
    assert Stream(third, text="ab").wait().finish_reason == "length"


def test_a_model_that_is_loaded_while_the_owner_leaves_does_not_join_it(engines):
    """As an unload and a load right after it, which Triton runs side by side."""
    owner = engines()
    for _ in range(5):
        leaving = threading.Thread(target=owner.close)
        leaving.start()
        wait_until(owner._closing.is_set)
        owner = engines()
        assert Stream(owner, text="ab").wait().finish_reason == "length"
        leaving.join()
        assert owner.runs_engine


def test_a_joiner_whose_child_ends_before_it_is_ready_tries_again(engines, run_dir):
    """A listener that hangs up at once stands for a child that is about to end."""
    first = engines()
    (path,) = run_dir.glob("*.sock")
    path.unlink()
    num_joined = []
    with open_listener(path) as listener:

        def hang_up():
            while path.exists():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()
                    num_joined.append(1)

        listener.settimeout(0.05)
        hangs_up = threading.Thread(target=hang_up)
        hangs_up.start()
        closer = threading.Timer(0.3, first.close)
        closer.start()
        second = engines()
        hangs_up.join()
        closer.join()
    assert num_joined
    assert second.runs_engine
    assert Stream(second, text="ab").wait().finish_reason == "length"


def test_a_drain_reaches_everybody(engines):
    first, second = engines(), engines()
    streams = [Stream(first, text="abc", max_tokens=8), Stream(second, text="abc", max_tokens=ENDLESS)]
    wait_until(lambda: all(stream.events for stream in streams))
    os.kill(first.pid, signal.SIGTERM)
    assert streams[0].wait().finish_reason == "length"
    assert "shutting down" in streams[1].wait().message
    wait_until(lambda: {first.state.value, second.state.value} == {"draining"})


def test_nothing_is_left_in_the_run_directory(engines, run_dir):
    engines().close()
    assert list(run_dir.iterdir()) == []


def test_a_run_directory_that_others_may_enter_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FASER_RUN_DIR", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="FASER_RUN_DIR is a directory that other users can access"):
        open_run_dir()


def test_models_of_a_server_without_a_launcher_share_a_directory_of_their_own(tmp_path, monkeypatch):
    monkeypatch.delenv("FASER_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = open_run_dir()
    assert path == tmp_path / f"faser_{os.getuid()}_{os.getppid()}" == open_run_dir()
    assert path.stat().st_mode & 0o777 == 0o700
