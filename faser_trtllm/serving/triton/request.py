"""Parses Triton's tensors into TextRequests, for the models of contract.py.

Triton has checked names and dtypes. This module checks shapes, encodings, missing inputs and inputs that TextRequest
does not have; TextRequest.validate() and executor/admission.py check values.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.request_field import Bounds, Row, rows
from faser_trtllm.core.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, check_count
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.text.request import MAX_STOP_CHARS, MAX_STOP_WORDS, TextRequest
from faser_trtllm.serving.triton.contract import FASER, MAX_ENTRIES, ModelContract

Tensors = Mapping[str, npt.NDArray[Any]]

MAX_REQUEST_ID_BYTES = 4096
MAX_RETURN_SEQUENCES = 64
MAX_SEQUENCES = 256  # for all prompts of a request together
SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that all sequences of a request have different seeds


class RequestedStats:
    """The counts and times that a request asks for. The model `faser` sends counts and acceptance by default."""

    __slots__ = ("acceptance", "num_input_tokens", "num_output_tokens", "perf_metrics")

    def __init__(self, tensors: Tensors, contract: ModelContract = FASER) -> None:
        """Read the flags; tensors: by canonical names. In a batch, a flag of one item applies to all."""
        default = not contract.is_trtllm

        def flag(name: str, default: bool) -> bool:
            return bool(tensors[name].any()) if name in tensors else default

        self.num_input_tokens = flag("return_num_input_tokens", default)
        self.num_output_tokens = flag("return_num_output_tokens", default)
        self.perf_metrics = flag("return_perf_metrics", False)
        self.acceptance = self.perf_metrics or default


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a Triton request."""

    request: TextRequest
    batch_index: int | None  # of its prompt; None if the request has one prompt
    sequence_index: int | None  # among its prompt's sequences; None if each prompt has one
    stats: RequestedStats


def check_request_id(request_id: str) -> None:
    """Raise InvalidArgumentError if the request id is too long."""
    if len(request_id) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(
            f"the request id has {len(request_id)} bytes, allowed are at most {MAX_REQUEST_ID_BYTES}"
        )


def parse_request(
    tensors: Tensors,
    contract: ModelContract = FASER,
    *,
    normalize_log_probs: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    admit: Callable[[TextRequest], TextRequest] = lambda request: request,
) -> list[Part]:
    """Return the sequences, at least one, that a request asks for; raise InvalidArgumentError.

    With a seed s, the i-th sequence of num_return_sequences has the seed (s + i x SEED_STEP) mod 2^64: the samples are
    independent, and a separate request with that seed gets the same output. tensors: by canonical names. defaults:
    field values that the model's configuration sets. admit: applies the rules for clients to each request.
    """
    found: list[tuple[TextRequest, int]] = []
    items = _batch(tensors)
    wanted = RequestedStats(tensors, contract)
    counts = contract.is_trtllm and (wanted.num_input_tokens or wanted.num_output_tokens)
    per_response = wanted.perf_metrics or counts
    for item in items:
        request = admit(_parse_item(item, contract, normalize_log_probs, defaults, may_be_padded=len(items) > 1))
        if per_response and request.stream:
            request = replace(request, return_statistics=True)
        num_sequences = _scalar(item, "num_return_sequences", int, 1)
        Bounds(1, MAX_RETURN_SEQUENCES).check("num_return_sequences", num_sequences)
        found.append((request, num_sequences))
    total = sum(num_sequences for _, num_sequences in found)
    if total > MAX_SEQUENCES:
        raise InvalidArgumentError(
            f"asks for {total} sequences of {len(found)} prompts, allowed are {MAX_SEQUENCES} in all; send fewer",
            "num_return_sequences",
            total,
            MAX_SEQUENCES,
        )
    has_sequences = any(num_sequences > 1 for _, num_sequences in found)
    return [
        Part(_with_own_seed(request, i), place if len(items) > 1 else None, i if has_sequences else None, wanted)
        for place, (request, num_sequences) in enumerate(found)
        for i in range(num_sequences)
    ]


