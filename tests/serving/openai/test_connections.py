"""Connections that send nothing, or slowly, or read nothing, take nothing from others."""

import contextlib
import logging
import time

import pytest

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.openai import connection
from faser_trtllm.serving.openai.log import Sparse
from tests.support.effort import pick
from tests.support.openai_app import HEALTH, App, AppProcess, EndlessModel, completion, is_closed
from tests.support.waiting import wait_until

HALF_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost:"
HALF_BODY = completion(1)[:-5]
FOREVER = 10**9
OK = b"HTTP/1.1 200 OK"
END = b"[DONE]\n\n\r\n0\r\n\r\n"


def test_the_one_that_has_waited_longest_makes_room():
    with App(max_connections=3) as app:
        idle, half, part = (app.connect(data) for data in (b"", HALF_HEADERS, HALF_BODY))
        time.sleep(0.1)
        assert app.ask(HEALTH).startswith(OK)
        wait_until(lambda: is_closed(idle))
        assert not is_closed(half)
        more = [app.connect() for _ in range(3)]
        wait_until(lambda: is_closed(half) and is_closed(part))
        assert not any(map(is_closed, more))
        assert app.ask(completion(3)).endswith(b"}}}")


def test_what_runs_is_never_closed_for_room():
    with App(max_connections=3) as app:
        streams = [app.connect(completion(FOREVER, stream=True)) for _ in range(3)]
        for stream in streams:
            assert stream.recv(100).startswith(OK)
        assert app.ask(HEALTH).startswith(b"HTTP/1.1 503 ")
        assert all(stream.recv(100) for stream in streams)
        streams[0].close()
        wait_until(lambda: app.ask(HEALTH).startswith(OK))


@pytest.mark.parametrize("first", [b"", HALF_HEADERS, completion(1, close=False), completion(1, close=False) + b"POST"])
def test_headers_have_so_much_time(monkeypatch, first):
    """The limit holds for a later request as well, and for headers that trickle in."""
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.5)
    with App(max_connections=100) as app:
        stream = app.connect(completion(FOREVER, stream=True))
        client = app.connect(first)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.sendall(b"x")
                time.sleep(0.02)
        wait_until(lambda: is_closed(client) or not client.recv(1 << 16))
        assert stream.recv(100), "a request that runs has its own limits"


def test_who_reads_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 1.0)
    model = EndlessModel(num_chars=10_000)
    with App(max_connections=100, model=model) as app:
        app.connect(completion(FOREVER, stream=True))
        wait_until(lambda: model.num_open == 1)
        wait_until(lambda: model.num_open == 0)


def test_who_reads_slowly_gets_everything(monkeypatch):
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 1.0)
    with App(max_connections=100, model=EndlessModel(num_chars=10_000)) as app:
        client = app.connect(completion(4_000, stream=True))
        started_s = time.monotonic()
        num_bytes, end = 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 18)
            assert data, f"closed after {num_bytes} bytes"
            num_bytes, end = num_bytes + len(data), (end + data)[-100:]
            time.sleep(0.02)
        assert time.monotonic() - started_s > 2.0, "several times as long as a client may pause"
        assert b"[DONE]" in end


def test_too_few_files_are_a_sentence(monkeypatch):
    monkeypatch.setattr(connection, "raise_open_files", lambda: 200)
    with pytest.raises(UnavailableError, match="may open 200 files, at least 257 are needed; raise the limit"):
        App(max_connections=100)


def test_a_kind_of_record_passes_once_a_minute(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log, sparse, passed = logging.getLogger("faser.test"), Sparse(), []

    def note(message, *values):
        record = log.makeRecord(log.name, logging.WARNING, "", 0, message, values, None)
        if sparse.filter(record):
            passed.append(record.getMessage())

    for i in range(1000):
        note("client %d is wrong", i)
    note("another\nwith lines")
    now_s[0] = 61.0
    note("client %d is wrong", 1000)
    note("client %d is wrong", 1001)
    assert passed == ["client 0 is wrong", "another\nwith lines", "client 1000 is wrong (999 more of this kind)"]


def test_more_connections_than_files_stop_nobody(tmp_path):
    """They used to cause an endless error, and a log that filled the disk."""
    with AppProcess(tmp_path / "log", max_connections=4096, num_files=400) as app:
        assert app.ask(HEALTH).startswith(OK)
        for _ in range(5):
            for _ in range(200):
                app.connect()
            assert app.ask(HEALTH).startswith(OK)
            assert app.ask(completion(5, stream=True)).endswith(END)
        assert app.log.read_text() == ""


@pytest.mark.slow
def test_idle_and_slow_connections_stop_nobody(tmp_path):
    """1,500 connections send nothing and 200 send a byte at a time; all are opened again when they are closed."""
    num_idle, num_slow = pick((300, 50), (1500, 200))
    with AppProcess(tmp_path / "log", max_connections=pick(200, 1000), num_files=4096) as app:
        idle = [app.connect() for _ in range(num_idle)]
        slow = [app.connect(HALF_HEADERS) for _ in range(num_slow)]
        deadline_s = time.monotonic() + pick(4, 20)
        num_asked = 0
        while time.monotonic() < deadline_s:
            assert app.ask(HEALTH).startswith(OK)
            assert app.ask(completion(5, stream=True)).endswith(END)
            num_asked += 1
            for i, client in enumerate(slow):
                with contextlib.suppress(ConnectionError):
                    client.sendall(b"x")
                    continue
                client.close()
                slow[i] = app.connect(HALF_HEADERS)
            for i, client in enumerate(idle):
                if is_closed(client):
                    client.close()
                    idle[i] = app.connect()
        assert num_asked > 1
        assert len(app.log.read_bytes()) < 1000
