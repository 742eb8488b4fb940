"""Requests of the executor in the same process: what is delivered when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.edge import local_engine
from faser_trtllm.serving.edge.local_engine import LocalEngine
from faser_trtllm.serving.text.request import TextOutput, TextRequest
from faser_trtllm.serving.worker.messages import Chunk, Failed

REQUEST = TextRequest(text="a")


class FakeGenerator:
    def __init__(self):
        self.sinks = {}
        self.cancelled = []
        self.error = None

    def submit(self, request_id, request, on_output):
        if self.error is not None:
            raise self.error
        self.sinks[int(request_id)] = on_output

    def cancel(self, request_id):
        self.cancelled.append(int(request_id))


@pytest.fixture
def generator():
    return FakeGenerator()


@pytest.fixture
def engine(generator):
    return LocalEngine(generator, lambda is_urgent: None)


def output(text, reason=None):
    return TextOutput(text, tuple(text.encode()), finish_reason=reason)


moves = st.lists(
    st.one_of(st.tuples(st.integers(0, 2), st.text("ab", min_size=1, max_size=3)), st.booleans()), max_size=30
)


@given(moves)
def test_nothing_is_lost_reordered_or_called_twice_whenever_it_is_delivered(moves):
    """A move is an output of a request, or a delivery: of everything (True) or of what is urgent."""
    notified, events = [], {0: [], 1: [], 2: []}
    generator = FakeGenerator()
    engine = LocalEngine(generator, notified.append)
    ids = [engine.submit(REQUEST, events[number].append) for number in range(3)]
    sent = {0: "", 1: "", 2: ""}
    for move in moves:
        if isinstance(move, bool):
            engine.deliver(everything=move)
            if move:
                notified.clear()
        else:
            number, text = move
            generator.sinks[ids[number]](output(text))
            sent[number] += text
            assert notified, "nobody was told that something waits"
    for number in range(3):
        generator.sinks[ids[number]](output("!", "stop"))
    engine.deliver()
    for number, received in events.items():
        assert "".join(chunk.text for chunk in received) == sent[number] + "!"
        assert bytes(t for chunk in received for t in chunk.token_ids).decode() == sent[number] + "!"
        assert [chunk.is_final for chunk in received] == [False] * (len(received) - 1) + [True]
        assert len(received) <= 1 + moves.count(True) + moves.count(False)
    assert engine.num_open == 0


def test_chunks_that_wait_become_one(engine, generator):
    events = []
    request_id = engine.submit(REQUEST, events.append)
    for text in "abc":
        generator.sinks[request_id](output(text))
    engine.deliver()
    assert [event.text for event in events] == ["abc"]


def test_the_first_output_and_the_end_do_not_wait_for_the_rest(engine, generator):
    events = []
    engine = LocalEngine(generator, events.append)
    request_id = engine.submit(REQUEST, lambda event: events.append(event.text))

    def send(text, reason=None):
        generator.sinks[request_id](output(text, reason))
        engine.deliver(everything=False)

    send("a")
    assert events == [True, "a"]
    send("b")
    assert events == [True, "a", False]
    send("c")
    assert events == [True, "a", False]
    send("d", "stop")
    assert events == [True, "a", False, True, "bcd"]


@pytest.mark.parametrize(("per_request", "in_all"), [(20_000, 10**9), (10**9, 60_000)])
def test_output_that_nobody_takes_ends_its_request_before_it_fills_the_memory(
    generator, monkeypatch, per_request, in_all
):
    monkeypatch.setattr(local_engine, "MAX_REQUEST_BYTES", per_request)
    monkeypatch.setattr(local_engine, "MAX_BYTES", in_all)
    engine, events = LocalEngine(generator, lambda is_urgent: None), []
    ids = [engine.submit(REQUEST, events.append) for _ in range(4)]
    for _ in range(300):
        for request_id in ids:
            generator.sinks[request_id](TextOutput("a", (1,), logits=b"0" * 100))
    engine.deliver()
    assert len(events) == 4, "only errors: what waited was freed"
    assert {(event.code, event.message[:26]) for event in events} == {("UNAVAILABLE", "the output was not read in")}
    assert sorted(generator.cancelled) == ids
    assert engine.num_open == 0

    request_id = engine.submit(REQUEST, events.append)
    for text in "ab":
        generator.sinks[request_id](output(text))
    engine.deliver()
    assert events[4].text == "ab", "what was freed or taken counts no more"


def test_output_that_is_taken_may_be_of_any_size(engine, generator, monkeypatch):
    monkeypatch.setattr(local_engine, "MAX_REQUEST_BYTES", 20_000)
    monkeypatch.setattr(local_engine, "MAX_BYTES", 20_000)
    events = []
    request_id = engine.submit(REQUEST, events.append)
    for _ in range(100):
        generator.sinks[request_id](output("a"))
        engine.deliver()
    assert "".join(event.text for event in events) == "a" * 100


def test_an_error_comes_after_the_output_before_it(engine, generator):
    events = []
    request_id = engine.submit(REQUEST, events.append)
    generator.sinks[request_id](output("a"))
    engine.fail_all("UNAVAILABLE", "over")
    generator.sinks[request_id](output("b"))
    engine.deliver()
    assert events[0].text == "a"
    assert events[1:] == [Failed(request_id, "UNAVAILABLE", "over")]


def test_a_refused_request_is_an_event(engine, generator):
    generator.error = InvalidArgumentError("top_k is -1")
    events = []
    request_id = engine.submit(REQUEST, events.append)
    engine.deliver()
    assert events == [Failed(request_id, "INVALID_ARG", "top_k is -1")]


def test_a_stopped_request_ends_with_its_output_and_a_cancelled_one_with_an_error(engine, generator):
    ends = []
    for end in (engine.stop, engine.cancel):
        events = []
        request_id = engine.submit(REQUEST, events.append)
        end(request_id)
        assert generator.cancelled[-1] == request_id
        generator.sinks[request_id](output("a", "cancelled"))
        engine.deliver()
        ends += events
    assert isinstance(ends[0], Chunk)
    assert (ends[0].text, ends[0].finish_reason) == ("a", "cancelled")
    assert (ends[1].code, ends[1].message) == ("CANCELLED", "the request was cancelled")


def test_a_draining_engine_takes_nothing(engine):
    assert engine.is_ready
    engine.refuse()
    assert not engine.is_ready
    with pytest.raises(UnavailableError, match="shutting down"):
        engine.submit(REQUEST, print)


@pytest.mark.parametrize("reason", [None, "stop"])
def test_a_response_that_cannot_be_made_ends_its_request_and_no_other(engine, generator, reason):
    events = {"failing": [], "other": []}

    def fail(event):
        if isinstance(event, Chunk):
            raise RuntimeError("on purpose")
        events["failing"].append(event)

    ids = [engine.submit(REQUEST, on_event) for on_event in (fail, events["other"].append)]
    for request_id in ids:
        generator.sinks[request_id](output("a", reason))
    engine.deliver()
    for request_id in ids:
        generator.sinks[request_id](output("b", "stop"))
    engine.deliver()
    what = "the response could not be made: RuntimeError; see the server's log"
    assert events["failing"] == [Failed(ids[0], "INTERNAL", what)]
    assert [event.text for event in events["other"]] == (["a", "b"] if reason is None else ["a"])
    assert generator.cancelled == [ids[0]]
    assert engine.num_open == 0
