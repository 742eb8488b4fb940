"""Triton's tensors to a TextRequest, with the names of TensorRT-LLM's inflight_batcher_llm `ensemble`.

Triton has checked names and dtypes; values, sizes and missing tensors are checked here and later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text_request import MAX_WORDS, TextRequest

Tensors = Mapping[str, npt.NDArray[Any]]

MAX_REQUEST_ID_BYTES = 4096

SCALARS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "num_draft_tokens": int,
    "exclude_input_in_output": bool,
    "priority": float,
    "timeout_ms": float,
}
"""Inputs that go to the TextRequest field of the same name."""

WORDS = ("stop_words", "bad_words", "embedding_bias_words")

UNSUPPORTED_FLAGS = (
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
)
"""Declared because TensorRT-LLM's clients send them as false."""


class TritonTensor(Protocol):
    def name(self) -> str: ...
    def as_numpy(self) -> npt.NDArray[Any]: ...


class TritonRequest(Protocol):
    def inputs(self) -> list[TritonTensor]: ...
    def request_id(self) -> str: ...


class Wanted:
    """Which optional outputs a request asks for; unlike in TensorRT-LLM, counts are given unless refused."""

    __slots__ = ("num_input_tokens", "num_output_tokens")

    def __init__(self, tensors: Tensors) -> None:
        self.num_input_tokens = bool(_scalar(tensors, "return_num_input_tokens", bool, True))
        self.num_output_tokens = bool(_scalar(tensors, "return_num_output_tokens", bool, True))


def read_tensors(request: TritonRequest) -> dict[str, npt.NDArray[Any]]:
    """Inputs by name; raises InvalidArgumentError if the request id is too long."""
    num_bytes = len(request.request_id())
    if num_bytes > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(f"the request id has {num_bytes} bytes, allowed are at most {MAX_REQUEST_ID_BYTES}")
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parse_request(tensors: Tensors) -> TextRequest:
    """The request that the tensors describe; raises InvalidArgumentError in one sentence."""
    fields: dict[str, Any] = {}
    if "text_input" in tensors:
        fields["text"] = _single_text(tensors["text_input"])
    if "input_ids" in tensors:
        fields["token_ids"] = tuple(_row("input_ids", tensors["input_ids"]).tolist())
    for name, kind in SCALARS.items():
        value = _scalar(tensors, name, kind, None)
        if value is not None:
            fields[name] = value
    for name in WORDS:
        if name in tensors:
            fields[name] = _words(name, tensors[name])
    if "embedding_bias_words" in fields:
        weights = _row("embedding_bias_weights", tensors.get("embedding_bias_weights", np.zeros((1, 0), np.float32)))
        fields["embedding_bias_words"], fields["embedding_bias_weights"] = _without_empty(
            fields["embedding_bias_words"], tuple(weights.tolist())
        )
    elif "embedding_bias_weights" in tensors:
        raise InvalidArgumentError("embedding_bias_weights was sent without embedding_bias_words, send both")
    end_id = _scalar(tensors, "end_id", int, None)
    if end_id is not None:
        fields["end_ids"] = () if end_id == -1 else (end_id,)
    fields["stream"] = bool(_scalar(tensors, "stream", bool, False))
    _refuse_unsupported(tensors)
    request = TextRequest(**fields)
    request.validate()
    return request


def _refuse_unsupported(tensors: Tensors) -> None:
    beam_width = _scalar(tensors, "beam_width", int, 1)
    if beam_width != 1:
        raise InvalidArgumentError(
            f"beam_width is {beam_width}, allowed is 1; beam search is not supported with speculation"
        )
    num_sequences = _scalar(tensors, "num_return_sequences", int, 1)
    if num_sequences != 1:
        raise InvalidArgumentError(
            f"num_return_sequences is {num_sequences}, allowed is 1; send one request for each sequence"
        )
    length_penalty = _scalar(tensors, "length_penalty", float, 1.0)
    if not np.isfinite(length_penalty):
        raise InvalidArgumentError(f"length_penalty is {length_penalty}, it must be a finite number")
    for name in UNSUPPORTED_FLAGS:
        if _scalar(tensors, name, bool, False):
            raise InvalidArgumentError(f"{name} is true, which is not supported; send false or leave it out")


def _scalar(tensors: Tensors, name: str, kind: Callable[[Any], Any], default: Any) -> Any:
    if name not in tensors:
        return default
    tensor = tensors[name]
    if tensor.size != 1:
        raise InvalidArgumentError(f"{name} has {tensor.size} values, allowed is 1; send one request for each prompt")
    return kind(tensor.reshape(-1)[0])


def _row(name: str, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if tensor.ndim > 1 and tensor.shape[0] != 1:
        raise InvalidArgumentError(
            f"{name} has batch size {tensor.shape[0]}, allowed is 1; send one request for each prompt"
        )
    return tensor.reshape(-1)


def _single_text(tensor: npt.NDArray[Any]) -> str:
    if tensor.size != 1:
        raise InvalidArgumentError(f"text_input has {tensor.size} prompts, allowed is 1; send one request for each")
    return _text("text_input", tensor.reshape(-1)[0])


def _words(name: str, tensor: npt.NDArray[Any]) -> tuple[str, ...]:
    row = _row(name, tensor)
    if row.size > MAX_WORDS:
        raise InvalidArgumentError(f"{name} has {row.size} entries, allowed are at most {MAX_WORDS}")
    words = tuple(_text(name, word) for word in row)
    return words if name == "embedding_bias_words" else tuple(word for word in words if word)


def _without_empty(words: tuple[str, ...], weights: tuple[float, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """TensorRT-LLM's clients send one empty word, and no or any weight, for "none"."""
    if not any(words):
        return (), ()
    return words, weights


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not valid UTF-8 at byte {error.start}; send text encoded as UTF-8"
        ) from error
