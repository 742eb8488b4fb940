"""deploy/nginx.conf in front of a real server, where an nginx is on the path (or in FASER_NGINX)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faser_trtllm.serving.client import GrpcClient, generate_http, infer_input, stream_http
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS
from tests.support.triton_server import ROOT, Server, free_ports
from tests.support.waiting import PATIENCE_S, wait_until

NGINX_CONF = (ROOT / "deploy" / "nginx.conf").read_text()
NGINX = os.environ.get("FASER_NGINX") or shutil.which("nginx")

pytest_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx on the path or in FASER_NGINX")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """Ports for HTTP, gRPC and metrics of the proxy in front of a real Triton server."""
    directory = tmp_path_factory.mktemp("proxied")
    write_tokenizer(directory, 320)
    with Server(directory, is_fake=True, log=directory / "log") as server:
        server.wait_ready()
        ports = free_ports()
        text = NGINX_CONF.replace("/tmp/", f"{directory}/")
        keys = "".join(f'"Bearer {name}" tenant-{name};\n' for name in "abc")
        text = text.replace("default $remote_addr;\n", f"default $remote_addr;\n{keys}")
        moved = dict(zip((8080, 8081, 8082), ports, strict=True)) | dict(
            zip((8000, 8001, 8002), server.ports, strict=True)
        )
        for number, port in moved.items():
            text = re.sub(rf"(listen |127\.0\.0\.1:){number}\b", rf"\g<1>{port}", text)
        conf = directory / "nginx.conf"
        conf.write_text(text)
        command = [
            NGINX,
            "-c",
            str(conf),
            "-g",
            "daemon off;",
            "-p",
            str(directory),
            "-e",
            str(directory / "error.log"),
        ]
        process = subprocess.Popen(command)
        try:
            wait_until(lambda: process.poll() is not None or status(ports[0], "GET", "/v2/health/ready") == 200)
            assert process.poll() is None, (directory / "error.log").read_text()
            yield ports
        finally:
            process.terminate()
            process.wait(10)


def status(port, verb, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(
            verb, path, body, headers or {}, encode_chunked=(headers or {}).get("Transfer-Encoding") is not None
        )
        return connection.getresponse().status
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_requests_pass_the_proxy(proxied):
    url = f"http://127.0.0.1:{proxied[0]}"
    assert generate_http(url, "abc", max_tokens=6).num_output_tokens == 6
    started_s = time.monotonic()
    arrivals_s = [time.monotonic() - started_s for _ in stream_http(url, "abc", max_tokens=60)]
    assert len(arrivals_s) > 5
    assert arrivals_s[0] < arrivals_s[-1] / 2, "the answer was held back"
    with GrpcClient(f"127.0.0.1:{proxied[1]}") as client:
        for _ in range(3):
            assert list(client.stream("abc", max_tokens=6))[-1].num_output_tokens == 6
    chunks = iter([b'{"text_input": "abc",', b'"max_tokens": 4}'])
    headers = {"Transfer-Encoding": "chunked"}
    assert status(proxied[0], "POST", "/v2/models/faser/generate", chunks, headers) == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{proxied[2]}/metrics", timeout=5) as answer:
        assert b"faser_engine_ready" in answer.read()


class Stream:
    """An open generate_stream of a tenant, through the proxy."""

    def __init__(self, port, tenant, headers=None, **fields):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        body = json.dumps({"text_input": "abc", "stream": True, "max_tokens": ENDLESS} | fields)
        keys = {"Authorization": f"Bearer {tenant}"} | (headers or {})
        self._connection.request("POST", "/v2/models/faser/generate_stream", body, keys)
        self.answer = self._connection.getresponse()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._connection.close()

    def event(self):
        """Return the next event, or None at the end."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_the_proxy_says_who_a_client_is(proxied):
    """A stop by a guessable id ends only requests of the same client, so it shows which clients count as the same."""
    port, stop = proxied[0], {"id": "1", "stop": True}
    with Stream(port, "a", id="1") as victim:
        assert victim.event()["text_output"]
        with Stream(port, "b", {"x-faser-client": "tenant-a", "X-Faser-Client": "tenant-a"}, **stop) as attack:
            assert attack.answer.status == 200
        with Stream(port, "b", **stop, **{"x-faser-client": "tenant-a"}) as attack:
            assert attack.answer.status == 200
        with Stream(port, "b", **stop, parameters={"x-faser-client": "tenant-a"}) as attack:
            assert attack.answer.status == 400
            assert "x-faser-client was sent twice" in attack.event()["error"]
        with grpcclient.InferenceServerClient(f"127.0.0.1:{proxied[1]}") as client:
            answers = queue.Queue()
            claims = {"authorization": "Bearer b", "x-faser-client": "tenant-a"}
            client.start_stream(callback=lambda result, error: answers.put(error), headers=claims)
            inputs = [infer_input(grpcclient, name, value) for name, value in (("text_input", ""), ("stop", True))]
            client.async_stream_infer("faser", inputs, request_id="1", enable_empty_final_response=True)
            assert answers.get(timeout=PATIENCE_S) is None
            client.stop_stream()
        for _ in range(30):
            assert "finish_reason" not in victim.event(), "a foreign stop had an effect"
        with Stream(port, "a", **stop) as own:
            assert own.answer.status == 200
        while "finish_reason" not in (event := victim.event()):
            pass
        assert event["finish_reason"] == "cancelled"


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_the_proxy_lets_no_client_open_more_than_its_quota(proxied):
    quota = int(re.search(r"limit_conn faser_open (\d+);", NGINX_CONF)[1])
    with contextlib.ExitStack() as streams:
        for _ in range(quota):
            assert streams.enter_context(Stream(proxied[0], "c")).event()["text_output"]
        with Stream(proxied[0], "c") as beyond:
            assert beyond.answer.status == 429
        with Stream(proxied[0], "b", max_tokens=2) as other:
            assert other.event()["text_output"]


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("body", ["[1]", "{}", "", "null", '"a"', '{"text_input": "abc"}}', "  \n{"])
def test_a_body_that_is_no_object_is_refused_through_the_proxy(proxied, body):
    assert status(proxied[0], "POST", "/v2/models/faser/generate", body) in (400, 500)  # 500 is Triton's for no JSON


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "verb", "path", "expected"),
    [
        (0, "GET", "/v2/models/faser/ready", 200),
        (0, "GET", "/v2/models/faser/config", 403),
        (0, "POST", "/v2/repository/index", 403),
        (0, "POST", "/v2/repository/models/faser/unload", 403),
        (0, "GET", "/v2/models/faser/../../repository/index", 403),
        (0, "GET", "/v2/models/faser/generate/%2e%2e/config", 403),
        (0, "POST", "//v2//repository//index", 403),
        (0, "GET", "/v2/systemsharedmemory/status", 403),
        (0, "POST", "/v2/trace/setting", 403),
        (0, "POST", "/v2/logging", 403),
        (0, "GET", "/v2/models/faser/stats", 403),
        (0, "GET", "/v2/models/faser/generate", 403),
        (0, "POST", "/v2/models/faser/infer", 403),
        (0, "GET", "/metrics", 403),
        (2, "GET", "/v2/health/ready", 403),
        (2, "POST", "/metrics", 403),
    ],
)
def test_everything_else_does_not(proxied, place, verb, path, expected):
    assert status(proxied[place], verb, path, b"{}" if verb == "POST" else None) == expected


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("origin", ["https://example.com", "http://localhost:8080", "null"])
def test_a_web_page_in_a_browser_gets_nothing(proxied, origin):
    """A browser sends a form's content type without asking the server first, but a page cannot leave out `Origin`."""
    body, headers = b'{"text_input": "abc", "max_tokens": 3}', {"Content-Type": "application/x-www-form-urlencoded"}
    path = "/v2/models/faser/generate"
    assert status(proxied[0], "POST", path, body, headers) == 200
    assert status(proxied[0], "POST", path, body, headers | {"Origin": origin}) == 403


@pytest_nginx
@pytest.mark.triton
@pytest.mark.slow
def test_limits_and_control_over_grpc(proxied):
    body = b'{"text_input": "' + b"a" * (5 << 20) + b'"}'
    assert status(proxied[0], "POST", "/v2/models/faser/generate", body) == 413
    with grpcclient.InferenceServerClient(f"127.0.0.1:{proxied[1]}") as client:
        assert client.is_model_ready("faser")
        for forbidden in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_log_settings,
            lambda: client.get_model_config("faser"),
            lambda: client.unload_model("faser"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                forbidden()
            assert str(grpc.StatusCode.PERMISSION_DENIED) in str(caught.value.status())
        assert client.is_model_ready("faser")
