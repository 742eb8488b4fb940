"""Parses Triton's tensors into TextRequests, for the models of contract.py.

Triton has checked names and dtypes. This module checks shapes, encodings, missing inputs and inputs that no TextRequest
has; TextRequest.validate() and executor/admission.py check values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.triton.contract import FASER, ModelContract

Tensors = Mapping[str, npt.NDArray[Any]]

MAX_REQUEST_ID_BYTES = 4096
MAX_RETURN_SEQUENCES = 64
SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that all sequences of a request have different seeds

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
    "return_log_probs": bool,
    "return_context_log_probs": bool,
    "num_top_log_probs": int,
    "return_generation_logits": bool,
    "return_is_draft": bool,
}
"""Inputs copied to the TextRequest field of the same name."""

TEXTS = ("guided_decoding_guide_type", "guided_decoding_guide", "drafters")

WORDS = ("stop_words", "bad_words", "embedding_bias_words")


class TritonTensor(Protocol):
    def name(self) -> str: ...
    def as_numpy(self) -> npt.NDArray[Any]: ...


class TritonRequest(Protocol):
    def inputs(self) -> Sequence[TritonTensor]: ...
    def request_id(self) -> str: ...
    def parameters(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a Triton request: the sequence_index-th of the batch_index-th prompt."""

    request: TextRequest
    batch_index: int
    sequence_index: int


class RequestedStats:
    """The counts and times that a request asks for. The model `faser` sends counts and acceptance unless declined."""

    __slots__ = ("acceptance", "num_input_tokens", "num_output_tokens", "perf_metrics")

    def __init__(self, tensors: Tensors, contract: ModelContract = FASER) -> None:
        """tensors: by canonical names. In a batch, one item that asks is enough."""
        default = not contract.is_trtllm

        def flag(name: str, default: bool) -> bool:
            return bool(tensors[name].any()) if name in tensors else default

        self.num_input_tokens = flag("return_num_input_tokens", default)
        self.num_output_tokens = flag("return_num_output_tokens", default)
        self.perf_metrics = flag("return_perf_metrics", False)
        self.acceptance = self.perf_metrics or default


def read_tensors(request: TritonRequest) -> dict[str, npt.NDArray[Any]]:
    """Inputs by name; raises InvalidArgumentError if the request id is too long."""
    num_bytes = len(request.request_id())
    if num_bytes > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(f"the request id has {num_bytes} bytes, allowed are at most {MAX_REQUEST_ID_BYTES}")
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def error_message(request: TritonRequest, code: str, message: str) -> str:
    """The error message, prefixed with "[CODE] " if the client sent the parameter error_codes.

    A gRPC stream carries the status of an error only with Triton's header triton_grpc_error, and Triton 2.51 crashes
    when such a stream ends in an error.
    """
    wants_code = '"error_codes"' in request.parameters()
    return f"[{code}] {message}" if wants_code else message


def is_stop(tensors: Tensors) -> bool:
    """Whether the request asks to stop the requests with its id; its other inputs are dummies then."""
    return "stop" in tensors and bool(tensors["stop"].any())


def parse_request(
    tensors: Tensors, contract: ModelContract = FASER, *, normalize_log_probs: bool = False
) -> list[Part]:
    """The sequences that the tensors (by canonical names) ask for, at least one; raises InvalidArgumentError.

    With a seed s, the i-th sequence of num_return_sequences is drawn with the seed (s + i x SEED_STEP) mod 2^64: the
    samples are independent, and a separate request with that seed gives the same one.
    """
    parts: list[Part] = []
    items = _batch(tensors)
    wanted = RequestedStats(tensors, contract)
    counts = contract.is_trtllm and (wanted.num_input_tokens or wanted.num_output_tokens)
    per_response = wanted.perf_metrics or counts
    for batch_index, item in enumerate(items):
        request = _parse_item(item, contract, normalize_log_probs, may_be_padded=len(items) > 1)
        if per_response and request.stream:
            request = replace(request, return_statistics=True)
        num_sequences = _scalar(item, "num_return_sequences", int, 1)
        if not 1 <= num_sequences <= MAX_RETURN_SEQUENCES:
            raise InvalidArgumentError(
                f"num_return_sequences is {num_sequences}, allowed is 1 to {MAX_RETURN_SEQUENCES}"
            )
        parts += [Part(_with_own_seed(request, i), batch_index, i) for i in range(num_sequences)]
    return parts


