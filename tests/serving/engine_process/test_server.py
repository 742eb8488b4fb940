"""The backend `faser` in a real Triton server: models that share an engine process, and one that cannot be used."""

import contextlib
import json
import os
import queue
import signal
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from tests.serving.triton.contract_clients import llm_client_inputs
from tests.support.fake_engine import BUG_TOKEN, ENDLESS
from tests.support.triton_server import REPOSITORY, Server, free_ports
from tests.support.waiting import PATIENCE_S, wait_until

GUIDE_TYPE = "guided_decoding_guide_type"
KILLED_S = 2.0  # within which a process's death ends the streams of others

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@contextlib.contextmanager
def serve(fake_engine_dir, directory):
    """Its timeouts are hours: no test passes because of one."""
    config = directory / "faser.yaml"
    config.write_text("restart_backoff_s: 0.05\nhealth_timeout_s: 7200\nhang_timeout_s: 7200\n")
    options = {"is_fake": True, "config": config, "models": None, "allow_control": True}
    with Server(fake_engine_dir, **options, log=directory / "log") as server:
        yield server.wait_ready()


@pytest.fixture
def server(fake_engine_dir, tmp_path):
    with serve(fake_engine_dir, tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def unharmed(fake_engine_dir, tmp_path_factory):
    """A server for tests after which all its processes and models are as before."""
    with serve(fake_engine_dir, tmp_path_factory.mktemp("unharmed")) as server:
        yield server


def control(server, model, action):
    url = f"{server.http_url}/v2/repository/models/{model}/{action}"
    urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=PATIENCE_S).read()


def long_stream(client, model, answers):
    """A stream of token ids that does not end by itself."""
    inputs = []
    for name, array in llm_client_inputs([65, 66], ENDLESS, streaming=True).items():
        kind = {"int32": "INT32", "float32": "FP32", "bool": "BOOL"}[array.dtype.name]
        inputs.append(grpcclient.InferInput(name, array.shape, kind))
        inputs[-1].set_data_from_numpy(array)
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    client.async_stream_infer(model, inputs)
    assert isinstance(answers.get(timeout=PATIENCE_S), grpcclient.InferResult)


def drain(client):
    """Read until an error."""
    while True:
        client.receive(PATIENCE_S)