def _batch(tensors: Tensors) -> list[Tensors]:
    """Split a batch into items whose tensors have batch size 1."""
    sizes = {name: tensor.shape[0] if tensor.ndim else 1 for name, tensor in tensors.items()}
    batch_size = max(sizes.values(), default=1)
    if batch_size <= 1:
        return [tensors]
    for name, size in sizes.items():
        if size != batch_size:
            raise InvalidArgumentError(
                f"has batch size {size}, other inputs have {batch_size}; make them equal", name, size, batch_size
            )
    return [{name: tensor[i : i + 1] for name, tensor in tensors.items()} for i in range(batch_size)]


def _with_own_seed(request: TextRequest, sequence_index: int) -> TextRequest:
    if request.seed is None or sequence_index == 0:
        return request
    return replace(request, seed=(request.seed + sequence_index * SEED_STEP) % 2**64)


def _parse_item(
    tensors: Tensors,
    contract: ModelContract,
    normalize_log_probs: bool,
    defaults: Mapping[str, Any],
    may_be_padded: bool,
) -> TextRequest:
    fields: dict[str, Any] = {**defaults, "stream": _scalar(tensors, "stream", bool, False)}
    fields |= {row.name: _value(row, tensors[row.name]) for row in rows(TextRequest) if row.name in tensors}
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
        raise InvalidArgumentError("is missing, send how many tokens to generate at most", "max_tokens")
    if fields.get("top_p") == 0.0:
        del fields["top_p"]
    if not fields.get("top_k") and "top_p" not in fields:
        fields["top_k"] = 1
    fields.setdefault("parse_special_tokens", True)  # only matters for prompts that are text


def _read_text(tensors: Tensors, fields: dict[str, Any]) -> None:
    if "text_input" in tensors:
        fields["text"] = _single_text("text_input", tensors["text_input"], "prompts")
    if "input_ids" in tensors:
        fields["token_ids"] = _ids(tensors["input_ids"].reshape(-1))
    fields["logit_bias"] = _logit_bias(tensors)
    words = fields.get("embedding_bias_words")
    if words is not None:
        weights = tensors.get("embedding_bias_weights", np.zeros(0, np.float32)).reshape(-1)
        # TensorRT-LLM's clients send one empty word, with or without a weight, to mean "none".
        fields["embedding_bias_words"] = words if any(words) else ()
        fields["embedding_bias_weights"] = tuple(weights.tolist()) if any(words) else ()
    elif "embedding_bias_weights" in tensors:
        raise InvalidArgumentError("was sent without embedding_bias_words, send both", "embedding_bias_weights")


def _logit_bias(tensors: Tensors) -> tuple[tuple[int, float], ...]:
    for name in ("logit_bias_ids", "logit_bias_values"):
        if name in tensors:
            check_count(name, tensors[name].size, MAX_LOGIT_BIAS)
    empty = np.zeros(0)
    ids, biases = (tensors.get(name, empty).reshape(-1).tolist() for name in ("logit_bias_ids", "logit_bias_values"))
    if len(ids) != len(biases):
        raise InvalidArgumentError(
            f"has {len(ids)} entries and logit_bias_values {len(biases)}, send one value for each id",
            "logit_bias_ids",
            len(ids),
            len(biases),
        )
    return tuple(zip(map(int, ids), biases, strict=True))


def _read_token_ids(tensors: Tensors, fields: dict[str, Any], may_be_padded: bool) -> None:
    fields["detokenize"] = False
    if "input_ids" not in tensors:
        raise InvalidArgumentError("is missing, send input_ids", "prompt")
    token_ids = tensors["input_ids"].reshape(-1)
    num_tokens = _scalar(tensors, "input_lengths", int, None)
    if num_tokens is None:
        raise InvalidArgumentError("is missing, send the number of tokens in input_ids", "input_lengths")
    if not 0 <= num_tokens <= token_ids.size or (num_tokens < token_ids.size and not may_be_padded):
        raise InvalidArgumentError(
            f"is {num_tokens}, input_ids has {token_ids.size}; make them equal",
            "input_lengths",
            num_tokens,
            token_ids.size,
        )
    fields["token_ids"] = _ids(token_ids[:num_tokens])
    for name, field, limits in (
        ("stop_words_list", "stop_token_ids", (MAX_STOP_WORDS, MAX_STOP_CHARS)),
        ("bad_words_list", "bad_token_ids", (MAX_BAD_WORDS, MAX_BAD_TOKENS)),
    ):
        if name in tensors:
            fields[field] = _word_list(name, tensors[name], *limits)
    if "embedding_bias" in tensors:
        bias = tensors["embedding_bias"].reshape(-1)
        (places,) = np.nonzero(bias)
        check_count("embedding_bias", places.size, MAX_LOGIT_BIAS)
        fields["logit_bias"] = tuple(zip(places.tolist(), bias[places].tolist(), strict=True))


