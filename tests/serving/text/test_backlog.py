"""Text that another thread makes: the same outputs as on the executor's thread, whenever it is made."""

import threading
import time
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.request import FinishReason, RequestStats, new_counts
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text import backlog as module
from faser_trtllm.serving.text.backlog import MAX_AT_ONCE, Backlog
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.support.checkpoints import write_tokenizer
from tests.support.effort import examples
from tests.support.scripted_text import ScriptExecutor, cut
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 320)
    return Tokenizer.load(directory)


LATE = {"sizes": [1] * 6, "moves": [], "max_at_once": 0, "max_waiting": 4096, "stream": True}


def nothing():
    """What nobody is told."""


def stopping_sinks(tokenizer, backlog, number):
    """Sinks and outputs of so many requests that end at "END"."""
    executor = ScriptExecutor()
    generator, found = TextGenerator(executor, tokenizer, backlog=backlog), []
    for place in range(number):
        outputs = []
        request = TextRequest(text="hello", max_tokens=500, stop_words=("END",), stream=True)
        generator.submit(str(place), request, outputs.append)
        found.append((executor.request, executor.sink, outputs))
    return found


def text_of(outputs):
    return "".join(output.text for output in outputs)


def feed(tokenizer, chunks, fields, backlog=None, moves=()):
    """The outputs of a request that is fed the chunks until its sink ends it. moves: what follows each of them."""
    executor, outputs = ScriptExecutor(), []
    request = TextRequest(**{"text": "hello", "max_tokens": 500, "return_is_draft": True} | fields)
    TextGenerator(executor, tokenizer, backlog=backlog).submit("r", request, outputs.append)
    moves = iter([*moves, *[""] * len(chunks)])
    stats = executor.request.stats
    for place, chunk in enumerate(chunks):
        stats.num_steps += 1
        stats.num_accepted_tokens += len(chunk) - 1
        stats.first_scheduled_s = stats.first_scheduled_s or float(place)
        stats.last_token_s = float(place)
        if executor.sink(RequestOutput(executor.request, tuple(chunk))):
            break
        move = next(moves)
        if backlog is not None and move == "hand over":
            backlog.hand_over()
        elif backlog is not None and move == "convert":
            backlog.convert()
    else:
        executor.sink(RequestOutput(executor.request, (), FinishReason.LENGTH))
    if backlog is not None:
        backlog.convert()
    return outputs


@settings(max_examples=examples(200))
@given(
    text=st.lists(st.sampled_from(["a", "b", "ab", "é", "😀", "\n"]), max_size=15).map("".join),
    words=st.lists(st.sampled_from(["ab", "é", "😀b", "\n\n", "bab"]), max_size=2).map(tuple),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    moves=st.lists(st.sampled_from(["hand over", "convert", ""]), max_size=20),
    max_at_once=st.sampled_from([0, 1, 16]),
    max_waiting=st.sampled_from([0, 2, 4096]),
    stream=st.booleans(),
    return_statistics=st.booleans(),
)
@example(text="a\n\nb\n", words=(), return_statistics=True, **LATE)
@example(text="a\n\nb\n", words=("\n\n",), return_statistics=False, **LATE)
def test_whenever_it_is_made_the_outputs_are_the_same(
    tokenizer, text, words, sizes, moves, max_at_once, max_waiting, stream, return_statistics
):
    """With their statistics, and marks of drafts: as of the steps that committed the tokens."""
    chunks = cut(tokenizer.encode(text), sizes)
    fields = {"stop_words": words, "stream": stream, "return_statistics": return_statistics}
    with mock.patch.multiple(module, MAX_AT_ONCE=max_at_once, MAX_WAITING=max_waiting):
        late = feed(tokenizer, chunks, fields, Backlog(nothing), moves)
    assert late == feed(tokenizer, chunks, fields)


def test_outputs_wait_until_they_are_converted(tokenizer):
    told = []
    backlog = Backlog(lambda: told.append(True))
    executor, outputs = ScriptExecutor(), []
    request = TextRequest(text="hello", max_tokens=500, stream=True)
    TextGenerator(executor, tokenizer, backlog=backlog).submit("r", request, outputs.append)
    backlog.hand_over()
    assert not told, "nothing waits"
    executor.sink(RequestOutput(executor.request, tuple(tokenizer.encode("abc"))))
    assert not told, "the executor is still at work"
    backlog.hand_over()
    assert told == [True]
    assert not outputs
    backlog.convert()
    assert text_of(outputs) == "abc"