def _batch(tensors: Tensors) -> list[Tensors]:
    """Split a batch into items whose tensors have batch size 1."""
    sizes = {name: tensor.shape[0] if tensor.ndim else 1 for name, tensor in tensors.items()}
    batch_size = max(sizes.values(), default=1)
    if batch_size <= 1:
        return [tensors]
    for name, size in sizes.items():
        if size != batch_size:
            raise InvalidArgumentError(f"{name} has batch size {size}, other inputs have {batch_size}; make them equal")
    return [{name: tensor[i : i + 1] for name, tensor in tensors.items()} for i in range(batch_size)]


def _with_own_seed(request: TextRequest, sequence_index: int) -> TextRequest:
    if request.seed is None or sequence_index == 0:
        return request
    return replace(request, seed=(request.seed + sequence_index * SEED_STEP) % 2**64)


def _parse_item(
    tensors: Tensors, contract: ModelContract, normalize_log_probs: bool, may_be_padded: bool
) -> TextRequest:
    fields: dict[str, Any] = {}
    for name, kind in SCALARS.items():
        value = _scalar(tensors, name, kind, None)
        if value is not None:
            fields[name] = value
    for name in TEXTS:
        if name in tensors:
            fields[name] = _single_text(name, tensors[name]) or None
    fields["stream"] = bool(_scalar(tensors, "stream", bool, False))
    end_id = _scalar(tensors, "end_id", int, None)
    if end_id is not None:
        fields["end_ids"] = () if end_id == -1 else (end_id,)
    if contract.has_text:
        _read_text(tensors, fields)
    else:
        _read_token_ids(tensors, fields, may_be_padded)
        fields.setdefault("end_ids", ())
    _refuse_unsupported(tensors)
    if contract.is_trtllm:
        _apply_trtllm_defaults(fields)
    fields["normalize_log_probs"] = normalize_log_probs and fields.get("return_log_probs", False)
    return TextRequest(**fields)


def _apply_trtllm_defaults(fields: dict[str, Any]) -> None:
    if "max_tokens" not in fields:
        raise InvalidArgumentError("max_tokens is missing, send how many tokens to generate at most")
    if fields.get("top_p") == 0.0:
        del fields["top_p"]
    if not fields.get("top_k") and "top_p" not in fields:
        fields["top_k"] = 1


def _read_text(tensors: Tensors, fields: dict[str, Any]) -> None:
    if "text_input" in tensors:
        fields["text"] = _single_text("text_input", tensors["text_input"], "prompts")
    if "input_ids" in tensors:
        fields["token_ids"] = tuple(tensors["input_ids"].reshape(-1).tolist())
    fields["logit_bias"] = _logit_bias(tensors)
    for name in WORDS:
        if name in tensors:
            fields[name] = _words(name, tensors[name])
    if "embedding_bias_words" in fields:
        weights = tensors.get("embedding_bias_weights", np.zeros(0, np.float32)).reshape(-1)
        fields["embedding_bias_words"], fields["embedding_bias_weights"] = _without_empty(
            fields["embedding_bias_words"], tuple(weights.tolist())
        )
    elif "embedding_bias_weights" in tensors:
        raise InvalidArgumentError("embedding_bias_weights was sent without embedding_bias_words, send both")


def _logit_bias(tensors: Tensors) -> tuple[tuple[int, float], ...]:
    empty = np.zeros(0)
    ids, biases = (tensors.get(name, empty).reshape(-1).tolist() for name in ("logit_bias_ids", "logit_bias_values"))
    if len(ids) != len(biases):
        raise InvalidArgumentError(
            f"logit_bias_ids has {len(ids)} entries and logit_bias_values {len(biases)}, send one value for each id"
        )
    return tuple(zip(map(int, ids), biases, strict=True))