def test_requests_that_a_stopped_engine_does_not_read_arrive_whole(unharmed):
    """More than the socket takes: short and long ones wait in the backend, the first of them in part."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 258, size) for size in (50_000, 3, 49_999, 1, 50_000, 7, 20_000, 2, 50_000, 5)]
    engine = unharmed.engine_pid()
    with contextlib.ExitStack() as stack:
        os.kill(engine, signal.SIGSTOP)
        stack.callback(os.kill, engine, signal.SIGCONT)
        clients = [stack.enter_context(GrpcClient(unharmed.grpc_url)) for _ in prompts]
        for client, prompt in zip(clients, prompts, strict=True):
            client.send(input_ids=tuple(prompt.tolist()), max_tokens=6, exclude_input_in_output=True)
        time.sleep(0.5)  # until the backend has them; one that comes later is answered as well
        os.kill(engine, signal.SIGCONT)
        for client, prompt in zip(clients, prompts, strict=True):
            _, response = client.receive(PATIENCE_S)
            assert response.token_ids == tuple(np.resize(prompt, 6).tolist())


def error_of(server, model, inputs, **options):
    """The error string of a request, which must fail."""
    tensors = []
    for name, array in inputs.items():
        kind = "BYTES" if array.dtype == object else {"int32": "INT32", "bool": "BOOL"}[array.dtype.name]
        tensors.append(grpcclient.InferInput(name, array.shape, kind))
        tensors[-1].set_data_from_numpy(array)
    answers = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error))
        client.async_stream_infer(model, tensors, **options)
        return answers.get(timeout=PATIENCE_S).message()


def test_a_bug_in_one_sequence_ends_the_request_once(unharmed):
    with GrpcClient(unharmed.grpc_url) as client:
        for _ in range(2):
            client.send(input_ids=(BUG_TOKEN, 65), max_tokens=200, num_return_sequences=2, seed=1)
            with pytest.raises(ResponseError, match=r"the request could not be started: RuntimeError"):
                drain(client)
        client.send(input_ids=(65, 66), max_tokens=2, exclude_input_in_output=True)
        assert client.receive(PATIENCE_S)[1].token_ids == (65, 66)


def test_an_error_is_a_sentence_or_json_whatever_it_quotes(unharmed):
    text, wild = np.array([[b"abc"]], object), 'no such "drafter"\n\\ \t\x01 é'
    cases = [
        ("faser", {"text_input": text, "max_tokens": np.array([[0]], np.int32)}, "max_tokens", "0"),
        ("faser", {"text_input": text, GUIDE_TYPE: np.array([[wild.encode()]], object)}, GUIDE_TYPE, None),
        ("tensorrt_llm", llm_client_inputs([65], 0), "request_output_len", "0"),
    ]
    for model, inputs, field, value in cases:
        inputs = {name: array for name, array in inputs.items() if array.dtype != np.float32}
        sentence = error_of(unharmed, model, inputs)
        record = json.loads(error_of(unharmed, model, inputs, parameters={"error_codes": True}))
        assert (record["code"], record["field"], record["message"]) == ("INVALID_ARG", field, sentence)
        assert sentence.startswith(field)
        assert value is None or record["value"] == value
    big = {"text_input": np.array([[b"a" * (65 << 20)]], object)}
    record = json.loads(error_of(unharmed, "faser", big, parameters={"error_codes": True}))
    assert record["code"] == "INVALID_ARG"
    assert "allowed are at most" in record["message"], "the backend's own errors are records, too"


def test_any_model_may_be_unloaded_while_another_streams(server):
    engine, answers = server.engine_pid(), queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        long_stream(client, "tensorrt_llm", answers)
        for model in ("faser", "ensemble", "tensorrt_llm_bls"):
            control(server, model, "unload")
        for _ in range(100):  # more than was sent before the last one was gone
            answer = answers.get(timeout=PATIENCE_S)
            assert isinstance(answer, grpcclient.InferResult), answer
            assert answer.as_numpy("output_ids").dtype == np.int32
        assert server.engine_pid() == engine
        unloaded_s = time.time()
        wait_until(lambda: server.metric('nv_trt_llm_general_metrics{general_type="timestamp"') > unloaded_s)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[2]}/metrics", timeout=PATIENCE_S) as answer:
            series = [line for line in answer.read().decode().splitlines() if line.startswith("faser_num_preempt")]
        assert len(series) == 1, "the engine's counts are published once"
        client.stop_stream(cancel_requests=True)


def test_triton_s_own_statistics_are_of_its_own_clock(unharmed):
    with grpcclient.InferenceServerClient(unharmed.grpc_url) as client:

        def counted(kind, name):
            (found,) = client.get_inference_statistics("faser", as_json=True)["model_stats"]
            return int(found["inference_stats"].get(kind, {}).get(name, 0))

        kinds = ("success", "queue", "compute_infer")
        count, before = counted("success", "count"), {kind: counted(kind, "ns") for kind in kinds}
        begun_ns = time.monotonic_ns()
        for _ in range(3):
            generate_http(unharmed.http_url, "abc", max_tokens=3)
        assert counted("success", "count") == count + 3
        elapsed_ns = time.monotonic_ns() - begun_ns
        for kind in kinds:  # no request waited or ran longer than the client watched
            assert counted(kind, "ns") - before[kind] <= elapsed_ns, kind


def test_a_killed_engine_ends_the_streams_of_all_models_and_comes_back(server):
    answers = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client, GrpcClient(server.grpc_url) as text_client:
        long_stream(client, "tensorrt_llm", answers)
        text_client.send("abc", max_tokens=ENDLESS, stream=True)
        text_client.receive(PATIENCE_S)
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)
        while isinstance(answer := answers.get(timeout=PATIENCE_S), grpcclient.InferResult):
            pass
        assert "send the request again" in str(answer)
        with pytest.raises(ResponseError, match="send the request again"):
            drain(text_client)
    wait_until(lambda: server.metric('faser_engine_ready{model="tensorrt_llm"') == 1)
    assert generate_http(server.http_url, "abc", max_tokens=3).text == "abcabc"
    assert server.engine_pid() != first
    wait_until(lambda: server.metric('faser_engine_restarts_total{model="') == 1)
    assert server.metric('faser_request_failures_total{code="UNAVAILABLE",model="faser"') == 1


def test_a_model_that_is_loaded_after_the_engine_was_drained_is_refused(server):
    """It used to wait for ever, and every other load behind it."""
    engine = server.engine_pid()
    os.kill(engine, signal.SIGTERM)
    wait_until(lambda: engine not in server.pids())
    control(server, "ensemble", "unload")
    wait_until(lambda: not is_loaded(server, "ensemble"))
    with pytest.raises(urllib.error.HTTPError) as caught:
        control(server, "ensemble", "load")
    with caught.value as answer:
        assert "the server is shutting down" in answer.read().decode()


def is_loaded(server, model):
    try:
        urllib.request.urlopen(f"{server.http_url}/v2/models/{model}/ready", timeout=PATIENCE_S).close()
    except urllib.error.HTTPError:
        return False
    return True


def test_an_engine_process_of_another_release_is_refused(fake_engine_dir, tmp_path):
    environment = {"FASER_ENGINE_MODULE": "tests.support.foreign_engine"}
    options = {"is_fake": True, "environment": environment}
    with Server(fake_engine_dir, **options, log=tmp_path / "log") as server:
        assert server.wait() == 2
        assert (
            f"it speaks version {wire.VERSION + 1} of the protocol, this backend {wire.VERSION}; install both"
            in server.output()
        )


def test_a_python_that_is_not_there_is_named(fake_engine_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(), strict=True))
    options = ServeOptions(engine_dir=fake_engine_dir, model_repo=REPOSITORY, log_file=tmp_path / "log", **ports)
    with Launcher(options) as launcher:
        launcher.start()
        with pytest.raises(UnavailableError, match="the server did not start"):
            launcher.wait_ready()
    message = "the engine process could not be started with /nowhere/python: No such file or directory"
    assert message in (tmp_path / "log").read_text()


def test_a_proxy_of_the_environment_is_not_asked_about_this_machine(fake_engine_dir, tmp_path):
    environment = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.com"}
    command = [sys.executable, "-m", "faser_trtllm.cli", "serve", "--model_repo", str(REPOSITORY)]
    options = {"is_fake": True, "environment": environment, "command": command}
    with Server(fake_engine_dir, **options, log=tmp_path / "log") as server:
        server.wait_ready()


def test_a_python_that_was_named_for_build_sh_does_not_matter(fake_engine_dir, tmp_path):
    environment = {"FASER_PYTHON": "/nowhere/python"}
    with Server(fake_engine_dir, is_fake=True, environment=environment, log=tmp_path / "log") as server:
        server.wait_ready()


def test_an_engine_process_that_ends_before_it_is_ready_is_told(fake_engine_dir, tmp_path):
    options = {"is_fake": True, "environment": {"FASER_ENGINE_MODULE": "tests.support.nowhere"}}
    with Server(fake_engine_dir, **options, log=tmp_path / "log") as server:
        assert server.wait() == 2
        assert "the engine process ended before it was ready" in server.output()


@pytest.mark.parametrize("killed", ["engine", "server"])
def test_kill_9_ends_every_stream_with_an_error_within_two_seconds(server, killed):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(GrpcClient(server.grpc_url)) for _ in range(8)]
        for client in clients:
            client.send(input_ids=(65, 66), max_tokens=ENDLESS, stream=True)
            client.receive(PATIENCE_S)
        os.kill(server.engine_pid() if killed == "engine" else server.triton_pid(), signal.SIGKILL)
        killed_s = time.monotonic()
        for client in clients:
            with pytest.raises((ResponseError, UnavailableError)):
                drain(client)
        assert time.monotonic() - killed_s < KILLED_S


def test_what_may_be_tried_again_can_be_told_over_http(fake_engine_dir, tmp_path):
    """The status is 503 at infer; that of generate means nothing (docs/serve.md), but a client may ask for the code."""
    config = tmp_path / "faser.yaml"
    config.write_text("restart_backoff_s: 7200\nrestart_backoff_max_s: 7200\n")
    fields = {"text_input": ("BYTES", "a"), "max_tokens": ("INT32", 2)}
    inputs = [{"name": n, "datatype": t, "shape": [1, 1], "data": [value]} for n, (t, value) in fields.items()]
    options = {"is_fake": True, "config": config, "decoupled": False}

    def ask(server, call, body):
        request = urllib.request.Request(f"{server.http_url}/v2/models/faser/{call}", data=json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    with Server(fake_engine_dir, **options, log=tmp_path / "log") as server:
        server.wait_ready()
        assert ask(server, "infer", {"inputs": inputs})[0] == 200
        os.kill(server.engine_pid(), signal.SIGKILL)
        status, sentence = ask(server, "infer", {"inputs": inputs})
        assert status == 503
        assert "again" in sentence
        status, record = ask(server, "generate", {"text_input": "a", "max_tokens": 2, "error_codes": True})
        assert status >= 400
        assert json.loads(record)["code"] == "UNAVAILABLE"
