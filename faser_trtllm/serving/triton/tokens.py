"""TensorRT-LLM's models `preprocessing` and `postprocessing`: text to token ids and back, for clients that call them.

Our text models need neither. Both answer each request at once and with one response; a batch is padded to its longest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.text.length_check import LengthCheck
from faser_trtllm.serving.text.request import MAX_STOP_WORDS, MAX_WORD_CHARS, MAX_WORDS
from faser_trtllm.serving.triton.model import parameters_of
from faser_trtllm.serving.triton.request import error_message, read_tensors

log = logging.getLogger("faser.triton")

Tensors = Mapping[str, npt.NDArray[Any]]
Answer = Callable[[Tensors], dict[str, npt.NDArray[Any]]]

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
                raise InvalidArgumentError(f"{name} was sent, but only text is supported; leave it out")
        prompts = [self._prompt(_text("QUERY", query)) for query in tensors["QUERY"].reshape(-1)]
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
            _check_count(name, rows.shape[1], limit)
            words = [[_word(name, word) for word in row] for row in rows]
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
            raise InvalidArgumentError(
                f"EMBEDDING_BIAS_WORDS has {words.shape[1]} entries and EMBEDDING_BIAS_WEIGHTS {weights.shape[1]}, "
                "send one weight for each word"
            )
        _check_count("EMBEDDING_BIAS_WORDS", words.shape[1], MAX_WORDS)
        biases = np.zeros((size, self._vocab_size), np.float32)
        for bias, row, own in zip(biases, words, weights, strict=True):
            for word, weight in zip(row, own, strict=True):
                np.add.at(bias, self._encoded(_word("EMBEDDING_BIAS_WORDS", word)), weight)
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
                f"SEQUENCE_LENGTH has {lengths.size} entries for TOKENS_BATCH of shape {list(ids.shape)}; send one "
                "length for each sequence"
            )
        texts = []
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= row.size:
                raise InvalidArgumentError(
                    f"SEQUENCE_LENGTH is {length}, TOKENS_BATCH has {row.size}; send at most that"
                )
            texts.append(self._text_of(row[:length].tolist()).encode())
        return {"OUTPUT": np.array(texts, dtype=np.object_)}

    def _text_of(self, ids: list[int]) -> str:
        for token in ids:
            if not 0 <= token < self._tokenizer.vocab_size:
                raise InvalidArgumentError(
                    f"TOKENS_BATCH holds token id {token}, the tokenizer has ids 0 to {self._tokenizer.vocab_size - 1}"
                )
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class TokenModel:
    """One of the two models. api: an EdgeApi."""

    def __init__(self, api: Any, answer: Answer) -> None:
        self._api = api
        self._answer = answer

    def execute(self, requests: Sequence[Any]) -> None:
        """One response per request, with an error of one sentence for each that is refused."""
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self._respond(request), flags=self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def end_cancelled(self) -> None:
        """Nothing to end: requests are answered at once."""

    def close(self) -> None:
        """Nothing is open."""

    def _respond(self, request: Any) -> Any:
        api = self._api
        try:
            tensors = self._answer(read_tensors(request))
        except FaserError as error:
            return self._error(request, "INVALID_ARG", str(error))
        except Exception as error:
            log.exception("a request could not be read")
            return self._error(request, "INTERNAL", f"the request could not be read: {type(error).__name__}")
        return api.InferenceResponse([api.Tensor(name, values) for name, values in tensors.items()])

    def _error(self, request: Any, code: str, message: str) -> Any:
        api = self._api
        error = api.TritonError(error_message(request, code, message), getattr(api.TritonError, code))
        return api.InferenceResponse(error=error)


def open_token_model(api: Any, args: dict[str, str], tokenizer: Tokenizer, max_seq_len: int) -> TokenModel:
    """The model of this name with the tokenizer of the engines and the longest sequence that they take."""
    values = parameters_of(args)
    if args["model_name"] == "preprocessing":
        adds = values.get("add_special_tokens", "true").lower() != "false"
        return TokenModel(api, Preprocessor(tokenizer, tokenizer.vocab_size, max_seq_len, adds).answer)
    skips = values.get("skip_special_tokens", "true").lower() != "false"
    return TokenModel(api, Postprocessor(tokenizer, skips).answer)


def _require(tensors: Tensors, *names: str) -> None:
    """Triton only counts inputs: it lets one through in whose place an optional one was sent."""
    for name in names:
        if name not in tensors:
            raise InvalidArgumentError(f"{name} is missing; send it")


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgumentError(f"{name} has {count} entries, allowed are at most {limit}")


def _word(name: str, value: Any) -> str:
    word = _text(name, value)
    if len(word) > MAX_WORD_CHARS:
        raise InvalidArgumentError(
            f"{name} holds a word of {len(word)} characters, allowed are at most {MAX_WORD_CHARS}"
        )
    return word


def _text(name: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not valid UTF-8 at byte {error.start}; send text encoded as UTF-8"
        ) from error


def _padded(rows: Sequence[Sequence[int]], pads: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[pad] * (width - len(row))] for row, pad in zip(rows, pads, strict=True)], np.int32)
