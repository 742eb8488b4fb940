"""`faser serve` starts a server again that a signal has ended."""

import os
import signal
import socket

import pytest

from faser_trtllm.serving.client import generate_http
from tests.support.triton_server import Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture
def server(fake_engine_dir, tmp_path):
    config = tmp_path / "faser.yaml"
    config.write_text("restart_backoff_s: 0.3\n")
    with Server(fake_engine_dir, is_fake=True, config=config, log=tmp_path / "log") as server:
        yield server.wait_ready()


def test_a_server_that_a_signal_ended_is_started_again_and_the_signal_is_named(server):
    for number, signum in enumerate((signal.SIGSEGV, signal.SIGKILL), 1):
        os.kill(server.triton_pid(), signum)
        wait_until(lambda number=number: server.output().count("ready:") == number + 1)
        assert f"the server was ended by {signum.name} and is started again" in server.output()
        assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_start_that_fails_for_a_while_is_tried_again(server):
    """Only the first start's failure ends the command."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(server.triton_pid(), signal.SIGKILL)
        wait_until(lambda: _took(taken, server.ports[0]))
        wait_until(lambda: "the server could not be started again and is tried once more" in server.output())
        assert f"http_port {server.ports[0]} on 127.0.0.1 cannot be used" in server.output()
    wait_until(lambda: server.output().count("ready:") == 2)
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"


def _took(taken, port):
    """True once the port is ours."""
    try:
        taken.bind(("127.0.0.1", port))
    except OSError:
        return False
    taken.listen()
    return True


def test_a_server_that_someone_else_stops_is_not(server):
    os.kill(server.triton_pid(), signal.SIGTERM)
    assert server.wait() == 1
    assert "the server ended by itself" in server.output()
    assert server.output().count("ready:") == 1


def test_sigterm_ends_the_wait_before_the_next_start(server):
    os.kill(server.triton_pid(), signal.SIGKILL)
    wait_until(lambda: "is started again" in server.output())
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
