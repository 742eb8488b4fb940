"""The application without a server: clients that leave, read slowly or send badly, and a model that fails."""

import asyncio
import json
import threading

import pytest

from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.client import Response, ResponseError
from faser_trtllm.serving.openai import app, intake
from faser_trtllm.serving.openai.app import Service, build_app
from faser_trtllm.serving.openai.request import parse_completion
from faser_trtllm.serving.openai.served_model import ServedModel

ASK = {"model": "faser", "prompt": "a"}


class FakeModel:
    """Gives num_deltas deltas per sequence, or fails before its fails_at-th; counts what it gave and what is open."""

    def __init__(self, num_deltas=3, fails_at=None, error=None, fails_for="-0"):
        self.num_deltas = num_deltas
        self.fails_at = fails_at
        self.error = error
        self.fails_for = fails_for
        self.num_given = 0
        self.num_open = 0
        self.client_keys = []
        self.opened = asyncio.Event()

    async def generate(self, request_id, prompt, inputs, client_key=""):
        self.client_keys.append(client_key)
        self.num_open += 1
        self.opened.set()
        try:
            for i in range(self.num_deltas):
                await asyncio.sleep(0)
                if i == self.fails_at and request_id.endswith(self.fails_for):
                    raise self.error
                self.num_given += 1
                last = i == self.num_deltas - 1
                yield Response(f"<{i}>", (i,), "length" if last else None, 1, self.num_deltas)
            await asyncio.sleep(0)
        finally:
            self.num_open -= 1


class Client:
    """One ASGI request: its body in pieces, what came back, and a switch to leave or to stop reading."""

    def __init__(self, model, body, headers=None, *, path="/v1/completions", verb="POST", app=None, **settings):
        self.app = app or build_app(Service(model, ServedModel("faser"), **{"max_body_bytes": 1 << 20} | settings))
        self.verb = verb
        pieces = body if isinstance(body, list) else [json.dumps(body).encode()]
        self.messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        self.messages[-1]["more_body"] = False
        self.headers = [(b"content-type", b"application/json")] if headers is None else headers
        self.path = path
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status = None
        self.response_headers = {}
        self.body = b""

    async def receive(self):
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status, self.response_headers = message["status"], dict(message["headers"])
        self.body += message.get("body", b"")

    async def run(self):
        scope = {"type": "http", "method": self.verb, "path": self.path, "headers": self.headers, "query_string": b""}
        await asyncio.wait_for(self.app(scope | {"root_path": ""}, self.receive, self.send), 10)
        return self

    def events(self):
        return [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n")[:-1]]


def run(scenario):
    return asyncio.run(scenario())


def ask(model, *args, **settings):
    """A request to its end -> its client."""
    return asyncio.run(Client(model, *args, **settings).run())


def test_a_client_that_leaves_closes_all_its_sequences():
    async def scenario():
        model = FakeModel(num_deltas=10**9)
        client = Client(model, ASK | {"n": 5})
        task = asyncio.create_task(client.run())
        await model.opened.wait()
        await asyncio.sleep(0.05)
        assert model.num_open == 5
        client.left.set()
        await task
        return model, client

    model, client = run(scenario)
    assert model.num_open == 0
    assert client.status is None


def test_a_client_that_does_not_read_holds_up_the_model():
    async def scenario():
        model = FakeModel(num_deltas=1_000)
        client = Client(model, ASK | {"n": 2, "stream": True})
        client.reads.clear()
        task = asyncio.create_task(client.run())
        await asyncio.sleep(0.2)
        num_given = model.num_given
        await asyncio.sleep(0.1)
        assert model.num_given == num_given < 100
        client.reads.set()
        await task
        return model, client

    model, client = run(scenario)
    assert model.num_given == 2_000
    assert client.events()[-1] == b"[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnavailableError("the Triton server cannot be reached"), 503),
        (ResponseError("the queue is full", "UNAVAILABLE"), 503),
        (ResponseError("top_p is 0", "INVALID_ARGUMENT"), 400),
        (ResponseError("too late", "DEADLINE_EXCEEDED"), 504),
        (ResponseError("the engine failed", "INTERNAL"), 500),
        (RuntimeError("a secret"), 500),
    ],
)
def test_what_fails_before_the_first_token_has_its_status(error, status, stream):
    model = FakeModel(fails_at=0, error=error)
    client = ask(model, ASK | {"n": 3, "stream": stream})
    assert client.status == status
    assert client.response_headers.get(b"retry-after") == (b"1" if status == 503 else None)
    message = json.loads(client.body)["error"]["message"]
    assert message == (str(error) if not isinstance(error, RuntimeError) else message)
    assert "secret" not in message
    assert model.num_open == 0


