"""Tensors to requests."""

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.triton.request import parse_request


def strings(*values):
    return np.array([[v if isinstance(v, bytes) else v.encode() for v in values]], dtype=object)


def ints(*values):
    return np.array([values], dtype=np.int32)


def floats(*values):
    return np.array([values], dtype=np.float32)


def flag(value):
    return np.array([[value]])


def parse_one(tensors):
    (part,) = parse_request(tensors)
    return part.request


def test_what_the_openai_frontend_sends():
    request = parse_one(
        {
            "text_input": strings("naïve"),
            "stream": flag(True),
            "max_tokens": ints(7),
            "stop_words": strings("a", "b"),
            "top_p": floats(0.5),
            "temperature": floats(0.25),
            "frequency_penalty": floats(0.5),
            "presence_penalty": floats(-0.5),
            "seed": np.array([[2**64 - 1]], dtype=np.uint64),
            "return_num_input_tokens": flag(True),
            "return_num_output_tokens": flag(True),
            "exclude_input_in_output": flag(True),
        }
    )
    assert (request.text, request.stream, request.max_tokens) == ("naïve", True, 7)
    assert (request.stop_words, request.top_p, request.temperature) == (("a", "b"), 0.5, 0.25)
    assert (request.frequency_penalty, request.presence_penalty, request.seed) == (0.5, -0.5, 2**64 - 1)
    assert request.exclude_input_in_output


def test_what_tensorrt_llm_clients_send_for_nothing():
    request = parse_one(
        {
            "text_input": strings("x"),
            "max_tokens": ints(5),
            "stop_words": strings(""),
            "bad_words": strings(""),
            "embedding_bias_words": strings(""),
            "embedding_bias_weights": floats(0.0),
            "beam_width": ints(1),
            "num_return_sequences": ints(1),
            "pad_id": ints(0),
            "length_penalty": floats(1.0),
            "return_log_probs": flag(False),
            "return_context_logits": flag(False),
        }
    )
    assert (request.stop_words, request.bad_words, request.embedding_bias_words) == ((), (), ())
    assert (request.stream, request.end_ids, request.num_draft_tokens) == (False, None, None)


def test_ids_and_end_ids():
    request = parse_one({"input_ids": ints(1, 2, 3), "end_id": ints(-1), "num_draft_tokens": ints(0)})
    assert (list(request.token_ids), request.end_ids, request.num_draft_tokens) == ([1, 2, 3], (), 0)
    assert parse_one({"input_ids": ints(1), "end_id": ints(5)}).end_ids == (5,)


def test_drafters_are_names_in_one_text():
    named = np.array([["suffix,model"]], object)
    assert parse_one({"input_ids": ints(1), "drafters": named}).drafters == "suffix,model"
    assert parse_one({"input_ids": ints(1), "drafters": np.array([[""]], object)}).drafters is None


BAD = [
    ({"max_tokens": ints(5)}, "send text_input or input_ids"),
    ({"text_input": strings("a"), "input_ids": ints(1)}, "send one of them"),
    ({"text_input": strings(b"a\xff")}, "not valid UTF-8 at byte 1"),
    ({"text_input": strings("a"), "stop_words": strings(b"\xc3")}, "stop_words is not valid UTF-8"),
    ({"text_input": strings("a", "b")}, "text_input has 2 prompts"),
    ({"text_input": strings("a"), "max_tokens": ints(1, 2)}, "max_tokens has 2 values"),
    ({"input_ids": np.zeros((2, 3), np.int32), "max_tokens": ints(1)}, "max_tokens has batch size 1"),
    ({"text_input": strings("a"), "beam_width": ints(2)}, "not supported with speculation"),
    ({"text_input": strings("a"), "num_return_sequences": ints(0)}, "num_return_sequences is 0"),
    ({"text_input": strings("a"), "num_return_sequences": ints(65)}, "num_return_sequences is 65"),
    ({"text_input": strings("a"), "stop_words": strings(*["x"] * 100_000)}, "100000 entries"),
    ({"text_input": strings("a"), "stop_words": strings(*["x" * 1024] * 9)}, "stop_words has 9216 characters"),
    ({"text_input": strings("a"), "bad_words": strings(*["x"] * 513)}, "bad_words has 513 entries"),
    ({"text_input": strings("a"), "bad_words": strings(*["x" * 1024] * 65)}, "bad_words has 66560 characters"),
    (
        {"text_input": strings("a").repeat(5, 0), "num_return_sequences": ints(52).repeat(5, 0)},
        "num_return_sequences asks for 260 sequences of 5 prompts, allowed are 256",
    ),
    ({"text_input": strings("a"), "embedding_bias_weights": floats(1)}, "without embedding_bias_words"),
    ({"text_input": strings("a"), "embedding_bias_words": strings("b")}, "one weight for each word"),
    ({"text_input": strings("a"), "length_penalty": floats(float("nan"))}, "length_penalty is nan"),
]


def parse_checked(tensors):
    """Parse the tensors and run the checks made when a request is submitted."""
    for part in parse_request(tensors):
        part.request.validate()


@pytest.mark.parametrize(("tensors", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_tensors_get_one_sentence(tensors, message):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_checked(tensors)
    assert message in str(caught.value)
