"""The models preprocessing and postprocessing without a server."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.triton.contract import TENSORRT_LLM
from faser_trtllm.serving.triton.request import parse_request
from faser_trtllm.serving.triton.tokens import Postprocessor, Preprocessor
from tests.support.checkpoints import BEGIN_OF_TEXT, END_OF_TEXT

TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=4)


def asked(texts, **more):
    return {
        "QUERY": np.array([[text.encode()] for text in texts], object),
        "REQUEST_OUTPUT_LEN": np.full((len(texts), 1), 5, np.int32),
    } | more


def strings(rows):
    return np.array([[word.encode() for word in row] for row in rows], object)


@given(texts=TEXTS)
def test_texts_of_a_batch_come_back(tokenizer, texts):
    found = Preprocessor(tokenizer, 320, 512).answer(asked(texts))
    lengths = found["REQUEST_INPUT_LEN"]
    assert found["INPUT_ID"].shape == (len(texts), lengths.max())
    back = Postprocessor(tokenizer).answer({"TOKENS_BATCH": found["INPUT_ID"][:, None], "SEQUENCE_LENGTH": lengths})
    expected = [tokenizer.decode(tokenizer.encode(text)) for text in texts]
    assert [text.decode() for text in back["OUTPUT"]] == expected


@given(words=st.lists(st.text(min_size=1, max_size=4), max_size=4), texts=TEXTS)
def test_words_are_what_the_token_model_reads(tokenizer, words, texts):
    rows = strings([[*words, ""]] * len(texts))
    found = Preprocessor(tokenizer, 320, 512).answer(asked(texts, STOP_WORDS_DICT=rows, BAD_WORDS_DICT=rows))
    tensors = {
        "input_ids": found["INPUT_ID"],
        "input_lengths": found["REQUEST_INPUT_LEN"],
        "max_tokens": found["REQUEST_OUTPUT_LEN"],
        "stop_words_list": found["STOP_WORDS_IDS"],
        "bad_words_list": found["BAD_WORDS_IDS"],
        "end_id": found["OUT_END_ID"],
    }
    plain = [tuple(tokenizer.encode(word, add_special_tokens=False)) for word in words]
    for part, text in zip(parse_request(tensors, TENSORRT_LLM), texts, strict=True):
        assert list(part.request.token_ids) == tokenizer.encode(text)
        assert list(part.request.stop_token_ids) == plain
        assert set(plain) <= set(part.request.bad_token_ids)
        assert part.request.end_ids == (tokenizer.eos_token_ids[0],)


def test_special_tokens_of_prompts_and_words_are_read_as_the_tokenizer_does(tokenizer):
    prompt = f"{BEGIN_OF_TEXT}ab{END_OF_TEXT}"
    begin, end = (tokenizer.token_id(token) for token in (BEGIN_OF_TEXT, END_OF_TEXT))
    more = {
        "STOP_WORDS_DICT": strings([[END_OF_TEXT]]),
        "BAD_WORDS_DICT": strings([[END_OF_TEXT]]),
        "EMBEDDING_BIAS_WORDS": strings([[BEGIN_OF_TEXT]]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[2.0]], np.float32),
    }
    found = Preprocessor(tokenizer, 320, 512, add_special_tokens=False).answer(asked([prompt], **more))
    assert found["INPUT_ID"].tolist() == [[begin, *tokenizer.encode("ab", add_special_tokens=False), end]]
    assert found["STOP_WORDS_IDS"].tolist() == [[[end], [1]]]
    assert found["BAD_WORDS_IDS"][0, 0, 0] == end
    assert np.flatnonzero(found["EMBEDDING_BIAS"]).tolist() == [begin]


def test_biases_add_up_over_the_tokens_of_their_words(tokenizer):
    more = {
        "EMBEDDING_BIAS_WORDS": strings([["a", "aa"]]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[0.5, 2.0]], np.float32),
    }
    (bias,) = Preprocessor(tokenizer, 320, 512).answer(asked(["x"], **more))["EMBEDDING_BIAS"]
    expected = np.zeros(320, np.float32)
    for word, weight in (("a", 0.5), ("aa", 2.0)):
        for token in tokenizer.encode(word, add_special_tokens=False):
            expected[token] += weight
    assert np.array_equal(bias, expected)
    assert Preprocessor(tokenizer, 320, 512).answer(asked(["x"]))["EMBEDDING_BIAS"].shape == (1, 0)


def test_a_missing_input_is_named(tokenizer):
    with pytest.raises(InvalidArgumentError, match=r"^QUERY is missing; send it$"):
        Preprocessor(tokenizer, 320, 512).answer({"REQUEST_OUTPUT_LEN": np.array([[5]], np.int32)})
    with pytest.raises(InvalidArgumentError, match=r"^SEQUENCE_LENGTH is missing; send it$"):
        Postprocessor(tokenizer).answer({"TOKENS_BATCH": np.array([[[1]]], np.int32)})


BAD_TEXTS = [
    ({"QUERY": np.array([[b"\xff"]], object)}, "QUERY is not valid UTF-8 at byte 0"),
    ({"IMAGE_URL": strings([["u"]])}, "IMAGE_URL was sent, but only text is supported"),
    ({"QUERY": strings([["ab " * 40_000]])}, "QUERY has 120000 characters, .*; shorten the prompt"),
    ({"STOP_WORDS_DICT": strings([["x"] * 65])}, "STOP_WORDS_DICT has 65 entries, allowed are at most 64"),
    ({"STOP_WORDS_DICT": strings([["x" * 1025]])}, "STOP_WORDS_DICT holds a word of 1025 characters, allowed are at"),
    (
        {"EMBEDDING_BIAS_WORDS": strings([["x"] * 1025]), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1025), np.float32)},
        "EMBEDDING_BIAS_WORDS has 1025 entries, allowed are at most 1024",
    ),
    (
        {"EMBEDDING_BIAS_WORDS": strings([["x" * 1025]]), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)},
        "EMBEDDING_BIAS_WORDS holds a word of 1025 characters",
    ),
    ({"EMBEDDING_BIAS_WORDS": strings([["x"]])}, "send one weight for each word"),
    (
        {
            "EMBEDDING_BIAS_WORDS": strings([["x", "x"]]),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[3e38, 3e38]], np.float32),
        },
        "EMBEDDING_BIAS_WEIGHTS are not finite, or their sum is not; send smaller finite numbers",
    ),
]


@pytest.mark.parametrize(("more", "message"), BAD_TEXTS)
def test_bad_texts_are_one_sentence(tokenizer, more, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Preprocessor(tokenizer, 320, 512).answer(asked(["x"]) | more)


BAD_TOKENS = [
    ([[[1, 2]]], [[3]], "SEQUENCE_LENGTH is 3, TOKENS_BATCH has 2"),
    ([[[1, 2]]], [[-1]], "SEQUENCE_LENGTH is -1"),
    ([[[1, 999]]], [[2]], "TOKENS_BATCH holds token id 999, the vocabulary has ids 0 to"),
    ([[[1, 2, 3]]], [[1, 1]], "SEQUENCE_LENGTH has 2 entries for TOKENS_BATCH of shape"),
]


@pytest.mark.parametrize(("ids", "lengths", "message"), BAD_TOKENS)
def test_bad_tokens_are_one_sentence(tokenizer, ids, lengths, message):
    tensors = {"TOKENS_BATCH": np.array(ids, np.int32), "SEQUENCE_LENGTH": np.array(lengths, np.int32)}
    with pytest.raises(InvalidArgumentError, match=message):
        Postprocessor(tokenizer).answer(tensors)