def test_what_fails_later_is_the_stream_s_last_event():
    error = ResponseError("the engine ended", "UNAVAILABLE")
    model = FakeModel(num_deltas=100, fails_at=2, error=error, fails_for="-1")
    client = ask(model, ASK | {"n": 2, "stream": True})
    assert client.status == 200
    assert json.loads(client.events()[-1])["error"]["message"] == "the engine ended"
    assert b"[DONE]" not in client.body
    assert model.num_open == 0


def test_bodies_in_pieces_and_their_limit():
    def sent(num_bytes):
        body = json.dumps(ASK).encode().ljust(num_bytes)
        pieces = [body[i : i + 100] for i in range(0, num_bytes, 100)]
        return ask(FakeModel(), pieces, max_body_bytes=1000)

    assert sent(1000).status == 200
    too_large = sent(1001)
    assert too_large.status == 413
    assert not too_large.messages  # read to its end
    much_too_large = sent(50_000)
    assert much_too_large.status == 413
    assert much_too_large.messages


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(intake, "BODY_TIMEOUT_S", 0.05)
    client = Client(FakeModel(), [b"{", b"}"])
    client.messages.pop()
    assert run(client.run).status == 408


@pytest.mark.parametrize("headers", [[], [(b"content-type", b"text/plain")], [(b"content-type", b"\xff\xfe")]])
def test_only_json_is_read(headers):
    client = ask(FakeModel(), ASK, headers)
    assert client.status == 415
    assert client.messages


def test_a_content_type_with_a_charset_is_json():
    client = ask(FakeModel(), ASK, [(b"content-type", b"Application/JSON; charset=utf-8")])
    assert client.status == 200
    assert json.loads(client.body)["choices"][0]["text"] == "<0><1><2>"


KEY = (b"authorization", b"Bearer secret-key")
JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize("headers", [[JSON], [JSON, (b"authorization", b"Bearer other")], [JSON, (b"x-key", KEY[1])]])
def test_without_the_key_nothing_is_generated(headers):
    model = FakeModel()
    client = ask(model, ASK, headers, api_key="secret-key")
    assert client.status == 401
    error = json.loads(client.body)["error"]
    assert error["code"] == "invalid_api_key"
    assert "secret-key" not in error["message"]
    assert model.num_given == 0


def test_the_key_opens_the_api_and_health_needs_none():
    class Ready(FakeModel):
        async def is_ready(self):
            return True

    models = ask(Ready(), ASK, [], path="/v1/models", verb="GET", api_key="secret-key")
    health = ask(Ready(), ASK, [], path="/health", verb="GET", api_key="secret-key")
    asked = ask(Ready(), ASK, [JSON, KEY], api_key="secret-key")
    assert [client.status for client in (models, health, asked)] == [401, 200, 200]


def test_who_the_proxy_says_that_sent_it_reaches_the_model():
    model = FakeModel()
    assert ask(model, ASK | {"n": 2}, [JSON, (b"x-faser-client", b"tenant 7")]).status == 200
    assert ask(model, ASK).status == 200
    assert model.client_keys == ["tenant 7", "tenant 7", ""]
    refused = ask(model, ASK, [JSON, (b"x-faser-client", b"\xff")])
    assert refused.status == 400
    assert (
        "x-faser-client is 'ÿ'; it must hold only printable ASCII characters"
        in json.loads(refused.body)["error"]["message"]
    )


