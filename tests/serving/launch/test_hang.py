"""`faser serve` notices a tritonserver that runs but answers nobody."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from faser_trtllm.serving.client import generate_http
from faser_trtllm.serving.launch import hang
from faser_trtllm.serving.launch.hang import HangWatch
from tests.support.triton_server import Server
from tests.support.waiting import wait_until


@pytest.fixture
def serve(fake_engine_dir, tmp_path):
    """A server with a launcher of these settings."""
    with contextlib.ExitStack() as stack:

        def start(settings, environment=None):
            config = tmp_path / "faser.yaml"
            config.write_text(f"restart_backoff_s: 0.05\n{settings}")
            options = {"is_fake": True, "config": config, "environment": environment}
            return stack.enter_context(Server(fake_engine_dir, **options, log=tmp_path / "log")).wait_ready()

        yield start


def answers(server):
    return generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"


@pytest.mark.triton
@pytest.mark.slow
def test_a_server_that_hangs_is_killed_and_started_again(serve):
    server = serve("hang_timeout_s: 3\n")
    pid = server.triton_pid()
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: server.output().count("ready:") == 2)
    assert "the server has not answered for " in server.output()
    assert "the server was ended by SIGKILL and is started again" in server.output()
    assert answers(server)
    assert server.triton_pid() != pid


SLOW = """
import time
from tests.support import fake_engine

time.sleep(9)
if __name__ == "__main__":
    fake_engine.main(opener=fake_engine.open_echo)
"""


@pytest.mark.triton
@pytest.mark.slow
def test_a_start_that_takes_longer_than_a_hang_is_none(serve, tmp_path):
    (tmp_path / "slow_engine.py").write_text(SLOW)
    server = serve("hang_timeout_s: 2\n", {"FASER_ENGINE_MODULE": "slow_engine", "PYTHONPATH": str(tmp_path)})
    assert answers(server)
    assert "has not answered" not in server.output()


@pytest.fixture
def listener(monkeypatch):
    """A server that answers nobody, of which the watch asks ten times as often as it does."""
    monkeypatch.setattr(hang, "PERIOD_S", 0.1)
    monkeypatch.setattr(hang, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def look(watch, until_s):
    """Ask the watch for its silence as often as a launcher does, until until_s; return the last answer in seconds."""
    while time.monotonic() < until_s:
        silent_s = watch.silent_s()
        time.sleep(0.005)
    return silent_s


def test_silence_is_counted_and_any_answer_ends_it(listener):
    watch = HangWatch(*listener.getsockname())
    assert look(watch, time.monotonic() + 0.5) >= 0.2

    def refuse():
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        wait_until(lambda: watch.silent_s() == 0)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_time_in_which_nobody_looked_is_no_silence(listener):
    """Then the machine, or this process together with the server, was paused."""
    watch = HangWatch(*listener.getsockname())
    time.sleep(0.6)
    assert 0 < watch.silent_s() <= 0.2
