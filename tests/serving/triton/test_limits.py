"""Inputs that are too large are refused by their shapes and sizes, before their contents are read."""

import struct

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.wire import BYTES, InputTensor, RequestFrame
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import BLS, FASER, TENSORRT_LLM
from faser_trtllm.serving.triton.request import parse_request
from tests.serving.engine_process.outbox_world import floats, ints, text
from tests.support.fake_engine import EchoExecutor

INT32, FP32 = 8, 11


def frame(name, dtype, shape, content):
    """A request with one input, whose content need not be what its shape says."""
    return RequestFrame(0, 1, "id", b"", (InputTensor(name, dtype, shape, memoryview(content)),), len(content))


UNREAD = [
    (FASER, "stop_words", BYTES, (1, 65), 4, "stop_words has 65 entries, allowed are at most 64"),
    (FASER, "stop_words", BYTES, (64, 5), 4, "stop_words has 320 entries, allowed are at most 256"),
    (FASER, "bad_words", BYTES, (1, 1_000_000), 4, "bad_words has 1000000 entries, allowed are at most 512"),
    (FASER, "bad_words", BYTES, (1, 1), 2_000_000, "bad_words has 2000000 bytes, allowed are at most 264192"),
    (BLS, "embedding_bias_words", BYTES, (1, 5000), 4, "embedding_bias_words has 5000 entries"),
    (FASER, "embedding_bias_weights", FP32, (1, 5000), 4, "embedding_bias_weights has 5000 entries"),
    (FASER, "logit_bias_ids", INT32, (1, 1 << 20), 4, "logit_bias_ids has 1048576 entries, allowed are at most 4096"),
    (FASER, "text_input", BYTES, (1, 1_000_000), 4, "text_input has 1000000 entries, allowed are at most 1"),
    (FASER, "text_input", BYTES, (257, 1), 4, "text_input has 257 prompts, allowed are at most 256"),
    (FASER, "max_tokens", INT32, (257, 1), 4, "max_tokens has 257 prompts"),
    (FASER, "decoder_text_input", BYTES, (1, 1_000_000), 4, "decoder_text_input has 1000000 entries"),
]


@pytest.mark.parametrize(("contract", "name", "dtype", "shape", "num_bytes", "message"), UNREAD)
def test_an_input_that_is_too_large_is_not_read(contract, name, dtype, shape, num_bytes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        frame(name, dtype, shape, b"\xff" * num_bytes).tensors(contract.check_input)


def test_what_fits_is_read_and_what_does_not_fit_its_shape_is_refused():
    words = b"".join(struct.pack("<I", 1) + b"x" for _ in range(64))
    found = frame("stop_words", BYTES, (1, 64), words).tensors(FASER.check_input)
    assert found["stop_words"].tolist() == [[b"x"] * 64]
    with pytest.raises(InvalidArgumentError, match="do not fit its shape"):
        frame("stop_words", BYTES, (1, 63), words).tensors(FASER.check_input)


def word_list(num_words, length):
    """TensorRT-LLM's: [1, 2, n]."""
    found = np.zeros((1, 2, max(1, num_words * length)), np.int32)
    found[:, 1] = -1
    found[0, 1, :num_words] = length * np.arange(1, num_words + 1)
    return found


PROMPT = {"input_ids": ints(1), "input_lengths": ints(1), "max_tokens": ints(4)}
BAD_LISTS = [
    ({"stop_words_list": word_list(65, 1)}, "stop_words_list has 65 entries, allowed are at most 64"),
    ({"stop_words_list": word_list(9, 1000)}, "stop_words_list has 9000 tokens, allowed are at most 8192"),
    ({"bad_words_list": word_list(1025, 1)}, "bad_words_list has 1025 entries, allowed are at most 1024"),
    ({"bad_words_list": word_list(17, 1000)}, "bad_words_list has 17000 tokens, allowed are at most 16384"),
    ({"embedding_bias": np.ones((1, 4097), np.float32)}, "embedding_bias has 4097 entries, allowed are at most 4096"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD_LISTS)
def test_lists_of_token_ids_are_bounded(tensors, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_request(PROMPT | tensors, TENSORRT_LLM)


def test_word_lists_at_their_limits_are_read():
    tensors = {"stop_words_list": word_list(64, 128), "bad_words_list": word_list(1024, 16)}
    (part,) = parse_request(PROMPT | tensors, TENSORRT_LLM)
    assert [len(word) for word in part.request.stop_token_ids] == [128] * 64
    assert [len(word) for word in part.request.bad_token_ids] == [16] * 1024


class Unread:
    """A tokenizer that must not be asked."""

    eos_token_ids = (0,)
    vocab_size = 320

    def encode(self, text, **options):
        raise AssertionError("a text was tokenized")


CHEAP = [
    ({"max_tokens": ints(-1)}, "max_tokens is -1"),
    ({"cache_salt": text("x" * 257)}, "cache_salt has 257 characters, allowed are at most 256"),
    ({"drafters": text("," * 257)}, "drafters has 257 characters, allowed are at most 256"),
    ({"logit_bias_ids": ints(999), "logit_bias_values": floats(1)}, "logit_bias holds token id 999"),
    ({"num_top_log_probs": ints(2)}, "without log probs that they go with"),
    ({"min_tokens": ints(17)}, "min_tokens is 17, allowed is 0 to max_tokens"),
]


@pytest.mark.parametrize(("tensors", "message"), CHEAP)
def test_numbers_are_checked_before_anything_is_tokenized(tensors, message):
    (part,) = parse_request({"text_input": text("hello"), "bad_words": text("x")} | tensors)
    with pytest.raises(InvalidArgumentError, match=message):
        TextGenerator(EchoExecutor(), Unread()).prepare(part.request)


def test_a_prompt_that_is_refused_costs_no_words(tokenizer, monkeypatch):
    (part,) = parse_request({"text_input": text("ab" * 600), "bad_words": text("zz", "yy")})
    encoded, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: encoded.append(text) or encode(text, **options))
    with pytest.raises(InvalidArgumentError, match=r"the prompt has .* tokens, the engine takes at most 511"):
        TextGenerator(EchoExecutor(), tokenizer).prepare(part.request)
    assert encoded == ["ab" * 600]


def test_bias_words_of_too_many_tokens_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("faser_trtllm.serving.text.service.MAX_LOGIT_BIAS", 3)
    (part,) = parse_request(
        {"text_input": text("a"), "embedding_bias_words": text("qxz7!"), "embedding_bias_weights": floats(1)}
    )
    with pytest.raises(InvalidArgumentError, match=r"logit_bias has . entries, allowed are at most 3"):
        TextGenerator(EchoExecutor(), tokenizer).prepare(part.request)


def test_a_response_that_no_frame_can_hold_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 1000)
    output = wire.output_tensor("output_ids", np.zeros((1, 1, 300), np.int32))
    with pytest.raises(
        InvalidArgumentError, match=r"the answer has 1... bytes, allowed are at most 1000; ask for less"
    ):
        wire.response(1, [output], True)