def test_the_executor_makes_the_text_itself_if_nobody_else_does(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    told = []
    backlog = Backlog(lambda: told.append(True))
    executor, outputs = ScriptExecutor(), []
    request = TextRequest(text="hello", max_tokens=500, stream=True)
    TextGenerator(executor, tokenizer, backlog=backlog).submit("r", request, outputs.append)
    for number in range(1, 9):
        executor.sink(RequestOutput(executor.request, tuple(tokenizer.encode("a"))))
        backlog.hand_over()
        assert len(outputs) == 4 * (number // 4)
    assert len(told) == 6


def test_the_first_stop_words_of_a_step_are_found_at_once_and_others_end_with_the_next_output(tokenizer):
    backlog = Backlog(nothing)
    requests = stopping_sinks(tokenizer, backlog, MAX_AT_ONCE + 2)
    ids = tuple(tokenizer.encode("one END two"))
    ended = [sink(RequestOutput(request, ids)) for request, sink, _ in requests]
    assert ended == [True] * MAX_AT_ONCE + [False] * 2
    backlog.hand_over()
    backlog.convert()
    for request, sink, _ in requests[MAX_AT_ONCE:]:
        assert sink(RequestOutput(request, ids, None))
    backlog.convert()
    for _, _, outputs in requests:
        assert text_of(outputs) == "one "
        assert [output.finish_reason for output in outputs] == ["stop"]


def test_every_step_has_its_first_ones(tokenizer):
    backlog = Backlog(nothing)
    ((request, sink, outputs),) = stopping_sinks(tokenizer, backlog, 1)
    for number in range(1, MAX_AT_ONCE + 5):
        assert not sink(RequestOutput(request, tuple(tokenizer.encode("a"))))
        assert len(outputs) == number, "it was not converted at once"
        backlog.hand_over()


def test_order_is_kept_between_what_waits_and_what_is_made_at_once(tokenizer):
    backlog = Backlog(nothing)
    requests = stopping_sinks(tokenizer, backlog, MAX_AT_ONCE + 1)
    for letter in "abc":
        for request, sink, _ in requests if letter == "a" else requests[-1:]:
            sink(RequestOutput(request, tuple(tokenizer.encode(letter))))
        backlog.hand_over()
    backlog.convert()
    assert text_of(requests[-1][2]) == "abc"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_text_that_cannot_be_made_ends_its_request_with_an_error(tokenizer, monkeypatch, is_late, reason):
    """Its client would wait for ever otherwise."""
    backlog, executor, outputs = Backlog(nothing) if is_late else None, ScriptExecutor(), []
    generator = TextGenerator(executor, tokenizer, backlog=backlog)
    generator.submit("r", TextRequest(text="hello", max_tokens=500, stream=True), outputs.append)
    monkeypatch.setattr(Tokenizer, "_token_bytes", mock.Mock(side_effect=ZeroDivisionError))
    ended = executor.sink(RequestOutput(executor.request, tuple(tokenizer.encode("a")), reason))
    if backlog is not None:
        backlog.convert()
    assert ended is not is_late, "what is made later ends with the next output"
    (output,) = outputs
    assert (output.finish_reason, output.error_code) == ("error", "INTERNAL")
    assert output.error == "the text could not be made: ZeroDivisionError; see the server's log"
    assert output.statistics.num_input_tokens == executor.request.prompt_len
    if backlog is not None:
        assert executor.sink(RequestOutput(executor.request, (), reason))


def test_outputs_that_nobody_takes_end_their_request_and_no_other(tokenizer, caplog):
    def fail(output):
        raise ZeroDivisionError

    backlog, executor, outputs = Backlog(nothing), ScriptExecutor(), []
    generator = TextGenerator(executor, tokenizer, backlog=backlog)
    sinks = []
    for on_output in (fail, outputs.append):
        generator.submit("r", TextRequest(text="hello", max_tokens=500, stream=True), on_output)
        sinks.append((executor.request, executor.sink))
    new = tuple(tokenizer.encode("a"))
    assert [sink(RequestOutput(request, new)) for request, sink in sinks] == [False, False]
    backlog.convert()
    assert "the output sink of a request failed" in caplog.text
    assert [sink(RequestOutput(request, new)) for request, sink in sinks] == [True, False]
    backlog.convert()
    assert text_of(outputs) == "aa"


def test_two_threads_convert_each_output_once_and_in_order(tokenizer):
    """As the writer and the executor may, which adds meanwhile. Every other output would let the next one overtake."""
    found = []

    def take(output):
        if output.token_ids[0] % 2:
            time.sleep(1e-4)
        found.extend(output.token_ids)

    backlog, executor = Backlog(nothing), ScriptExecutor()
    request = TextRequest(text="hello", max_tokens=500, stream=True, detokenize=False)
    TextGenerator(executor, tokenizer, backlog=backlog).submit("r", request, take)
    done = threading.Event()

    def convert():
        while not done.is_set():
            backlog.convert()

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for token in range(300):
        executor.sink(RequestOutput(executor.request, (token,)))
    wait_until(lambda: len(found) == 300)
    done.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == list(range(300))


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
