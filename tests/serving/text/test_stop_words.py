"""Stop words are found at the earliest end, whatever the pieces the text comes in."""

import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.serving.text.stop_words import StopWordFinder, StopWords

WORDS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)
TEXT = st.text(alphabet="abc", max_size=30)


def plain_search(text, words):
    """(end, length) of the word complete first, the longest of several; by trying every position."""
    for end in range(1, len(text) + 1):
        lengths = [len(word) for word in words if text[:end].endswith(word)]
        if lengths:
            return end, max(lengths)
    return None


@given(TEXT, WORDS, st.lists(st.integers(1, 5), max_size=30))
def test_any_cut_finds_what_a_plain_search_finds(text, words, sizes):
    finder = StopWordFinder(StopWords.of(words))
    start, found = 0, None
    for size in [*sizes, len(text) or 1]:
        piece = text[start : start + size]
        hit = finder.push(piece)
        if hit is not None:
            found = (start + hit[0], hit[1])
            break
        start += len(piece)
    assert found == plain_search(text, words)


@given(TEXT, WORDS)
def test_holds_the_longest_end_that_may_begin_a_word(text, words):
    finder = StopWordFinder(StopWords.of(words))
    if finder.push(text) is not None:
        return
    ends = [n for n in range(len(text) + 1) if any(w.startswith(text[len(text) - n :]) for w in words)]
    assert finder.num_held == max(ends)


def test_ignored_words_do_not_count_but_can_begin_a_later_one():
    finder = StopWordFinder(StopWords.of(["ab", "bc"]))
    assert finder.push("ab", ignore=True) is None
    assert finder.push("c") == (1, 2)


def random_words(alphabet):
    rng = random.Random(1)
    return ["".join(rng.choices(alphabet, k=128)) for _ in range(64)]


@pytest.mark.parametrize("alphabet", ["abcdefgh", [chr(token) for token in range(131_072)]], ids=["text", "tokens"])
def test_words_take_less_than_16_bytes_a_character(alphabet):
    words = random_words(alphabet)
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        automaton = StopWords.of(words)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert automaton is not None
    assert after - before < 16 * sum(map(len, words))


def test_many_words_are_found_in_the_text_of_some():
    words = random_words("ab")
    rng = random.Random(2)
    for word in rng.sample(words, 8):
        text = "".join(rng.choices("ab", k=200)) + word + "b"
        assert StopWordFinder(StopWords.of(words)).push(text) == plain_search(text, words)
