"""Outputs on their way to the writer: the same text whenever it is made, in order, bounded, and ended once."""

import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_trtllm.core.request import FinishReason
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.engine_process import outbox as module
from faser_trtllm.serving.engine_process.open_request import OpenRequest
from faser_trtllm.serving.engine_process.outbox import MAX_AT_ONCE
from tests.serving.engine_process.outbox_world import World, put, text
from tests.support.effort import examples
from tests.support.scripted_text import cut
from tests.support.waiting import PATIENCE_S, wait_until


def feed(world, chunks, moves=(), **tensors):
    """A request that is fed the chunks until its sink ends it, and what its client gets. moves: after each of them."""
    ((request, sink),) = world.start(1, exclude_input_in_output=np.array([[True]]), **tensors)
    moves = iter([*moves, *[""] * len(chunks)])
    for place, chunk in enumerate(chunks):
        request.stats.num_steps += 1
        request.stats.num_accepted_tokens += len(chunk) - 1
        request.stats.first_scheduled_s = request.stats.first_scheduled_s or float(place)
        if put((request, sink), chunk):
            break
        move = next(moves)
        if move == "hand over":
            world.outbox.hand_over()
        elif move in ("take", "urgent"):
            world.take(everything=move == "take")
    else:
        put((request, sink), (), FinishReason.LENGTH)
    world.take()
    answers = world.received[1]
    assert [is_final for is_final, _, _ in answers] == [False] * (len(answers) - 1) + [True]
    last = answers[-1][1]
    marks = b"".join(outputs["output_is_draft"][2] for _, outputs, _ in answers)
    return world.text(1), world.tokens(1), last["finish_reason"], last["num_output_tokens"], marks


LATE = {"sizes": [1] * 6, "moves": [], "max_at_once": 0, "max_waiting": 4096, "stream": True}


@settings(max_examples=examples(200))
@given(
    content=st.lists(st.sampled_from(["a", "b", "ab", "é", "😀", "\n"]), max_size=15).map("".join),
    words=st.lists(st.sampled_from(["ab", "é", "😀b", "\n\n", "bab"]), max_size=2),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    moves=st.lists(st.sampled_from(["hand over", "take", "urgent", ""]), max_size=20),
    max_at_once=st.sampled_from([0, 1, 16]),
    max_waiting=st.sampled_from([0, 2, 4096]),
    stream=st.booleans(),
)
@example(content="a\n\nb\n", words=[], **LATE)
@example(content="a\n\nb\n", words=["\n\n"], **LATE)
def test_whenever_it_is_made_and_taken_the_client_gets_the_same(
    tokenizer, content, words, sizes, moves, max_at_once, max_waiting, stream
):
    """Text, tokens, the end, and marks of drafts: those of the steps that committed the tokens."""
    chunks = cut(tokenizer.encode(content), sizes)
    tensors = {"stream": stream, "return_is_draft": np.array([[True]])}
    if words:
        tensors["stop_words"] = text(*words)
    with mock.patch.multiple(module, MAX_AT_ONCE=max_at_once, MAX_WAITING=max_waiting):
        late = feed(World(tokenizer), chunks, moves, **tensors)
    assert late == feed(World(tokenizer), chunks, ["take"] * len(chunks), **tensors)


moves = st.lists(
    st.one_of(st.tuples(st.integers(0, 2), st.text("ab", min_size=1, max_size=3)), st.booleans()), max_size=30
)


@given(moves)
def test_nothing_is_lost_reordered_or_sent_twice_whenever_it_is_taken(tokenizer, moves):
    """A move is an output of a request, or a call of take(): for everything (True) or for what is urgent."""
    world, sent = World(tokenizer), {0: "", 1: "", 2: ""}
    sequences = {handle: world.start(handle)[0] for handle in sent}
    for move in moves:
        if isinstance(move, bool):
            world.take(everything=move)
            if move:
                world.notified.clear()
        else:
            handle, content = move
            put(sequences[handle], tokenizer.encode(content))
            world.outbox.hand_over()
            sent[handle] += content
            assert world.notified, "nobody was told that something waits"
    for handle in sent:
        put(sequences[handle], tokenizer.encode("a"), FinishReason.LENGTH)
    world.take()
    for handle, content in sent.items():
        assert world.text(handle) == content + "a"
        assert world.tokens(handle) == tokenizer.encode(content + "a")
        assert len(world.received[handle]) <= 1 + sum(isinstance(move, bool) for move in moves)
    assert sorted(world.forgotten) == [0, 1, 2]
    assert world.metrics.ends == ["length"] * 3


def test_the_first_output_and_the_end_do_not_wait_for_the_rest(tokenizer):
    world = World(tokenizer)
    (sequence,) = world.start(1)
    for content, expected in (("a", "a"), ("b", "a"), ("c", "a")):
        put(sequence, tokenizer.encode(content))
        world.take(everything=False)
        assert world.text(1) == expected
    assert world.notified[-1] is False, "the writer knows that something waits for its rest to end"
    put(sequence, tokenizer.encode("d"), FinishReason.LENGTH)
    world.take(everything=False)
    assert world.text(1) == "abcd"
    assert len(world.received[1]) == 2, "what waits becomes one response"


def test_the_writer_is_told_when_the_executor_hands_over(tokenizer):
    world = World(tokenizer)
    (sequence,) = world.start(1)
    world.outbox.hand_over()
    assert not world.notified, "nothing waits"
    put(sequence, tokenizer.encode("abc"))
    assert not world.notified, "the executor is still at work"
    world.outbox.hand_over()
    assert world.notified == [True]
    world.take()
    assert world.text(1) == "abc"


