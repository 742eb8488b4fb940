"""A client may do nothing to another client's requests unless the operator allows it."""

import random
import struct
import uuid

import numpy as np
import pytest

from faser_trtllm.config import ServiceConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.engine_process.client_rules import ClientRules
from faser_trtllm.serving.engine_process.wire import FromBackend, OpenStatus, ToBackend
from faser_trtllm.serving.text.request import TextRequest
from tests.support.backend_frames import read_responses
from tests.support.backend_peer import Backend
from tests.support.effort import pick
from tests.support.fake_engine import ENDLESS


def rules(**config):
    return ClientRules.of(ServiceConfig(**config))


def salt_of(applied):
    return SamplingParams(**applied.sampling_fields()).salt


@pytest.mark.parametrize(
    ("limit", "asked", "given"),
    [(0.5, 0.5, 0.5), (0.5, 0.1, 0.1), (1.0, 0.9, 0.9), (0.2, 0.5, 0.2), (0.2, 0.1, 0.1), (0.5, 0.51, None)],
)
def test_no_client_raises_its_priority_above_what_the_operator_allows(limit, asked, given):
    """Requests that name no priority have 0.5, so 0.5 is never refused."""
    request = TextRequest(text="a", priority=asked)
    if given is not None:
        assert rules(max_priority=limit).applied(request, "").priority == given
        return
    with pytest.raises(InvalidArgumentError) as caught:
        rules(max_priority=limit).applied(request, "")
    assert str(caught.value) == "priority is 0.51, allowed is 0 to 0.5, the server's max_priority"


def test_requests_whose_clients_may_be_gone_have_a_deadline():
    unary, stream = TextRequest(text="a", stream=False), TextRequest(text="a", stream=True)
    assert rules().applied(unary, "").timeout_ms == 600_000
    assert rules().applied(stream, "").timeout_ms is None, "Triton notices when its client goes"
    assert rules(default_timeout_ms=0).applied(unary, "").timeout_ms is None
    asked = TextRequest(text="a", stream=False, timeout_ms=5.0)
    assert rules(default_timeout_ms=7).applied(asked, "").timeout_ms == 5.0


def test_each_client_has_its_own_cache_if_the_operator_wants_that():
    """The salts that clients send do not matter, not even one that equals the salt of another's request."""
    asked = [(None, None), ("a", None), ("b", None), (None, 5), ("a", 5), ("", None)]
    requests = [TextRequest(text="a", cache_salt=text, cache_salt_id=number) for text, number in asked]
    apart, shared = rules(cache_salt="client"), rules()
    salts = {
        (key, request): salt_of(apart.applied(request, key)) for key in ("", "x", "y", "xy") for request in requests
    }
    assert len(set(salts.values())) == len(salts)
    forged = TextRequest(text="a", cache_salt=apart.applied(requests[0], "x").cache_salt)
    assert salt_of(apart.applied(forged, "y")) not in salts.values()
    assert salt_of(shared.applied(requests[0], "x")) == salt_of(shared.applied(requests[0], "y")) == ""
    SamplingParams(**apart.applied(requests[1], "k" * 256).sampling_fields()).validate(vocab_size=10)


def test_a_key_that_is_too_long_is_refused():
    with pytest.raises(InvalidArgumentError, match="x-faser-client has 257 characters, allowed are at most 256"):
        rules().applied(TextRequest(text="a"), "k" * 257)


TIME_BASED = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"  # a UUID of version 1
ONE_DIGIT_SHORT = "f47ac10b58cc4372a5670e02b2c3d47"  # of a UUID of version 4


@pytest.mark.parametrize("request_id", ["1", "request-7", "0" * 32, "x" * 64, TIME_BASED, ONE_DIGIT_SHORT])
def test_an_id_that_may_be_guessed_stops_nothing(request_id):
    with pytest.raises(InvalidArgumentError, match="can be guessed, so it stops no request; use random"):
        rules().check_stop(request_id, "")
    rules().check_stop(request_id, "a key")
    rules(stop_by_id=True).check_stop(request_id, "")


@pytest.mark.parametrize("shape", ["{}", "cmpl-{}-3", "{}/retry"])
def test_a_random_id_may_stop_its_request(shape):
    for _ in range(100):
        drawn = uuid.uuid4()
        for text in (str(drawn), drawn.hex, drawn.hex.upper()):
            rules().check_stop(shape.format(text), "")


def test_stops_of_others_have_no_effect(fake_engine_dir, monkeypatch):
    """Clients send ids that they guess, that they know from clients with other keys, and random ones."""
    monkeypatch.setenv("FASER_FAKE_STEP_S", "0.5")
    rng = random.Random(7)
    secret = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    victims = [("", "1"), ("", secret), ("a", "1"), ("a", secret), ("b", "2"), ("", "")]
    one, true = np.array([[ENDLESS]], np.int32), np.array([[True]])
    with Backend(fake_engine_dir) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        for handle, (key, request_id) in enumerate(victims):
            asked = {"text_input": b"abc", "max_tokens": one, "stream": true}
            backend.ask(0, handle, request_id=request_id, client_key=key, **asked)
        num_rounds, num_refused, handle = pick(50, 500), 0, len(victims)
        for _ in range(num_rounds):
            first, handle = handle, handle + 200
            for number in range(first, handle):
                guess = rng.choice(["1", "2", str(rng.randint(0, 99)), secret[:-1] + "_", str(uuid.uuid4())])
                key, request_id = rng.choice([("", guess), (rng.choice("cdexy"), guess), ("c", secret), ("b", secret)])
                backend.ask(0, number, request_id=request_id, client_key=key, text_input=b"", stop=true)
            left = 200
            while left:
                for found, is_final, _, error in read_responses(backend.receive(ToBackend.RESPONSES)):
                    assert not (is_final and found < len(victims)), victims[found]
                    left -= is_final
                    num_refused += error is not None
        assert 0 < num_refused < 200 * num_rounds, "some ids are refused, others have no effect"
        backend.ask(0, handle, request_id=secret, text_input=b"", stop=true)
        backend.ask(0, handle + 1, request_id="1", client_key="a", text_input=b"", stop=true)
        ended = backend.answers(4)
        assert set(ended) >= {1, 2, handle, handle + 1}
        assert all(ended[victim][-1]["finish_reason"][2][4:] == b"cancelled" for victim in (1, 2))
        backend.send(FromBackend.CANCEL, struct.pack("<Q", 0))
        assert backend.answers(1)[0][-1].message == "the request was cancelled"
