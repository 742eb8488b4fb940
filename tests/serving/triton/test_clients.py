"""Clients that the proxy names in x-faser-client, and clients that have hung up, through a real Triton."""

import http.client
import json
import queue
import random
import socket

import pytest
import tritonclient.grpc as grpcclient

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.serving.client import CLIENT_HEADER, infer_input
from tests.support.checkpoints import make_pair
from tests.support.effort import examples
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

CONFIG = "cache_salt: client\ndefault_timeout_ms: 2500\nspeculation: 'off'\n"
LONG = {"text_input": "abc", "max_tokens": 29_000, "end_id": -1}
PROMPT = {"text_input": "diagnosis code F32.1, salary 81000", "max_tokens": 2}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    pair = make_pair(directory)
    for checkpoint in pair:  # long enough that a request does not end by itself
        config = checkpoint / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 30_000}))
    build_engines(BuildOptions(*pair, directory / "engine", max_batch_size=4, max_seq_len=30_000, tokens_per_block=16))
    return directory / "engine"


def serve(engine_dir, directory, **options):
    config = directory / "faser.yaml"
    config.write_text(CONFIG)
    return Server(engine_dir, config=config, log=directory / "log", **options)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    with serve(engine_dir, tmp_path_factory.mktemp("server")) as server:
        yield server.wait_ready()


class Stream:
    """One gRPC stream, to which a proxy may have added a header."""

    def __init__(self, server, client_key=None):
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._answers = queue.Queue()
        headers = {} if client_key is None else {CLIENT_HEADER: client_key}
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)), headers=headers)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def send(self, request_id="", parameters=None, **fields):
        inputs = [infer_input(grpcclient, name, value) for name, value in fields.items()]
        self._client.async_stream_infer("faser", inputs, request_id=request_id, parameters=parameters)

    def receive(self):
        """Return the outputs by name, or the error's sentence."""
        result, error = self._answers.get(timeout=PATIENCE_S)
        if error is not None:
            return error.message()
        return {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}

    def cached(self, parameters=None):
        self.send(parameters=parameters, stream=False, **PROMPT)
        return int(self.receive()["num_cached_tokens"][0, 0])


def generate(server, **fields):
    """Return the status and JSON of HTTP's generate."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=PATIENCE_S)
    connection.request("POST", "/v2/models/faser/generate", json.dumps(PROMPT | fields))
    answer = connection.getresponse()
    return answer.status, json.load(answer)


def test_each_client_has_a_cache_of_its_own(server):
    with Stream(server, "a") as a, Stream(server, "b") as b, Stream(server) as nobody:
        assert [stream.cached() for stream in (a, b, nobody)] == [0, 0, 0]
        assert [stream.cached() > 0 for stream in (a, b, nobody)] == [True, True, True]
        assert nobody.cached({CLIENT_HEADER: "c"}) == 0, "a parameter says it as well"
        assert nobody.cached({CLIENT_HEADER: "a"}) > 0
    assert generate(server, **{CLIENT_HEADER: "d"})[1]["num_cached_tokens"] == 0
    assert generate(server, **{CLIENT_HEADER: "a"})[1]["num_cached_tokens"] > 0
    assert generate(server, parameters={CLIENT_HEADER: "a"})[1]["num_cached_tokens"] > 0


def test_a_client_cannot_say_that_it_is_another_than_the_proxy_says(server):
    sentence = "x-faser-client was sent twice; leave it to the server's proxy"
    with Stream(server, "a") as a:
        for own in ("b", ""):
            a.send(parameters={CLIENT_HEADER: own}, **PROMPT)
            assert a.receive() == sentence
        assert a.cached({CLIENT_HEADER: "a"}) >= 0
    status, answer = generate(server, **{CLIENT_HEADER: "a", "parameters": {CLIENT_HEADER: "b"}})
    assert status == 400
    assert sentence in answer["error"]


def test_only_its_own_client_stops_a_request(server):
    with Stream(server, "victim") as victim, Stream(server, "b") as other, Stream(server) as nobody:
        victim.send("1", stream=True, timeout_ms=60_000.0, **LONG)
        victim.receive()
        other.send("1", text_input="", stop=True)
        nobody.send("1", text_input="", stop=True)
        assert nobody.receive().startswith("the id '1' can be guessed, so it stops no request; use random")
        other.send("2", **PROMPT | {"stream": False})
        assert other.receive()["num_output_tokens"][0, 0] == 2, "after the stop that had no effect"
        for _ in range(20):
            assert "finish_reason" not in victim.receive()
        victim.send("1", text_input="", stop=True)
        while "finish_reason" not in (outputs := victim.receive()):
            pass
        assert outputs["finish_reason"].reshape(-1)[0] == b"cancelled"


def post_and_hang_up(server, path, body):
    body = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.ports[0])) as connection:
        head = f"POST /v2/models/faser/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: running(server) == 1)


def running(server):
    return server.metric("faser_num_requests_running{")


def ends(server, reason):
    return server.metric(f'faser_request_success_total{{finished_reason="{reason}"')


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_client_of_http_that_hangs_up_is_bounded_by_the_default_timeout(server, path):
    """Triton does not notice the hang-up before it has something to send."""
    before = ends(server, "timeout")
    post_and_hang_up(server, path, LONG)
    wait_until(lambda: ends(server, "timeout") == before + 1)


def test_a_client_of_http_that_hangs_up_a_stream_is_noticed(server):
    before = ends(server, "timeout")
    post_and_hang_up(server, "generate_stream", LONG | {"stream": True, "timeout_ms": 60_000.0})
    wait_until(lambda: running(server) == 0)
    assert ends(server, "timeout") == before
    assert server.metric('faser_request_failures_total{code="CANCELLED"') >= 1


def test_a_client_of_grpc_that_hangs_up_is_noticed(engine_dir, tmp_path):
    with serve(engine_dir, tmp_path, decoupled=False) as server:
        server.wait_ready()
        for does_cancel in (True, False):
            before = server.metric('faser_request_failures_total{code="CANCELLED"')
            client = grpcclient.InferenceServerClient(server.grpc_url)
            fields = LONG | {"timeout_ms": 60_000.0}
            inputs = [infer_input(grpcclient, name, value) for name, value in fields.items()]
            call = client.async_infer("faser", inputs, callback=lambda result, error: None)
            wait_until(lambda: running(server) == 1)
            if does_cancel:
                call.cancel()
            client.close()
            wait_until(lambda before=before: server.metric('faser_request_failures_total{code="CANCELLED"') > before)


def test_guesses_of_what_other_clients_have_sent_find_nothing(server):
    """Random clients, prompts and salts; each answer counts its own client's tokens only."""
    rng, sent, num_found = random.Random(3), set(), 0
    with Stream(server) as stream:
        for _ in range(examples(4000)):
            key, number, salt = rng.choice("stuv"), rng.randrange(4), rng.choice((None, "a", "b"))
            fields = {"text_input": f"{'a text of many tokens, ' * 4}{number}", "max_tokens": 1, "stream": False}
            stream.send(parameters={CLIENT_HEADER: key}, **fields | ({"cache_salt": salt} if salt else {}))
            cached = int(stream.receive()["num_cached_tokens"][0, 0])
            assert (cached > 0) == ((key, salt) in sent)
            num_found += cached > 0
            sent.add((key, salt))
    assert num_found > 100
