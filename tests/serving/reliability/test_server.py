"""One real server for all its tests: clients that vanish or stall, an engine that stops, models that come and go.

The engine process's executor is a fake, so that streams last as needed.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from faser_trtllm.serving.launch.process import command_line
from tests.support.fake_engine import ENDLESS
from tests.support.streams import Answer
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]
NOTICE_S = 5.5  # 4 s of silence, the second of the metrics' period, and a scrape


@pytest.fixture(scope="module")
def server(fake_engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(fake_engine_dir, is_fake=True, allow_control=True, log=log) as server:
        yield server.wait_ready()


def num_running(server):
    return server.metric("faser_num_requests_running")


def post(server, path, body=b"{}"):
    """Status and body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(server.http_url + path, body), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def open_stream(server, max_tokens, receive_buffer=None):
    """A raw connection on which generate_stream has answered the first bytes."""
    body = json.dumps({"text_input": "abc", "max_tokens": max_tokens, "stream": True}).encode()
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", server.ports[0]))
    head = f"POST /v2/models/faser/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def test_an_http_client_that_hangs_up_ends_its_requests(server):
    socks = [open_stream(server, ENDLESS) for _ in range(20)]
    for sock in socks:
        sock.close()
    wait_until(lambda: server.metric('faser_request_failures_total{code="CANCELLED"') == 20)


def test_a_deadline_of_grpc_ends_the_request(server):
    before = server.metric('faser_request_failures_total{code="CANCELLED"')
    errors = []
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: errors.append(error) if error else None, stream_timeout=0.5)
        inputs = GrpcInputs("abc", ENDLESS)
        client.async_stream_infer("faser", inputs)
        wait_until(lambda: errors)
        assert "Deadline Exceeded" in str(errors[0])
    wait_until(lambda: server.metric('faser_request_failures_total{code="CANCELLED"') == before + 1)


class GrpcInputs(list):
    """Inputs of a streamed request."""

    def __init__(self, text, max_tokens):
        import numpy as np

        arrays = {
            "text_input": ("BYTES", np.array([[text.encode()]], object)),
            "max_tokens": ("INT32", np.array([[max_tokens]], np.int32)),
            "stream": ("BOOL", np.array([[True]])),
        }
        for name, (dtype, array) in arrays.items():
            tensor = grpcclient.InferInput(name, array.shape, dtype)
            tensor.set_data_from_numpy(array)
            self.append(tensor)


def rss_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_clients_that_do_not_read_hold_up_nobody_and_what_waits_for_them_is_bounded(server):
    """Triton gives no sign of it: their requests run to their end, which is the bound."""
    before = rss_bytes(server.triton_pid())
    stalled = [open_stream(server, 508, receive_buffer=4096) for _ in range(30)]
    assert generate_http(server.http_url, "abc", max_tokens=6).text == "abcabcabc"
    wait_until(lambda: server.metric('faser_request_success_total{finished_reason="length"') >= 31)
    assert rss_bytes(server.triton_pid()) - before < 64 << 20
    for sock in stalled:
        sock.close()
    assert generate_http(server.http_url, "abc", max_tokens=6).text == "abcabcabc"


def test_a_stopped_engine_is_not_ready_within_5_s_and_recovers(server):
    """The best of three stops counts: a busy machine may be late to look."""
    noticed_s = [_notice_of_a_stop_s(server)]
    while len(noticed_s) < 3 and noticed_s[-1] >= NOTICE_S:
        noticed_s.append(_notice_of_a_stop_s(server))
    assert min(noticed_s) < NOTICE_S, noticed_s


def _notice_of_a_stop_s(server):
    pid = server.engine_pid()
    answer = Answer(server, 508)
    assert answer.started.wait(PATIENCE_S)
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        wait_until(lambda: server.metric("faser_engine_ready") == 0)
        noticed_s = time.monotonic() - stopped_s
        with pytest.raises(ResponseError, match="has not answered for"):
            generate_http(server.http_url, "abc", max_tokens=3)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.metric("faser_engine_ready") == 1)
    assert answer.wait().finish_reason == "length"
    assert server.engine_pid() == pid
    return noticed_s


@pytest.mark.parametrize(
    "name", ["../faser", "..%2f..%2fetc%2fpasswd", "faser/../../x", "%2e%2e", "....//faser", "faser%00", "~root"]
)
def test_a_model_name_that_leads_elsewhere_is_refused(server, name):
    before = len(server.pids())
    for path in (f"/v2/models/{name}/generate", f"/v2/repository/models/{name}/load"):
        status, text = post(server, path, b'{"text_input": "a", "max_tokens": 1}')
        assert status in (400, 404, 500), (path, status, text)
        assert "text_output" not in text
    assert len(server.pids()) == before
    assert generate_http(server.http_url, "abc", max_tokens=3).text


def test_the_same_over_grpc(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for name in ("../faser", "/etc/passwd"):
            with pytest.raises(InferenceServerException):
                client.load_model(name)
            with pytest.raises(InferenceServerException):
                client.infer(name, GrpcInputs("a", 1))


def test_an_unload_ends_its_streams_in_bounded_time_and_joins_its_threads(server):
    answers = [Answer(server, 508, http) for http in (False, True)]
    for answer in answers:
        assert answer.started.wait(PATIENCE_S)
    processes = [pid for pid in server.pids() if pid != server.triton_pid()]
    assert post(server, "/v2/repository/models/faser/unload")[0] == 200
    for answer in answers:
        answer.wait()
        assert answer.finish_reason == "length" or answer.error is not None
    wait_until(lambda: not any(map(command_line, processes)))
    assert post(server, "/v2/repository/models/faser/load")[0] == 200
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"


def test_loads_at_the_same_time_leave_one_that_serves(server):
    statuses = []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(server, "/v2/repository/models/faser/load")[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 400}
    assert 200 in statuses
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"
    wait_until(lambda: len(server.pids()) == 2)


def test_a_broken_model_does_not_take_the_place_of_a_good_one(server):
    broken = {"name": "faser", "backend": "nowhere", "max_batch_size": 64}
    body = json.dumps({"parameters": {"config": json.dumps(broken)}}).encode()
    status, text = post(server, "/v2/repository/models/faser/load", body)
    assert status == 400, (status, text)
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"
    assert post(server, "/v2/repository/models/faser/load")[0] == 200
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"
    assert server.process.poll() is None, server.output()


def test_clients_that_all_vanish_leave_nothing_running(server):
    """Last: whatever the tests above left open is gone."""
    with contextlib.suppress(Exception), GrpcClient(server.grpc_url) as client:
        for _ in range(10):
            client.send("abc", max_tokens=ENDLESS, stream=True)
        client.receive(PATIENCE_S)
        raise ConnectionError
    wait_until(lambda: num_running(server) == 0 and server.metric("faser_num_requests_waiting") == 0)
