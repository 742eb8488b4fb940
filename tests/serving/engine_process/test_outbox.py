"""Outputs on their way to the writer: the same text whenever it is made, in order, bounded, and ended once."""

import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason, RequestStats, new_counts
from faser_trtllm.errors import UnavailableError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.engine_process import outbox as module
from faser_trtllm.serving.engine_process.model import ServedModel
from faser_trtllm.serving.engine_process.open_request import OpenRequest
from faser_trtllm.serving.engine_process.outbox import MAX_AT_ONCE, Outbox
from faser_trtllm.serving.engine_process.wire import RequestFrame
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import FASER
from faser_trtllm.serving.triton.request import parse_request
from tests.support.backend_frames import read_responses
from tests.support.effort import examples
from tests.support.scripted_text import ScriptExecutor, cut
from tests.support.waiting import PATIENCE_S, wait_until

OUTPUTS = ("text_output", "output_ids", "finish_reason", "output_is_draft", "num_output_tokens", "generation_logits")


class Ends:
    """ModelMetrics that remembers how requests ended."""

    def __init__(self):
        self.ends = []

    def ended(self, reason, error=None):
        self.ends.append(reason if error is None else error.code)


class World:
    """An outbox and requests over executors that commit what the test says."""

    def __init__(self, tokenizer, **contract):
        self.notified, self.cancelled, self.forgotten = [], [], []
        self.outbox = Outbox(self.notified.append)
        self.metrics = Ends()
        self.model = ServedModel(0, FASER, True, False, self.metrics, self.cancelled.append)
        self.tokenizer = tokenizer
        self.received = {}

    def start(self, handle, stream=True, **tensors):
        """Sequences of a request, each with the request that its executor has."""
        given = {"text_input": text("hello"), "max_tokens": ints(500), "stream": np.array([[stream]])} | tensors
        frame = RequestFrame(0, handle, "id", "\n".join(OUTPUTS).encode(), (), 100)
        siblings, found = [], []
        self.received[handle] = []
        for part in parse_request(given):
            executor = ScriptExecutor()
            generator = TextGenerator(executor, self.tokenizer)
            prepared = generator.prepare(part.request)
            request = OpenRequest(prepared, part, frame, self.model, siblings, self.outbox, self.forgotten.append)
            siblings.append(request)
            generator.start(request.id, prepared, request, request.fail)
            found.append((executor.request, request))
        return found

    def take(self, everything=True):
        for handle, is_final, outputs, error in read_responses(b"".join(self.outbox.take(everything))):
            answers = self.received[handle]
            assert not (answers and answers[-1][0]), "nothing follows the final response"
            answers.append((is_final, outputs, error))

    def text(self, handle):
        pieces = [outputs["text_output"][2][4:] for _, outputs, error in self.received[handle] if error is None]
        return b"".join(pieces).decode()

    def tokens(self, handle):
        ids = [outputs["output_ids"][2] for _, outputs, error in self.received[handle] if error is None]
        return np.frombuffer(b"".join(ids), np.int32).tolist()

    def error(self, handle):
        is_final, _, error = self.received[handle][-1]
        assert is_final
        return error


def text(*values):
    return np.array([[value.encode() for value in values]], object)


def ints(*values):
    return np.array([values], np.int32)


def floats(*values):
    return np.array([values], np.float32)


def put(sequence, ids, reason=None):
    request, sink = sequence
    return sink(RequestOutput(request, tuple(ids), reason))


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
    monkeypatch.setattr(Tokenizer, "_token_bytes", lambda self, token: made.append(token) or b"a")
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
    assert [put(sequence, ids) for sequence in sequences] == [True] * MAX_AT_ONCE + [False] * 2
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
    monkeypatch.setattr(Tokenizer, "_token_bytes", lambda self, token: made.append(token) or b"a")
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
    monkeypatch.setattr(Tokenizer, "_token_bytes", mock.Mock(side_effect=ZeroDivisionError))
    assert not put(sequence, tokenizer.encode("a"), reason)
    world.take()
    assert world.error(1).message == "the text could not be made: ZeroDivisionError; see the server's log"
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
    assert world.error(1).message == "the response could not be made: ZeroDivisionError; see the server's log"
    assert "making a response failed" in caplog.text
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
    put(sequence, tokenizer.encode("b"), FinishReason.LENGTH)
    world.take()
    assert [is_final for is_final, _, _ in world.received[1]] == [True], "it ended before the engine heard of it"


def test_a_copy_of_statistics_has_every_number_and_stays_as_it_is():
    stats = RequestStats(*new_counts())
    names = [name for name, value in vars(RequestStats).items() if isinstance(value, property)] + [
        name for name in vars(stats) if name not in ("counts", "times_s")
    ]
    assert {"num_steps", "first_token_s", "num_cached_tokens", "is_synthetic"} <= set(names)
    for value, name in enumerate(names, start=1):
        setattr(stats, name, value)
    copied = stats.copy()
    for name in names:
        setattr(stats, name, 0)
    assert {name: getattr(copied, name) for name in names} == {name: v for v, name in enumerate(names, start=1)}
