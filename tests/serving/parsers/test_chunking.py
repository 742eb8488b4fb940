"""One result for every way in which a text comes in pieces, and nothing that a longer text takes back."""

import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples, pick
from tests.support.parsed_output import (
    ARGUMENTS,
    FAMILIES,
    WRITERS,
    Parsed,
    Reading,
    parsed,
    random_pieces,
    random_text,
    reasoning_parsers,
)

NUM_CHUNKINGS = pick(3000, 100_000)  # of each family
LONGEST_MARK = 20


def random_reading(family, rng):
    return Reading(family, rng.choice(reasoning_parsers(family)), rng.random() < 0.3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_chunking_gives_one_result(family):
    rng = random.Random(family)
    num_chunkings = 0
    while num_chunkings < NUM_CHUNKINGS:
        text, reading = random_text(family, rng), random_reading(family, rng)
        whole = reading.parse(text)
        halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        for pieces in (text, *halves, *(random_pieces(text, rng) for _ in range(30))):
            assert reading.parse(*pieces) == whole, (reading, pieces)
            num_chunkings += 1


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_names_beyond_the_limit_end_at_the_same_place_in_every_chunking(written):
    """Also those that contain a call."""
    family, write = WRITERS[written]
    call = write([("f", "{}")])
    for num_chars in (255, 256, 257, 1000, 1023, 1024, 1025, 1100, 2100):
        text = write([("x" * num_chars + call, "{}")]) + call
        whole = Reading(family).parse(text)
        for size in (1, 7, 64, 1000):
            assert Reading(family).parse(*(text[i : i + size] for i in range(0, len(text), size))) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_taken_back(family):
    rng = random.Random(family)
    for _ in range(pick(30, 1000)):
        text, reading = random_text(family, rng), random_reading(family, rng)
        whole = reading.parse(text)
        parser, events = reading.open(), []
        for place, char in enumerate(text):
            events += parser.feed(char)
            assert whole.is_begun_by(parsed(events)), (reading, text[: place + 1])
        for cut in range(len(text)):  # a text that goes on differently
            begun = parsed(reading.open().feed(text[:cut]))
            assert reading.parse(text[:cut] + '"}]>\n</tool_call> x').is_begun_by(begun), (reading, text[:cut])


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"openai"}))  # see test_harmony
def test_no_character_is_lost_but_those_of_calls_and_space_next_to_marks(family):
    """In texts without calls, everything is content."""
    rng = random.Random(family)
    for _ in range(pick(500, 5000)):
        text = random_text(family, rng)
        found = Reading(family).parse(text)
        if not found.calls:
            assert found == Parsed(text)
        else:
            rest = iter(text)
            assert all(char in rest for char in found.content)
        nothing = Reading(family, tools=()).parse(text)
        assert nothing == Parsed(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab"\\{}[]<>/: \né😀', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab<"\\', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('abc"\\{', max_size=4), JSON, max_size=4)
SPACES = st.sampled_from([None, (",", ":"), (" ,  ", ":\n")])


@settings(max_examples=examples(400))
@given(
    written=st.sampled_from(sorted(WRITERS.keys() - {"qwen3_coder"})),
    calls=st.lists(st.tuples(st.sampled_from(["f", "get_time"]), OBJECTS), min_size=1, max_size=3),
    separators=SPACES,
    is_ascii=st.booleans(),
    content=st.sampled_from(["", "Hi.", "A {brace} and a < [b]"]),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_read(written, calls, separators, is_ascii, content, seed):
    """The arguments are the text that was written, character for character."""
    family, write = WRITERS[written]
    texts = [(name, json.dumps(value, separators=separators, ensure_ascii=is_ascii)) for name, value in calls]
    text = f"{content}\n{write(texts)}"
    found = Reading(family).parse(*random_pieces(text, random.Random(seed)))
    assert found == Parsed(content, "", tuple((name, None, text) for name, text in texts))


@pytest.mark.parametrize("written", sorted(WRITERS.keys() - {"qwen3_coder", "hermes, arguments first"}))
def test_arguments_come_as_soon_as_they_are_certain(written):
    """Each character of them with the piece that has it."""
    family, write = WRITERS[written]
    for arguments in ARGUMENTS:
        text = write([("f", arguments)])
        start = text.index(arguments)
        parser, events = Reading(family).open(), []
        for end, char in enumerate(text, 1):
            events += parser.feed(char)
            expected = arguments[: max(0, end - start)]
            assert [call[2] for call in parsed(events).calls] == [expected] * (expected != "")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_held_back_only_while_it_may_become_a_mark(family):
    text = "It is 5 < 6, [sic] and {so} on <tool_cal, [TOOL <|python fin. "
    parser, events = Reading(family, reasoning_parsers(family)[-1]).open(), []
    for end, char in enumerate(text, 1):
        events += parser.feed(char)
        assert len(parsed(events).content) >= len(text[:end].rstrip()) - LONGEST_MARK
        if char in ".,}":
            assert parsed(events).content == text[:end]


@pytest.mark.parametrize("written", sorted(WRITERS.keys() - {"qwen3_coder", "hermes, arguments first"}))
@pytest.mark.parametrize("begun", ["Hm.", "<think>Hm.", "<|channel|>analysis<|message|>Hm.", '{"b": "'])
def test_what_was_sent_is_not_kept(written, begun):
    """Text, reasoning and arguments of any length take no memory."""
    family, write = WRITERS[written]
    parser = Reading(family, reasoning_parsers(family)[-1]).open()
    parser.feed(write([("f", begun)]).partition(begun)[0] + begun if begun[0] == "{" else begun)
    tracemalloc.start()
    try:
        for _ in range(5000):
            assert parser.feed("some of many words, < [ \\n")
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


def test_plain_text_is_one_event_for_each_piece():
    """Whatever its length: it is not looked at character by character."""
    for family in FAMILIES:
        parser = Reading(family).open()
        pieces = ["word " * 1000 + "end", "a", " b" * 5000]
        assert [len(parser.feed(piece)) for piece in pieces] == [1, 1, 1]