def _ids(tensor: npt.NDArray[np.int32]) -> array[int]:
    """Return token ids in 4 bytes each; a tuple would take 36."""
    return array("i", tensor.tobytes())


def _word_list(name: str, tensor: npt.NDArray[Any], max_words: int, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Read TensorRT-LLM's word lists: row 0 has the token ids of all words, row 1 each word's end offset, then -1."""
    token_ids, ends = tensor.reshape(2, -1)
    (gaps,) = np.nonzero(ends < 0)
    ends = ends[: gaps[0] if gaps.size else None]
    check_count(name, ends.size, max_words)
    words: list[tuple[int, ...]] = []
    start = 0
    for end in ends.tolist():
        if not start < end <= token_ids.size:
            limit = f"{start + 1} to {token_ids.size}"
            raise InvalidArgumentError(
                f"has a word that ends at {end}, allowed is {limit}; row 1 holds the ends of the words in row 0, then "
                "-1",
                name,
                end,
                limit,
            )
        check_count(name, end, max_tokens, "tokens")
        words.append(tuple(token_ids[start:end].tolist()))
        start = end
    return tuple(words)


def _refuse_unsupported(tensors: Tensors) -> None:
    for name, kind, why in (
        ("beam_width", int, "beam search is not supported with speculation"),
        ("runtime_top_p_decay", float, "top_p is constant within a request"),
    ):
        value = _scalar(tensors, name, kind, 1)
        if value != 1:
            raise InvalidArgumentError(f"is {value}, allowed is 1; {why}", name, value, 1)
    length_penalty = _scalar(tensors, "length_penalty", float, 1.0)
    if not np.isfinite(length_penalty):
        raise InvalidArgumentError(
            f"is {length_penalty}; it must be a finite number", "length_penalty", length_penalty, "finite"
        )


def _value(row: Row, tensor: npt.NDArray[Any]) -> Any:
    """Return the value of an input for the field of the same name."""
    if row.is_list:
        check_count(row.name, tensor.size, MAX_ENTRIES[row.name][0])
        if row.kind is int:
            return tuple(tensor.reshape(-1).tolist())
        words = tuple(text_of(row.name, word) for word in tensor.reshape(-1))
        # Empty words to bias stay, since each has a weight at its index.
        return words if row.name == "embedding_bias_words" else tuple(word for word in words if word)
    if row.kind is str:
        return _single_text(row.name, tensor) or None
    return _scalar({row.name: tensor}, row.name, row.kind, None)


def _scalar(tensors: Tensors, name: str, kind: Callable[[Any], Any], default: Any) -> Any:
    return kind(_single(name, tensors[name], "values for one prompt")) if name in tensors else default


def _single_text(name: str, tensor: npt.NDArray[Any], what: str = "texts") -> str:
    return text_of(name, _single(name, tensor, f"{what} in one item of the batch"))


def _single(name: str, tensor: npt.NDArray[Any], what: str) -> Any:
    if tensor.size != 1:
        raise InvalidArgumentError(f"has {tensor.size} {what}, allowed is 1", name, tensor.size, 1)
    return tensor.reshape(-1)[0]


def text_of(name: str, value: Any) -> str:
    """Decode an entry of an input; raise InvalidArgumentError if it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"is not valid UTF-8 at byte {error.start}; send text encoded as UTF-8", name, limit="UTF-8"
        ) from error