def _read_token_ids(tensors: Tensors, fields: dict[str, Any], may_be_padded: bool) -> None:
    fields["detokenize"] = False
    if "input_ids" not in tensors:
        raise InvalidArgumentError("the prompt is missing, send input_ids")
    token_ids = tensors["input_ids"].reshape(-1)
    num_tokens = _scalar(tensors, "input_lengths", int, None)
    if num_tokens is None:
        raise InvalidArgumentError("input_lengths is missing, send the number of tokens in input_ids")
    if not 0 <= num_tokens <= token_ids.size or (num_tokens < token_ids.size and not may_be_padded):
        raise InvalidArgumentError(f"input_lengths is {num_tokens}, input_ids has {token_ids.size}; make them equal")
    fields["token_ids"] = tuple(token_ids[:num_tokens].tolist())
    if "stop_words_list" in tensors:
        fields["stop_token_ids"] = _word_list("stop_words_list", tensors["stop_words_list"])
    if "bad_words_list" in tensors:
        fields["bad_token_ids"] = _word_list("bad_words_list", tensors["bad_words_list"])
    if "embedding_bias" in tensors:
        bias = tensors["embedding_bias"].reshape(-1)
        (places,) = np.nonzero(bias)
        fields["logit_bias"] = tuple(zip(places.tolist(), bias[places].tolist(), strict=True))


def _word_list(name: str, tensor: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    """TensorRT-LLM's word lists: row 0 has the token ids of all words, row 1 each word's end offset, then -1."""
    token_ids, ends = tensor.reshape(2, -1).tolist()
    words: list[tuple[int, ...]] = []
    start = 0
    for end in ends:
        if end < 0:
            break
        if not start < end <= len(token_ids):
            raise InvalidArgumentError(
                f"{name} has a word that ends at {end}, allowed is {start + 1} to {len(token_ids)}; row 1 holds the "
                "ends of the words in row 0, then -1"
            )
        words.append(tuple(token_ids[start:end]))
        start = end
    return tuple(words)


def _refuse_unsupported(tensors: Tensors) -> None:
    beam_width = _scalar(tensors, "beam_width", int, 1)
    if beam_width != 1:
        raise InvalidArgumentError(
            f"beam_width is {beam_width}, allowed is 1; beam search is not supported with speculation"
        )
    decay = _scalar(tensors, "runtime_top_p_decay", float, 1.0)
    if decay != 1.0:
        raise InvalidArgumentError(f"runtime_top_p_decay is {decay}, allowed is 1; top_p is constant within a request")
    length_penalty = _scalar(tensors, "length_penalty", float, 1.0)
    if not np.isfinite(length_penalty):
        raise InvalidArgumentError(f"length_penalty is {length_penalty}, it must be a finite number")


def _scalar(tensors: Tensors, name: str, kind: Callable[[Any], Any], default: Any) -> Any:
    if name not in tensors:
        return default
    tensor = tensors[name]
    if tensor.size != 1:
        raise InvalidArgumentError(f"{name} has {tensor.size} values for one prompt, allowed is 1")
    return kind(tensor.reshape(-1)[0])


def _single_text(name: str, tensor: npt.NDArray[Any], what: str = "texts") -> str:
    if tensor.size != 1:
        raise InvalidArgumentError(f"{name} has {tensor.size} {what} in one item of the batch, allowed is 1")
    return _text(name, tensor.reshape(-1)[0])


def _words(name: str, tensor: npt.NDArray[Any]) -> tuple[str, ...]:
    words = tuple(_text(name, word) for word in tensor.reshape(-1))
    return words if name == "embedding_bias_words" else tuple(word for word in words if word)


def _without_empty(words: tuple[str, ...], weights: tuple[float, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """TensorRT-LLM's clients send one empty word, with or without a weight, to mean "none"."""
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
