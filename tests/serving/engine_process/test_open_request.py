"""How a request ends: with its output, or with an error, once."""

from faser_trtllm.core.request import FinishReason, RequestStats, new_counts
from faser_trtllm.errors import UnavailableError
from faser_trtllm.serving.engine_process import wire
from tests.serving.engine_process.outbox_world import World, floats, ints, put


def test_an_error_comes_after_the_output_before_it_and_ends_the_sequences_of_its_request(tokenizer):
    world = World(tokenizer)
    first, second = world.start(1, num_return_sequences=ints(2))
    put(first, tokenizer.encode("a"))
    first[1].fail(UnavailableError("over"))
    put(first, tokenizer.encode("b"))
    put(second, tokenizer.encode("c"))
    world.take()
    put(second, (), FinishReason.CANCELLED)
    world.take()
    assert world.text(1) == "a"
    assert world.error(1).message == "over"
    assert "1.1" in world.cancelled
    assert world.metrics.ends == ["UNAVAILABLE", "CANCELLED"]
    assert world.forgotten == [1]


def test_an_answer_in_one_response_is_not_sent_in_part_before_an_error(tokenizer):
    world = World(tokenizer)
    failed, late = world.start(1, stream=False)[0], world.start(2, stream=False, timeout_ms=floats(0.5))[0]
    put(failed, tokenizer.encode("a"))
    failed[1].fail(UnavailableError("over"))
    put(late, (), FinishReason.TIMEOUT)
    world.take()
    assert [len(answers) for answers in world.received.values()] == [1, 1]
    assert world.error(1).message == "over"
    assert (
        world.error(2).message == "the request timed out in the queue, timeout_ms is 0.5; try again later or raise it"
    )


def test_an_answer_that_no_frame_can_hold_is_its_request_s_error(tokenizer, monkeypatch):
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 1000)
    world = World(tokenizer)
    large, small = world.start(1, stream=False)[0], world.start(2, stream=False)[0]
    put(large, tokenizer.encode("a" * 400), FinishReason.LENGTH)
    put(small, tokenizer.encode("a"), FinishReason.LENGTH)
    world.take()
    assert world.error(1).message.endswith("bytes, allowed are at most 1000; ask for less of it")
    assert world.error(1).code == wire.ERROR_CODES["INVALID_ARG"]
    assert world.text(2) == "helloa"
    assert world.forgotten == [1, 2]


def test_a_deadline_after_the_first_token_is_an_end_and_no_error(tokenizer):
    world = World(tokenizer)
    (sequence,) = world.start(1, timeout_ms=floats(0.5))
    put(sequence, tokenizer.encode("a"))
    put(sequence, (), FinishReason.TIMEOUT)
    world.take()
    assert world.text(1) == "a"
    assert world.received[1][-1][1]["finish_reason"][2][4:] == b"timeout"
    assert world.metrics.ends == ["timeout"]


def test_a_stopped_request_ends_with_its_output_and_a_cancelled_one_with_an_error(tokenizer):
    world = World(tokenizer)
    stopped, cancelled = world.start(1)[0], world.start(2)[0]
    stopped[1].stop()
    cancelled[1].cancel()
    assert world.cancelled == ["1.0", "2.0"]
    for sequence in (stopped, cancelled):
        put(sequence, tokenizer.encode("a"))
        put(sequence, (), FinishReason.CANCELLED)
    world.take()
    assert world.text(1) == "a"
    assert world.received[1][-1][1]["finish_reason"][2][4:] == b"cancelled"
    assert world.error(2).message == "the request was cancelled"


def test_a_client_that_has_cancelled_gets_the_final_response_alone(tokenizer):
    world = World(tokenizer)
    (sequence,) = world.start(1)
    sequence[1].cancel()
    put(sequence, tokenizer.encode("a"))
    world.take()
    assert world.received[1] == []
    put(sequence, tokenizer.encode("b"))
    put(sequence, tokenizer.encode("c"), FinishReason.LENGTH)
    world.take()
    assert [is_final for is_final, _, _ in world.received[1]] == [True], "no output that lacks what was dropped"
    assert world.error(1).message == "the request was cancelled"
    assert world.metrics.ends == ["CANCELLED"]


def test_a_copy_of_statistics_has_every_number_and_stays_as_it_is():
    stats = RequestStats(*new_counts())
    names = [name for name, value in vars(RequestStats).items() if isinstance(value, property) and value.fset] + [
        name for name in vars(stats) if name not in ("counts", "times_s")
    ]
    assert {"num_steps", "first_token_s", "num_cached_tokens", "is_synthetic"} <= set(names)
    for value, name in enumerate(names, start=1):
        setattr(stats, name, value)
    copied = stats.copy()
    for name in names:
        setattr(stats, name, 0)
    assert {name: getattr(copied, name) for name in names} == {name: v for v, name in enumerate(names, start=1)}
