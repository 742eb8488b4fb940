"""Requests for token ids: what they stop at, what is held back, and what they end with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.request import TextRequest
from tests.support.effort import examples
from tests.support.scripted_text import cut, joined, run


def expected(tokens, words, min_tokens):
    """Try every place: the first that ends a word wins, and of the words that end there the longest."""
    for end in range(1, len(tokens) + 1):
        ended = [len(word) for word in words if word and tuple(tokens[:end][-len(word) :]) == tuple(word)]
        if ended and end > min_tokens:
            return tokens[: end - max(ended)], "stop"
    return tokens, "length"


ids = st.sampled_from([1, 2, 3, 319])


@settings(max_examples=examples(200))
@given(
    tokens=st.lists(ids, max_size=20),
    words=st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 4), max_size=6),
    min_tokens=st.integers(0, 5),
    stream=st.booleans(),
)
def test_the_output_ends_before_the_first_sequence_wherever_steps_end(
    tokenizer, tokens, words, sizes, min_tokens, stream
):
    fields = {"detokenize": False, "stop_token_ids": words, "min_tokens": min_tokens, "stream": stream}
    outputs, stopped = run(tokenizer, cut(tokens, sizes), **fields)
    text, token_ids, reason = joined(outputs)
    assert (token_ids, reason) == expected(tokens, words, min_tokens)
    assert (text, stopped) == ("", reason == "stop")
    assert stream or len(outputs) == 1


def test_tokens_go_out_in_the_step_they_came_unless_they_may_be_stopped_at(tokenizer):
    outputs, _ = run(tokenizer, [[5], [6, 7], [1], [8]], detokenize=False, stop_token_ids=((7, 1, 2),))
    assert [output.token_ids for output in outputs] == [(5,), (6,), (7, 1, 8), ()]


BAD = [
    ({"detokenize": True, "stop_token_ids": ((1,),)}, "stop_token_ids is for requests without text"),
    ({"detokenize": False, "stop_words": ("a",)}, "stop_words needs text"),
    ({"detokenize": False, "stop_token_ids": ((1,),) * 65}, "stop_words_list has 65 entries"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_go_together_is_refused(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TextRequest(token_ids=(1,), **fields).validate()
