"""A real Triton server, with an engine child whose executor is a fake, so that streams last as needed."""

import contextlib
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from faser_trtllm.serving.worker.process import command_line
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS
from tests.support.streams import Answer
from tests.support.triton_server import Server, fake_repository, free_ports, is_free, shm_names, shm_prefix
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]


NUM_PROCESSES = {"python": 3, "native": 2}  # tritonserver, the engine process, a stub


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    return directory


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return fake_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def server(engine_dir, repository, edge, tmp_path, request):
    """Its timeouts, but for the drain's if the test gives another, are hours: no test passes because of one."""
    drain_timeout_s = getattr(request, "param", 1800)
    config = tmp_path / "faser.yaml"
    config.write_text(
        f"drain_timeout_s: {drain_timeout_s}\nrestart_backoff_s: 0.05\nhealth_timeout_s: 7200\nhang_timeout_s: 7200\n"
    )
    with Server(engine_dir, model_repo=repository, config=config, edge=edge, log=tmp_path / "log") as server:
        server.wait_ready()
        yield server


def assert_nothing_left(server, pids, names):
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    assert all(is_free(port) for port in server.ports)
    assert_removed(names)


def assert_removed(names):
    assert names, "there was shared memory"
    assert not [name for name in names if Path("/dev/shm", name).exists()]


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
    names, pids = server.shm_names(), server.pids()
    short = [Answer(server, 60, http) for http in (False, True)]
    long = [Answer(server, ENDLESS, http) for http in (False, True)]
    for answer in short + long:
        assert answer.started.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    for answer in short:
        assert (answer.wait().finish_reason, answer.error) == ("length", None)
        assert answer.text == "abc" * 20
    assert server.process.wait(PATIENCE_S) == 0, server.output()
    for answer in long:
        assert "shutting down" in str(answer.wait().error)
        assert "abc" in answer.text
    assert_nothing_left(server, pids, names)


def test_a_second_signal_ends_it_at_once(server):
    names, pids = server.shm_names(), server.pids()
    answer = Answer(server, ENDLESS)
    assert answer.started.wait(PATIENCE_S)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE_S) == 0, "the drain would have taken longer"
    assert answer.wait().error is not None
    assert_nothing_left(server, pids, names)


def test_kill_of_tritonserver_leaves_nothing(server, edge):
    names, pids = server.shm_names(), server.pids()
    assert len(pids) >= NUM_PROCESSES[edge]
    os.kill(server.triton_pid(), signal.SIGKILL)
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    wait_until(lambda: server.output().count("ready:") == 2)  # it is started again
    assert_removed(names)
    names, pids = server.shm_names(), server.pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert_nothing_left(server, pids, names)


@pytest.mark.parametrize("edge", ["python"], indirect=True)
def test_kill_of_the_stub_does_not_leave_clients_hanging(server):
    names, pids = server.shm_names(), server.pids()
    answers = [Answer(server, ENDLESS, http) for http in (False, True)]
    for answer in answers:
        assert answer.started.wait(PATIENCE_S)
    os.kill(server.pid_of("triton_python_backend_stub"), signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 1
    for answer in answers:
        assert answer.wait().finish_reason is None
    # Triton 2.51 now and then crashes over a lost stub before the launcher sees the loss: then it says that.
    assert re.search("(model process|server) ended by itself", server.output())
    assert_nothing_left(server, pids, names)


def test_kill_of_the_launcher_ends_the_server_and_the_next_launch_cleans_up(engine_dir, repository, edge, tmp_path):
    with Server(engine_dir, model_repo=repository, edge=edge, log=tmp_path / "log") as server:
        server.wait_ready()
        names, pids = server.shm_names(), server.pids()
        server.process.kill()
        server.process.wait()
    wait_until(lambda: not any(command_line(pid) for pid in pids))
    with Server(engine_dir, model_repo=repository, edge=edge, log=tmp_path / "log2") as second:
        second.wait_ready()
        assert_removed(names)


def test_all_models_are_served_and_one_that_is_unloaded_ends_nothing(engine_dir, repository, edge, tmp_path):
    with Server(
        engine_dir, model_repo=repository, models=None, allow_control=True, edge=edge, log=tmp_path / "log"
    ) as server:
        server.wait_ready()
        assert "ready: ensemble, faser, tensorrt_llm, tensorrt_llm_bls on" in server.output()
        unload = f"{server.http_url}/v2/repository/models/ensemble/unload"
        urllib.request.urlopen(urllib.request.Request(unload, data=b"{}"), timeout=PATIENCE_S).read()
        wait_until(lambda: server.num_stubs() == (3 if edge == "python" else 0))
        time.sleep(1.0)  # the launcher looks every 0.2 s
        assert server.process.poll() is None
        assert generate_http(server.http_url, "abc", max_tokens=4).text
        if edge == "native":  # no model has a process
            return
        # A model process that dies is still lost.
        os.kill(server.pid_of("triton_python_backend_stub"), signal.SIGKILL)
        server.process.wait(PATIENCE_S)
        assert "the model process ended by itself" in server.output()


def test_a_model_that_is_not_there_is_named(engine_dir, repository, tmp_path):
    with Server(engine_dir, model_repo=repository, models=("faser", "fast"), log=tmp_path / "log") as server:
        assert server.process.wait(PATIENCE_S) == 2
        there = "ensemble, faser, postprocessing, preprocessing, tensorrt_llm, tensorrt_llm_bls"
        assert f"models has 'fast', the model repository has {there}; name one of these" in server.output()


def test_port_in_use_is_named(engine_dir, repository, tmp_path):
    ports = free_ports()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports[1]))
        busy.listen()
        with Server(engine_dir, model_repo=repository, ports=ports, log=tmp_path / "log") as server:
            assert server.process.wait(PATIENCE_S) == 2
            assert f"grpc_port {ports[1]} on 127.0.0.1 cannot be used" in server.output()
            assert "--grpc_port" in server.output()


def test_an_engine_that_cannot_be_opened_is_told_in_a_sentence(repository, edge, tmp_path):
    with Server(tmp_path / "nowhere", model_repo=repository, edge=edge, log=tmp_path / "log") as server:
        prefixes = []
        wait_until(lambda: prefixes.append(shm_prefix(server.process.pid)) or prefixes[-1], poll_s=0.005)
        assert server.process.wait(PATIENCE_S) == 2
        assert "error: the server did not start: tokenizer.json is missing" in server.output()
        assert not shm_names(prefixes[-1])
