"""A real Triton server, with an engine process whose executor is a fake, so that streams last as needed."""

import contextlib
import os
import signal
import socket
import time
import urllib.request

import pytest

from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from faser_trtllm.serving.launch.process import command_line
from tests.support.fake_engine import ENDLESS
from tests.support.streams import Answer
from tests.support.triton_server import Server, free_ports, is_free, run_dir
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture
def server(fake_engine_dir, tmp_path, request):
    """Its timeouts, but for the drain's if the test gives another, are hours: no test passes because of one."""
    drain_timeout_s = getattr(request, "param", 1800)
    config = tmp_path / "faser.yaml"
    config.write_text(
        f"drain_timeout_s: {drain_timeout_s}\nrestart_backoff_s: 0.05\nhealth_timeout_s: 7200\nhang_timeout_s: 7200\n"
    )
    with Server(fake_engine_dir, is_fake=True, config=config, log=tmp_path / "log") as server:
        server.wait_ready()
        yield server


def assert_nothing_left(server, pids, directory):
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    assert all(is_free(port) for port in server.ports)
    assert not directory.exists()


def test_kill_of_the_engine_ends_every_stream_and_the_service_comes_back(server):
    with GrpcClient(server.grpc_url) as client:
        for _ in range(50):
            client.send("abc", max_tokens=ENDLESS, stream=True)
        seen = set()
        while len(seen) < 50:
            seen.add(client.receive(PATIENCE_S)[0])
        os.kill(server.engine_pid(), signal.SIGKILL)
        errors = []
        while len(errors) < 50:
            try:
                _, response = client.receive(PATIENCE_S)
                assert not response.is_final
            except ResponseError as error:
                errors.append(error)
        assert all("send the request again" in str(error) for error in errors)

    def answers():
        with contextlib.suppress(ResponseError):
            return generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"

    wait_until(answers)


@pytest.mark.parametrize("server", [2.0], indirect=True, ids=["drains"])
def test_sigterm_lets_short_streams_finish_and_tells_long_ones(server):
    directory, pids = server.run_dir(), server.pids()
    short = [Answer(server, 60, http) for http in (False, True)]
    long = [Answer(server, ENDLESS, http) for http in (False, True)]
    for answer in short + long:
        assert answer.started.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    for answer in short:
        assert (answer.wait().finish_reason, answer.error) == ("length", None)
        assert answer.text == "abc" * 20
    assert server.wait() == 0, server.output()
    for answer in long:
        assert "shutting down" in str(answer.wait().error)
        assert "abc" in answer.text
    assert_nothing_left(server, pids, directory)


def test_a_second_signal_ends_it_at_once(server):
    directory, pids = server.run_dir(), server.pids()
    answer = Answer(server, ENDLESS)
    assert answer.started.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0, "the drain would have taken longer"
    assert answer.wait().error is not None
    assert_nothing_left(server, pids, directory)


def test_kill_of_tritonserver_leaves_nothing(server):
    directory, pids = server.run_dir(), server.pids()
    assert len(pids) == 2  # and the engine process
    os.kill(server.triton_pid(), signal.SIGKILL)
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    wait_until(lambda: server.output().count("ready:") == 2)  # it is started again
    assert not directory.exists()
    directory, pids = server.run_dir(), server.pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert_nothing_left(server, pids, directory)


def test_kill_of_the_launcher_ends_the_server_and_the_next_launch_cleans_up(fake_engine_dir, tmp_path):
    with Server(fake_engine_dir, is_fake=True, log=tmp_path / "log") as server:
        server.wait_ready()
        directory, pids = server.run_dir(), server.pids()
        server.process.kill()
        server.process.wait()
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    with Server(fake_engine_dir, is_fake=True, log=tmp_path / "log2") as second:
        second.wait_ready()
        assert not directory.exists()


def test_all_models_are_served_and_one_that_is_unloaded_ends_nothing(fake_engine_dir, tmp_path):
    with Server(fake_engine_dir, is_fake=True, models=None, allow_control=True, log=tmp_path / "log") as server:
        server.wait_ready()
        assert "ready: ensemble, faser, tensorrt_llm, tensorrt_llm_bls on" in server.output()
        unload = f"{server.http_url}/v2/repository/models/ensemble/unload"
        urllib.request.urlopen(urllib.request.Request(unload, data=b"{}"), timeout=PATIENCE_S).read()
        assert generate_http(server.http_url, "abc", max_tokens=4).text
        assert server.process.poll() is None


def test_a_model_that_is_not_there_is_named(fake_engine_dir, tmp_path):
    with Server(fake_engine_dir, is_fake=True, models=("faser", "fast"), log=tmp_path / "log") as server:
        assert server.wait() == 2
        there = "ensemble, faser, tensorrt_llm, tensorrt_llm_bls"
        assert f"models has 'fast', the model repository has {there}; name one of these" in server.output()


def test_port_in_use_is_named(fake_engine_dir, tmp_path):
    ports = free_ports()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports[1]))
        busy.listen()
        with Server(fake_engine_dir, is_fake=True, ports=ports, log=tmp_path / "log") as server:
            assert server.wait() == 2
            assert f"grpc_port {ports[1]} on 127.0.0.1 cannot be used" in server.output()
            assert "--grpc_port" in server.output()


def test_an_engine_that_cannot_be_opened_is_told_in_a_sentence(tmp_path):
    with Server(tmp_path / "nowhere", is_fake=True, log=tmp_path / "log") as server:
        directories = []
        wait_until(lambda: directories.append(run_dir(server.process.pid)) or directories[-1], poll_s=0.005)
        assert server.wait() == 2
        assert "error: the server did not start: tokenizer.json is missing" in server.output()
        assert not directories[-1].exists()


def test_streams_that_waited_for_a_paused_server_lose_nothing(server):
    """Triton's HTTP threads have room for 277 responses each, and lose the end of a stream without an error where more
    come at once."""
    num_tokens = 1200
    alone = Answer(server, num_tokens, http=True).wait()
    answers = [Answer(server, num_tokens, http=True) for _ in range(48)]
    for answer in answers:
        assert answer.started.wait(PATIENCE_S)
    os.kill(server.triton_pid(), signal.SIGSTOP)
    time.sleep(3)  # some 300 responses of each stream
    os.kill(server.triton_pid(), signal.SIGCONT)
    for answer in answers:
        answer.wait()
        assert answer.error is None
        assert (answer.finish_reason, answer.text) == ("length", alone.text)