def test_web_pages_are_let_in_by_name_only():
    def answer(verb, headers, **settings):
        client = ask(FakeModel(), ASK, [JSON, *headers], verb=verb, **settings)
        return client.status, client.response_headers.get(b"access-control-allow-origin")

    page, other = (b"origin", b"https://page.example"), (b"origin", b"https://other.example")
    wants = [(b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")]
    allowed = {"allowed_origins": ("https://page.example",), "api_key": "secret-key"}
    assert answer("OPTIONS", [page, *wants], **allowed) == (200, b"https://page.example")
    assert answer("OPTIONS", [other, *wants], **allowed) == (400, None)
    assert answer("POST", [page, KEY], **allowed) == (200, b"https://page.example")
    assert answer("POST", [other, KEY], **allowed) == (200, None)
    assert answer("POST", [page]) == (200, None)


@pytest.mark.parametrize(("metrics_url", "status"), [(None, 404), ("http://127.0.0.1:1/metrics", 503)])
def test_metrics_that_are_not_known_or_not_there(metrics_url, status):
    assert ask(FakeModel(), ASK, [], path="/metrics", verb="GET", metrics_url=metrics_url).status == status


SLOW_BODY = 100_000


def test_large_bodies_wait_for_their_turn_and_small_ones_do_not(monkeypatch):
    """One client's long prompts hold up its own requests only, and no more of them are taken than can be held."""
    gate, parsing = threading.Event(), []

    def parse(values, served):
        if "padding" in values:
            parsing.append(values)
            assert gate.wait(20)
        return parse_completion(ASK, served)

    monkeypatch.setattr(app, "parse_completion", parse)
    monkeypatch.setattr(intake, "MAX_WAITING_BODIES", 4)

    async def scenario():
        app = build_app(Service(FakeModel(), ServedModel("faser")))
        large = [Client(FakeModel(), ASK | {"padding": "x" * SLOW_BODY}, app=app) for _ in range(5)]
        tasks = [asyncio.create_task(client.run()) for client in large]
        await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        small = await Client(FakeModel(), ASK, app=app).run()
        num_parsing = len(parsing)
        gate.set()
        await asyncio.gather(*tasks)
        return small, large, num_parsing

    small, large, num_parsing = run(scenario)
    assert small.status == 200
    assert num_parsing <= 2
    assert sorted(client.status for client in large) == [200] * 4 + [503]


def test_all_bodies_together_have_a_limit(monkeypatch):
    """Large bodies are refused beyond the limit, small ones never; a body that was read or abandoned frees its room."""
    monkeypatch.setattr(intake, "MAX_BODIES_BYTES", 2 * SLOW_BODY)

    async def scenario():
        app = build_app(Service(FakeModel(), ServedModel("faser")))
        waiting = [Client(FakeModel(), [b" " * SLOW_BODY, b"{}"], app=app) for _ in range(2)]
        for client in waiting:
            client.messages.pop()
        tasks = [asyncio.create_task(client.run()) for client in waiting]
        await asyncio.sleep(0.05)
        asked = [ASK, ASK | {"stop": "x" * 50_000}]
        statuses = [(await Client(FakeModel(), body, app=app).run()).status for body in asked]
        for client in waiting:
            client.left.set()
        await asyncio.gather(*tasks)
        statuses.append((await Client(FakeModel(), asked[1], app=app).run()).status)
        return statuses

    assert run(scenario) == [200, 503, 400]


@pytest.mark.parametrize(
    ("options", "server_s", "multiple"),
    [
        ({}, 0, None),
        ({"include_obfuscation": False}, 256, None),
        ({"include_obfuscation": True}, 0, 512),
        ({"include_obfuscation": True, "include_usage": True}, 384, 384),
        ({}, 384, 384),
    ],
)
def test_events_are_padded_where_that_is_asked_for(options, server_s, multiple):
    """The size of a padded event tells neither how long its text is nor how many drafts were accepted."""
    body = ASK | {"stream": True, "n": 2} | ({"stream_options": options} if options else {})
    client = ask(FakeModel(num_deltas=20), body, stream_padding=server_s)
    *events, last = client.body.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    if multiple is None:
        assert len({len(event) for event in events}) > 1
        assert not any("obfuscation" in chunk for chunk in chunks)
    else:
        assert {len(event) + 2 for event in events} == {multiple}
        assert len({chunk["obfuscation"] for chunk in chunks}) == len(chunks)
