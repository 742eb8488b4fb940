"""Triton's control APIs want a key; what clients need does not."""

import json
import os
import time
import urllib.error
import urllib.request

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faser_trtllm.errors import ConfigError
from faser_trtllm.serving.client import GrpcClient, generate_http
from faser_trtllm.serving.launch.control import GRPC_HEADER, HEADER, RESTRICTED_APIS, control_key, restriction
from faser_trtllm.serving.launch.process import command_line
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S

KEY = "a-key-of-the-tests.0123456789"
API_KEY = "a-key-of-the-openai-api"


def test_a_key_is_given_or_drawn(tmp_path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert control_key({"FASER_CONTROL_KEY": KEY}) == KEY
    assert control_key({"FASER_CONTROL_KEY_FILE": str(tmp_path / "key")}) == KEY
    drawn = {control_key({}) for _ in range(10)}
    assert len(drawn) == 10
    assert all(len(key) == 64 for key in drawn)


@pytest.mark.parametrize(
    "key", ["", "short", "a" * 257, "a key with blanks", "key=with:signs,0000", "schlüssel-0000000"]
)
def test_a_key_that_triton_would_misread_is_refused_without_showing_it(key):
    with pytest.raises(
        ConfigError, match=rf"FASER_CONTROL_KEY has a key of {len(key)} characters, allowed are"
    ) as caught:
        control_key({"FASER_CONTROL_KEY": key})
    assert not key or key not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"FASER_CONTROL_KEY_FILE is .*/none, which cannot be read: No such file"):
        control_key({"FASER_CONTROL_KEY_FILE": str(tmp_path / "none")})


def test_both_doors_are_restricted():
    http, grpc = restriction(KEY)
    assert http == f"--http-restricted-api={','.join(RESTRICTED_APIS)}:{HEADER}={KEY}"
    assert grpc.partition("=")[2] == http.partition("=")[2]


@pytest.fixture(scope="module")
def server(fake_engine_dir, tmp_path_factory):
    environment = {"FASER_CONTROL_KEY": KEY, "FASER_API_KEY": API_KEY}
    log = tmp_path_factory.mktemp("control") / "log"
    with Server(fake_engine_dir, is_fake=True, environment=environment, log=log) as server:
        yield server.wait_ready()


def call(server, path, method="POST", headers=None, body=b"{}"):
    """Status and body of an HTTP call."""
    data = body if method == "POST" else None
    request = urllib.request.Request(server.http_url + path, data, headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


HTTP_CALLS = [
    ("POST", "/v2/repository/index"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), HTTP_CALLS)
def test_http_control_wants_the_key(server, method, path):
    for headers in ({}, {HEADER: KEY + "0"}, {HEADER: ""}):
        status, body = call(server, path, method, headers)
        assert status == 403, (status, body)
        assert "restricted" in body
    assert call(server, path, method, {HEADER: KEY})[0] == 200


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "get_model_repository_index",
        "get_system_shared_memory_status",
        "get_cuda_shared_memory_status",
        "get_trace_settings",
        "get_log_settings",
    ],
)
def test_grpc_control_wants_the_key(server, name):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for headers in ({}, {GRPC_HEADER: KEY[:-1]}):
            with pytest.raises(InferenceServerException, match="restricted"):
                getattr(client, name)(headers=headers)
        getattr(client, name)(headers={GRPC_HEADER: KEY})


@pytest.mark.triton
@pytest.mark.slow
def test_a_load_without_the_key_does_nothing(server):
    assert call(server, "/v2/repository/models/faser/unload")[0] == 403
    assert call(server, "/v2/repository/models/ensemble/load")[0] == 403
    index = json.loads(call(server, "/v2/repository/index", headers={HEADER: KEY})[1])
    assert {model["name"] for model in index if model.get("state") == "READY"} == {"faser"}


@pytest.mark.triton
@pytest.mark.slow
def test_what_clients_need_is_open(server):
    assert generate_http(server.http_url, "abc", max_tokens=3).text
    with GrpcClient(server.grpc_url) as client:
        assert list(client.stream("abc", max_tokens=3))[-1].is_final
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/faser/ready", "/v2/models/faser"):
        assert call(server, path, "GET")[0] == 200
    for path in ("/v2/models/faser/stats", "/v2/models/faser/config"):  # what perf_analyzer reads first
        assert call(server, path, "GET")[0] == 200
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("faser")
        assert client.get_model_metadata("faser").name == "faser"
        assert client.get_inference_statistics("faser").model_stats[0].name == "faser"
    assert server.metric("faser_engine_ready") == 1


@pytest.mark.triton
@pytest.mark.slow
def test_the_key_is_where_triton_forces_it_to_be_and_nowhere_else(server):
    """In the arguments of tritonserver, which takes it no other way; not in its environment nor with its children."""
    for pid in server.pids():
        with open(f"/proc/{pid}/environ") as file:
            text = file.read()
        assert KEY not in text
        assert API_KEY not in text
        assert any(KEY in argument for argument in command_line(pid)) == (pid == server.triton_pid())
    assert KEY not in server.output()
    assert os.environ.get("FASER_CONTROL_KEY") is None


@pytest.mark.triton
@pytest.mark.slow
def test_the_launcher_has_the_key_and_takes_an_unload_for_no_loss(server):
    assert call(server, "/v2/repository/models/faser/unload", headers={HEADER: KEY})[0] == 200
    time.sleep(1.0)  # the launcher looks every 0.2 s, and for 0.6 s before it gives up
    assert server.process.poll() is None, server.output()
    assert call(server, "/v2/repository/models/faser/load", headers={HEADER: KEY})[0] == 200
    assert generate_http(server.http_url, "abc", max_tokens=3).text