def test_the_executor_makes_the_text_itself_if_nobody_else_does(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    world = World(tokenizer)
    (sequence,) = world.start(1)
    made = []
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, token: made.append(token) or b"a")
    for number in range(1, 9):
        put(sequence, tokenizer.encode("a"))
        world.outbox.hand_over()
        assert len(made) == 4 * (number // 4)
    assert len(world.notified) == 8
    world.take()
    assert world.text(1) == "a" * 8


def test_the_first_stop_words_of_a_step_are_found_at_once_and_others_end_with_the_next_output(tokenizer):
    world = World(tokenizer)
    number = MAX_AT_ONCE + 2
    sequences = [world.start(handle, stop_words=text("END"))[0] for handle in range(number)]
    ids = tokenizer.encode("one END two")
    assert [bool(put(sequence, ids)) for sequence in sequences] == [True] * MAX_AT_ONCE + [False] * 2
    world.outbox.hand_over()
    world.take()
    assert all(put(sequence, ids) for sequence in sequences[MAX_AT_ONCE:])
    world.take()
    assert {world.text(handle) for handle in range(number)} == {"one "}
    assert world.metrics.ends == ["stop"] * number


def test_every_step_has_its_first_ones(tokenizer, monkeypatch):
    world = World(tokenizer)
    (sequence,) = world.start(1, stop_words=text("END"))
    made = []
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, token: made.append(token) or b"a")
    for number in range(1, MAX_AT_ONCE + 5):
        assert not put(sequence, tokenizer.encode("a"))
        assert len(made) == number, "it was not made at once"
        world.outbox.hand_over()


def test_order_is_kept_between_what_waits_and_what_is_made_at_once(tokenizer):
    world = World(tokenizer)
    sequences = [world.start(handle, stop_words=text("END"))[0] for handle in range(MAX_AT_ONCE + 1)]
    for letter in "abc":
        for sequence in sequences if letter == "a" else sequences[-1:]:
            put(sequence, tokenizer.encode(letter))
        world.outbox.hand_over()
    world.take()
    assert world.text(MAX_AT_ONCE) == "abc"


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_text_that_cannot_be_made_ends_its_request_with_an_error(tokenizer, monkeypatch, reason):
    """Its client would wait for ever otherwise."""
    world = World(tokenizer)
    (sequence,) = world.start(1)
    monkeypatch.setattr(Tokenizer, "token_bytes", mock.Mock(side_effect=ZeroDivisionError))
    assert not put(sequence, tokenizer.encode("a"), reason)
    world.take()
    assert world.error(1).message == "the output could not be detokenized: ZeroDivisionError; see the server's log"
    assert world.metrics.ends == ["INTERNAL"]
    assert put(sequence, (), reason), "what is made later ends with the next output"


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_a_response_that_cannot_be_made_ends_its_request_and_no_other(tokenizer, monkeypatch, caplog, reason):
    world = World(tokenizer)
    failing, other = world.start(1)[0], world.start(2)[0]
    make = OpenRequest.take

    def fail(request):
        output = make(request)
        if request.handle == 1:
            raise ZeroDivisionError
        return output

    monkeypatch.setattr(OpenRequest, "take", fail)
    for sequence in (failing, other):
        put(sequence, tokenizer.encode("a"), reason)
    world.take()
    if reason is None:
        put(other, tokenizer.encode("b"), FinishReason.LENGTH)
        put(failing, (), FinishReason.CANCELLED)
        world.take()
    assert world.error(1).message == "the response could not be built: ZeroDivisionError; see the server's log"
    assert "a response could not be built" in caplog.text
    assert world.cancelled == ["1.0"]
    assert world.text(2) == ("ab" if reason is None else "a")
    assert sorted(world.forgotten) == [1, 2]


def test_two_threads_make_each_output_once_and_in_order(tokenizer, monkeypatch):
    """The writer and the executor may. Every other output would let the next one overtake."""
    world, found = World(tokenizer), []
    (sequence,) = world.start(1)
    monkeypatch.setattr(
        OpenRequest, "push", lambda request, output, stats: found.append(output.new_token_ids[0]) or time.sleep(1e-4)
    )
    done = threading.Event()

    def convert():
        while not done.is_set():
            world.outbox.convert()

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for token in range(300):
        put(sequence, (token,))
    wait_until(lambda: len(found) == 300)
    done.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == list(range(300))


@pytest.mark.parametrize(("per_request", "in_all"), [(4_000, 10**9), (10**9, 11_000)])
def test_output_that_nobody_takes_ends_its_request_before_it_fills_the_memory(
    tokenizer, monkeypatch, per_request, in_all
):
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", per_request)
    monkeypatch.setattr(module, "MAX_BYTES", in_all)
    world = World(tokenizer)
    sequences = {handle: world.start(handle)[0] for handle in range(4)}
    for _ in range(300):
        for sequence in sequences.values():
            put(sequence, tokenizer.encode("a"))
        world.outbox.convert()
    world.take()
    assert {len(answers) for answers in world.received.values()} == {1}, "only errors: what waited was freed"
    assert {world.error(handle).message[:26] for handle in sequences} == {"the output was not read in"}
    assert sorted(set(world.cancelled)) == ["0.0", "1.0", "2.0", "3.0"]

    (sequence,) = world.start(9)
    for content in "ab":
        put(sequence, tokenizer.encode(content))
    world.take()
    assert world.text(9) == "ab", "what was freed or taken counts no more"


def test_output_that_is_taken_may_be_of_any_size(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 1_000)
    monkeypatch.setattr(module, "MAX_BYTES", 1_000)
    world = World(tokenizer)
    (sequence,) = world.start(1)
    for _ in range(100):
        put(sequence, tokenizer.encode("a"))
        world.take()
    assert world.text(1) == "a" * 100
