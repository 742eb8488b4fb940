"""TensorRT-LLM's models `preprocessing` and `postprocessing`: text to token ids and back, for clients that call them.

Our text models need neither. Both answer each request at once and with one response; a batch is padded to its longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.length_check import LengthCheck
from faser_trtllm.serving.text.request import MAX_STOP_WORDS, MAX_WORDS, check_words
from faser_trtllm.serving.triton.request import text_of

Tensors = Mapping[str, npt.NDArray[Any]]

NOT_TAKEN = ("DECODER_QUERY", "IMAGE_URL", "IMAGE_BYTES", "VIDEO_BYTES", "IMAGES", "PROMPT_TABLE_EXTRA_ID")
"""Inputs for encoder-decoder models, images and prompt tables, which are not supported."""


class Preprocessor:
    """Text to the inputs of the model `tensorrt_llm`."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int, add_special_tokens: bool = True
    ) -> None:
        """max_seq_len: the engine's, which takes no longer prompts."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._length = LengthCheck(tokenizer, max_seq_len)
        self._add_special_tokens = add_special_tokens
        self._end_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else -1

    def answer(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Output tensors by name, of the batch size of QUERY; raises InvalidArgumentError."""
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
            # One 0 is what the model `tensorrt_llm` takes for "no decoder input".
            "DECODER_INPUT_ID": np.zeros((size, 1), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((size, 1), np.int32),
            "BAD_WORDS_IDS": self._word_lists(tensors, "BAD_WORDS_DICT", size, MAX_WORDS, ("{}", " {}")),
            "STOP_WORDS_IDS": self._word_lists(tensors, "STOP_WORDS_DICT", size, MAX_STOP_WORDS, ("{}",)),
            "EMBEDDING_BIAS": self._biases(tensors, size),
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"].reshape(size, -1).astype(np.int32),
            "OUT_END_ID": end_ids.reshape(size, 1).astype(np.int32),
            "OUT_PAD_ID": pad_ids.reshape(size, 1).astype(np.int32),
        }

    def _prompt(self, text: str) -> list[int]:
        self._length.check("QUERY", text)
        return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens)

    def _encoded(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False)

    def _word_lists(
        self, tensors: Tensors, name: str, size: int, limit: int, spellings: Sequence[str]
    ) -> npt.NDArray[np.int32]:
        """[batch, 2, n]: row 0 has the token ids of all words, row 1 where each word ends, then -1."""
        lists: list[list[list[int]]] = [[] for _ in range(size)]
        if name in tensors:
            rows = tensors[name].reshape(size, -1)
            words = [_words(name, row, limit) for row in rows]
            lists = [[self._encoded(s.format(word)) for word in row if word for s in spellings] for row in words]
        width = max(1, *(sum(map(len, words)) for words in lists), *map(len, lists))
        found = np.zeros((size, 2, width), np.int32)
        found[:, 1] = -1
        for item, ids in zip(found, lists, strict=True):
            flat = [token for word in ids for token in word]
            item[0, : len(flat)] = flat
            item[1, : len(ids)] = np.cumsum([len(word) for word in ids])
        return found

    def _biases(self, tensors: Tensors, size: int) -> npt.NDArray[np.float32]:
        """[batch, vocab_size], or [batch, 0] without words."""
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
        biases = np.zeros((size, self._vocab_size), np.float32)
        for bias, row, own in zip(biases, words, weights, strict=True):
            for word, weight in zip(_words("EMBEDDING_BIAS_WORDS", row, MAX_WORDS), own, strict=True):
                np.add.at(bias, self._encoded(word), weight)
        return biases


class Postprocessor:
    """Output ids of the model `tensorrt_llm` to text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def answer(self, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
        """OUTPUT, one text per item of the batch; raises InvalidArgumentError."""
        _require(tensors, "TOKENS_BATCH", "SEQUENCE_LENGTH")
        ids, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"].reshape(-1)
        rows = ids.reshape(len(lengths), -1) if lengths.size and ids.size % lengths.size == 0 else None
        if rows is None:
            raise InvalidArgumentError(
                f"has {lengths.size} entries for TOKENS_BATCH of shape {list(ids.shape)}; send one length for each "
                "sequence",
                "SEQUENCE_LENGTH",
                lengths.size,
            )
        texts = []
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= row.size:
                raise InvalidArgumentError(
                    f"is {length}, TOKENS_BATCH has {row.size}; send at most that", "SEQUENCE_LENGTH", length, row.size
                )
            texts.append(self._text_of(row[:length].tolist()).encode())
        return {"OUTPUT": np.array(texts, dtype=np.object_)}

    def _text_of(self, ids: list[int]) -> str:
        for token in ids:
            if not 0 <= token < self._tokenizer.vocab_size:
                raise InvalidArgumentError(
                    f"holds token id {token}, the tokenizer has ids 0 to {self._tokenizer.vocab_size - 1}",
                    "TOKENS_BATCH",
                    token,
                    f"0 to {self._tokenizer.vocab_size - 1}",
                )
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def open_token_model(
    name: str, flag: Callable[[str, bool], bool], tokenizer: Tokenizer, max_seq_len: int
) -> Preprocessor | Postprocessor:
    """The model of this name. flag: a parameter of its config.pbtxt. max_seq_len: the engine's."""
    if name == "preprocessing":
        return Preprocessor(tokenizer, tokenizer.vocab_size, max_seq_len, flag("add_special_tokens", True))
    return Postprocessor(tokenizer, flag("skip_special_tokens", True))


def _require(tensors: Tensors, *names: str) -> None:
    """Triton only counts inputs: it lets one through in whose place an optional one was sent."""
    for name in names:
        if name not in tensors:
            raise InvalidArgumentError("is missing; send it", name)


def _words(name: str, row: npt.NDArray[Any], limit: int) -> list[str]:
    words = [text_of(name, word) for word in row]
    check_words(name, words, limit)
    return words


def _padded(rows: Sequence[Sequence[int]], pads: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[pad] * (width - len(row))] for row, pad in zip(rows, pads, strict=True)], np.int32)
