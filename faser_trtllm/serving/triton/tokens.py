"""TensorRT-LLM's models `preprocessing` and `postprocessing`: text to token ids and back, for clients that call them.

Our text models need neither. Both answer each request at once with one response; batches are padded to the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.sampling_params import check_count, check_token_ids
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.length_check import LengthCheck
from faser_trtllm.serving.text.request import MAX_STOP_CHARS, MAX_WORDS_CHARS, check_words
from faser_trtllm.serving.text.word_ids import bad_word_ids, stop_word_ids, word_ids
from faser_trtllm.serving.triton.contract import MAX_ENTRIES, MAX_PROMPTS, check_size
from faser_trtllm.serving.triton.request import text_of

Tensors = Mapping[str, npt.NDArray[Any]]

MAX_TOKENS = 1 << 18  # in all sequences that one request detokenizes: about a second of work
MAX_ANSWER_BYTES = 64 << 20
NOT_TAKEN = ("DECODER_QUERY", "IMAGE_URL", "IMAGE_BYTES", "VIDEO_BYTES", "IMAGES", "PROMPT_TABLE_EXTRA_ID")
"""Unsupported inputs, for encoder-decoder models, images and prompt tables."""

_LISTS = {
    "STOP_WORDS_DICT": MAX_ENTRIES["stop_words"],
    "BAD_WORDS_DICT": MAX_ENTRIES["bad_words"],
    "EMBEDDING_BIAS_WORDS": MAX_ENTRIES["embedding_bias_words"],
    "EMBEDDING_BIAS_WEIGHTS": MAX_ENTRIES["embedding_bias_weights"],
}


class _TokenModel:
    @staticmethod
    def check_input(name: str, shape: Sequence[int], num_bytes: int, is_text: bool) -> None:
        """Raise InvalidArgumentError for an input that is too large to read."""
        check_size(name, shape, num_bytes, is_text, _LISTS.get(name))


class Preprocessor(_TokenModel):
    """Converts text to the inputs of the model `tensorrt_llm`."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int, add_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._length = LengthCheck(tokenizer, max_seq_len)
        self._add_special_tokens = add_special_tokens
        self._end_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else -1

    def answer(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Return output tensors by name, with the batch size of QUERY; raise InvalidArgumentError."""
        _require(tensors, "QUERY", "REQUEST_OUTPUT_LEN")
        for name in NOT_TAKEN:
            if name in tensors:
                raise InvalidArgumentError("was sent, but only text is supported; leave it out", name)
        prompts = [self._prompt(text_of("QUERY", query)) for query in tensors["QUERY"].reshape(-1)]
        size = len(prompts)
        end_ids = tensors.get("END_ID", np.full((size, 1), self._end_id, np.int32))
        pad_ids = tensors.get("PAD_ID", np.full((size, 1), max(self._end_id, 0), np.int32))
        return {
            "INPUT_ID": _padded(prompts, pad_ids.reshape(-1)),
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            # For the model `tensorrt_llm`, a single 0 means "no decoder input".
            "DECODER_INPUT_ID": np.zeros((size, 1), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((size, 1), np.int32),
            "BAD_WORDS_IDS": self._word_lists(tensors, "BAD_WORDS_DICT", size, MAX_WORDS_CHARS, bad_word_ids),
            "STOP_WORDS_IDS": self._word_lists(tensors, "STOP_WORDS_DICT", size, MAX_STOP_CHARS, stop_word_ids),
            "EMBEDDING_BIAS": self._biases(tensors, size),
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"].reshape(size, -1).astype(np.int32),
            "OUT_END_ID": end_ids.reshape(size, 1).astype(np.int32),
            "OUT_PAD_ID": pad_ids.reshape(size, 1).astype(np.int32),
        }

    def _prompt(self, text: str) -> list[int]:
        self._length.check("QUERY", text, parse_special_tokens=True)
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens, parse_special_tokens=True)
        check_count("QUERY", len(ids), self._max_seq_len - 1, "tokens")
        return ids

    def _word_lists(
        self,
        tensors: Tensors,
        name: str,
        size: int,
        max_chars: int,
        ids_of: Callable[[Tokenizer, Sequence[str]], list[tuple[int, ...]]],
    ) -> npt.NDArray[np.int32]:
        """Return lists [batch, 2, n]: row 0 has the token ids of all words, row 1 where each word ends, then -1."""
        lists: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        if name in tensors:
            rows = tensors[name].reshape(size, -1)
            words = [_words(name, row, max_chars) for row in rows]
            lists = [ids_of(self._tokenizer, row) for row in words]
        width = max(1, *(sum(map(len, words)) for words in lists), *map(len, lists))
        _check_answer(name, 2 * size, width)
        found = np.zeros((size, 2, width), np.int32)
        found[:, 1] = -1
        for item, ids in zip(found, lists, strict=True):
            flat = [token for word in ids for token in word]
            item[0, : len(flat)] = flat
            item[1, : len(ids)] = np.cumsum([len(word) for word in ids])
        return found

    def _biases(self, tensors: Tensors, size: int) -> npt.NDArray[np.float32]:
        """Return biases [batch, vocab_size], or [batch, 0] without words."""
        if "EMBEDDING_BIAS_WORDS" not in tensors:
            return np.zeros((size, 0), np.float32)
        words = tensors["EMBEDDING_BIAS_WORDS"].reshape(size, -1)
        weights = tensors.get("EMBEDDING_BIAS_WEIGHTS", np.zeros((size, 0), np.float32)).reshape(size, -1)
        if words.shape != weights.shape:
            num_words, num_weights = words.shape[1], weights.shape[1]
            raise InvalidArgumentError(
                f"has {num_words} entries and EMBEDDING_BIAS_WEIGHTS {num_weights}, send one weight for each word",
                "EMBEDDING_BIAS_WORDS",
                num_words,
                num_weights,
            )
        _check_answer("EMBEDDING_BIAS_WORDS", size, self._vocab_size)
        biases = np.zeros((size, self._vocab_size), np.float32)
        for bias, row, own in zip(biases, words, weights, strict=True):
            for word, weight in zip(_words("EMBEDDING_BIAS_WORDS", row), own, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    np.add.at(bias, word_ids(self._tokenizer, word), weight)
        if not np.isfinite(biases).all():
            raise InvalidArgumentError(
                "are not finite, or their sum is not; send smaller finite numbers",
                "EMBEDDING_BIAS_WEIGHTS",
                limit="finite",
            )
        return biases


class Postprocessor(_TokenModel):
    """Converts output ids of the model `tensorrt_llm` to text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def answer(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Return OUTPUT, one text per item of the batch; raise InvalidArgumentError."""
        _require(tensors, "TOKENS_BATCH", "SEQUENCE_LENGTH")
        ids, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"].reshape(-1)
        check_count("SEQUENCE_LENGTH", lengths.size, MAX_PROMPTS)
        rows = ids.reshape(len(lengths), -1) if lengths.size and ids.size % lengths.size == 0 else None
        if rows is None:
            raise InvalidArgumentError(
                f"has {lengths.size} entries for TOKENS_BATCH of shape {list(ids.shape)}; send one length for each "
                "sequence",
                "SEQUENCE_LENGTH",
                lengths.size,
            )
        for length in lengths.tolist():
            if not 0 <= length <= rows.shape[1]:
                raise InvalidArgumentError(
                    f"is {length}, TOKENS_BATCH has {rows.shape[1]}; send at most that",
                    "SEQUENCE_LENGTH",
                    length,
                    rows.shape[1],
                )
        check_count("TOKENS_BATCH", int(lengths.sum()), MAX_TOKENS, "tokens")
        texts: list[bytes] = []
        for row, length in zip(rows, lengths, strict=True):
            own = row[:length].tolist()
            check_token_ids("TOKENS_BATCH", own, self._tokenizer.vocab_size)
            texts.append(self._tokenizer.decode(own, skip_special_tokens=self._skip_special_tokens).encode())
            check_count("OUTPUT", sum(map(len, texts)), MAX_ANSWER_BYTES, "bytes")
        return {"OUTPUT": np.array(texts, dtype=np.object_)}


def open_token_model(
    name: str, flag: Callable[[str, bool], bool], tokenizer: Tokenizer, max_seq_len: int
) -> Preprocessor | Postprocessor:
    """Return the model of this name. flag(name, default) reads a parameter of its config.pbtxt."""
    if name == "preprocessing":
        return Preprocessor(tokenizer, tokenizer.vocab_size, max_seq_len, flag("add_special_tokens", True))
    return Postprocessor(tokenizer, flag("skip_special_tokens", True))


def _require(tensors: Tensors, *names: str) -> None:
    """Check required inputs; Triton only counts inputs, so an optional one can take the place of a missing one."""
    for name in names:
        if name not in tensors:
            raise InvalidArgumentError("is missing; send it", name)


def _words(name: str, row: npt.NDArray[Any], max_chars: int = MAX_WORDS_CHARS) -> list[str]:
    check_count(name, row.size, _LISTS[name][0])
    words = [text_of(name, word) for word in row]
    check_words(name, words, row.size, max_chars)
    return words


def _padded(rows: Sequence[Sequence[int]], pads: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    width = max(map(len, rows), default=0)
    _check_answer("QUERY", len(rows), width)
    padded = np.repeat(pads.astype(np.int32)[:, None], width, axis=1)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded


def _check_answer(name: str, *shape: int) -> None:
    """Check the size of an output of 4-byte numbers. name: the input that it is computed from."""
    num_bytes = 4 * math.prod(shape)
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidArgumentError(
            f"makes an output of {num_bytes} bytes, allowed are at most {MAX_ANSWER_BYTES}; send fewer prompts at once",
            name,
            num_bytes,
            MAX_ANSWER_BYTES,
        )
